"""Compiles the Triton kernels of some steps in parallel threads.

Within `compile_kernels_in_parallel`, a launch runs nothing. If its kernel is not compiled yet, another thread
compiles it. Later launches read memory that no kernel wrote, so no index may come from a kernel.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, FutureKernel
from triton.runtime.jit import JITFunction

_turn = threading.Lock()
"""The lock to hold while `JITFunction.run` is replaced."""


class _Compilers(ThreadPoolExecutor):
    """A pool of compiling threads. After `stopped` is set, waiting compilations fail."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads, "compile")
        self.stopped = False

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **options: Any) -> "Future[Any]":
        """Run the function in a thread, unless the pool was stopped."""

        def run() -> Any:
            if self.stopped:
                raise RuntimeError("compiling was stopped")
            return fn(*arguments, **options)

        return super().submit(run)


@contextmanager
def compile_kernels_in_parallel(num_threads: int) -> Iterator[None]:
    """Within this context, this thread's launches only compile. At its end, all compilations have ended.

    A kernel that can't be compiled raises at its first real launch, not here. After an exception, Ctrl-C
    included, the context waits only for compilations that have begun.
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
            mode.__exit__(None, None, None)  # an exception within its exit leaves the mode on
            raise
        finally:
            _forget_uncompiled(launched.values())


def _forget_uncompiled(functions: Iterable[Any]) -> None:
    """Remove failed compilations, so that the next launch compiles again.

    Triton 3.7 and 3.8 cache a failed compilation like a kernel, and every launch would raise its error.
    """
    for function in functions:
        for kernels, *_ in function.device_caches.values():
            for key, kernel in list(kernels.items()):
                if isinstance(kernel, FutureKernel):
                    del kernels[key]
