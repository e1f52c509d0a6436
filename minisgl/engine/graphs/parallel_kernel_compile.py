"""Compiles the Triton kernels of some steps side by side, where they would be compiled one after the other.

A launch inside of `compiled_side_by_side` launches nothing: its kernel, where there is none yet, is compiled
by another thread. What follows reads memory that nobody wrote; so no index may come from a kernel.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

_turn = threading.Lock()
"""Who has it may change `JITFunction`."""


class _Compilers(ThreadPoolExecutor):
    """Threads that compile until they are told to stop: what waits fails then."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads, "compile")
        self.stopped = False

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> "Future[Any]":
        """Run it in a thread."""

        def run() -> Any:
            if self.stopped:
                raise RuntimeError("compiling was stopped")
            return fn(*arguments, **options)

        return super().submit(run)


@contextmanager
def compiled_side_by_side(num_threads: int) -> Iterator[None]:
    """Inside, this thread's launches only compile; at the end, all they asked for is there that can be.

    A kernel that can't be compiled is not told of here: its first launch does. After an exception, Ctrl-C
    included, only what is being compiled is waited for.
    """
    with _turn, _Compilers(num_threads) as compilers:
        run, thread = JITFunction.run, threading.get_ident()
        launched: dict[int, Any] = {}

        def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if threading.get_ident() == thread:
                launched[id(self)] = self
                warmup = True
            return run(self, *arguments, grid=grid, warmup=warmup, **options)

        mode = AsyncCompileMode(compilers, ignore_errors=True)
        try:
            with mode:
                JITFunction.run = compile_only
                try:
                    yield
                except BaseException:
                    compilers.stopped = True
                    raise
                finally:
                    JITFunction.run = run
        except BaseException:
            compilers.stopped = True
            mode.__exit__(None, None, None)  # an exception in the middle of it leaves the mode on
            raise
        finally:
            _forget_uncompiled(launched.values())


def _forget_uncompiled(functions: Iterable[Any]) -> None:
    """Have the next launch compile what is not compiled.

    Triton 3.7 and 3.8 keep a compilation that failed in its kernel's place: every launch raises its error.
    """
    for function in functions:
        for kernels, *_ in function.device_caches.values():
            for key, kernel in list(kernels.items()):
                if isinstance(kernel, FutureKernel):
                    del kernels[key]
