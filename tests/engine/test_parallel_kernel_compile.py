"""Kernels compiled side by side: launched by nobody, and there when they are launched."""

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from triton import AsyncCompileMode
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from minisgl.engine.graphs.decode_graphs import KernelCompilations
from minisgl.engine.graphs.parallel_kernel_compile import compile_kernels_in_parallel
from triton_kernels.silu_mul import silu_mul_reference, silu_mul_triton


def submit(run: Callable[[], object], name: str) -> None:
    """Have it run as a kernel's compilation would."""
    mode = active_mode.get()
    assert mode is not None
    num_callbacks = len(inspect.signature(mode.submit).parameters) - 2  # one more since Triton 3.9
    mode.submit(name, run, *[lambda _: None] * num_callbacks)


def test_behind_an_interrupt_launches_are_as_ever_and_what_waited_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = JITFunction.run
    begun, go_on = threading.Event(), threading.Event()
    compiled: list[str] = []
    leave = AsyncCompileMode.__exit__

    def go_on_and_leave(self: AsyncCompileMode, *error: object) -> None:
        go_on.set()
        leave(self, *error)

    def first() -> None:
        begun.set()
        go_on.wait()
        compiled.append("first")

    monkeypatch.setattr(AsyncCompileMode, "__exit__", go_on_and_leave)
    compiling = compile_kernels_in_parallel(1)
    compiling.__enter__()
    assert JITFunction.run is not run
    submit(first, "first")
    submit(lambda: compiled.append("second"), "second")
    begun.wait()
    assert not compiling.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert compiled == ["first"]
    assert JITFunction.run is run
    assert active_mode.get() is None


def test_a_kernel_that_waited_at_an_interrupt_is_compiled_when_it_is_launched_again() -> None:
    # In a process of its own: what the interpreter has run in this one can no longer be compiled.
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("interrupted_compilation.py")],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_interrupt_while_it_waits_for_the_last_kernels_leaves_nothing_switched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = JITFunction.run
    leave = AsyncCompileMode.__exit__
    calls: list[object] = []

    def interrupt(self: AsyncCompileMode, *error: object) -> None:
        calls.append(error)
        if len(calls) == 1:
            raise KeyboardInterrupt
        leave(self, *error)

    monkeypatch.setattr(AsyncCompileMode, "__exit__", interrupt)
    with pytest.raises(KeyboardInterrupt), compile_kernels_in_parallel(1):
        submit(lambda: None, "a kernel")
    assert JITFunction.run is run
    assert active_mode.get() is None
    with compile_kernels_in_parallel(1):
        submit(lambda: None, "a kernel")
    assert JITFunction.run is run


def test_a_second_engine_waits_for_its_turn() -> None:
    run = JITFunction.run
    entered = threading.Event()

    def enter() -> None:
        with compile_kernels_in_parallel(1):
            entered.set()

    other = threading.Thread(target=enter)
    with compile_kernels_in_parallel(1):
        other.start()
        assert not entered.wait(0.05)
    other.join()
    assert entered.is_set()
    assert JITFunction.run is run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_next_launch_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("runtime.jit_post_compile_hook", "compilation.listener"):
        monkeypatch.setattr(f"triton.knobs.{part}", None, raising=False)
    monkeypatch.setattr("triton.knobs.compilation.always_compile", True)
    gate_up = torch.randn(3, 2 * 977, device="cuda")
    kernels = KernelCompilations()
    with compile_kernels_in_parallel(2):
        silu_mul_triton(gate_up)
    assert (kernels.count, kernels.num_compiled) == (0, 1)
    torch.testing.assert_close(silu_mul_triton(gate_up), silu_mul_reference(gate_up))
    assert (kernels.count, kernels.num_compiled) == (0, 1)
