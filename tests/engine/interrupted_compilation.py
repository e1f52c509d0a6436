"""An interrupt while something is compiled and a kernel waits, which is launched again then.

For test_parallel_kernel_compile.py: without a GPU, and outside of Triton's interpreter.
"""

import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton.language as tl
from test_parallel_kernel_compile import submit
from triton import AsyncCompileMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from minisgl.engine.graphs.parallel_kernel_compile import compile_kernels_in_parallel


class PretendDriver:
    """Stands in for a Hopper GPU's driver: Triton asks it what to compile for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def double(x_ptr):  # no annotations: Triton would read them
    tl.store(x_ptr, tl.load(x_ptr) * 2)


def main() -> None:
    driver.set_active(PretendDriver())  # pyright: ignore[reportArgumentType] (a stand-in)
    kernel, x = JITFunction(double), torch.zeros(1)
    begun, go_on = threading.Event(), threading.Event()
    leave = AsyncCompileMode.__exit__

    def first() -> None:
        begun.set()
        go_on.wait()

    def go_on_and_leave(self: AsyncCompileMode, *error: Any) -> None:
        go_on.set()
        leave(self, *error)

    def interrupted() -> None:
        with compile_kernels_in_parallel(1):
            submit(first, "first")
            kernel[(1,)](x)
            begun.wait()
            raise KeyboardInterrupt

    with patch.object(AsyncCompileMode, "__exit__", go_on_and_leave), pytest.raises(KeyboardInterrupt):
        interrupted()
    compiled = kernel.run(x, grid=(1,), warmup=True)
    assert isinstance(compiled, CompiledKernel)
    assert compiled.asm["cubin"]


if __name__ == "__main__":
    main()
