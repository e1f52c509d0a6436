"""Compiles the Triton kernels of some steps side by side, where they would be compiled one after the other.

A launch inside of `compiled_side_by_side` launches nothing: its kernel, where there is none yet, is compiled
by another thread. What follows reads memory that nobody wrote; so no index may come from a kernel.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction


@contextmanager
def compiled_side_by_side(num_threads: int) -> Iterator[None]:
    """Inside, this thread's launches only compile; at the end, all they asked for is there.

    A kernel that can't be compiled is not told of here: its first launch does.
    """
    run = JITFunction.run
    thread = threading.get_ident()

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        warmup = warmup or threading.get_ident() == thread
        return run(self, *arguments, grid=grid, warmup=warmup, **options)

    with ThreadPoolExecutor(num_threads) as executor, AsyncCompileMode(executor, ignore_errors=True):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = run
