"""Kernels compiled side by side: launched by nobody, and there when they are launched."""

import pytest
import torch
from triton.runtime.jit import JITFunction

from minisgl.engine.compiled import KernelCompilations
from minisgl.engine.side_by_side import compiled_side_by_side
from triton_kernels.silu_mul import silu_mul_reference, silu_mul_triton


def test_launches_are_as_ever_behind_an_error() -> None:
    run = JITFunction.run
    compiling = compiled_side_by_side(2)
    compiling.__enter__()
    assert JITFunction.run is not run
    assert not compiling.__exit__(RuntimeError, RuntimeError("out of luck"), None)
    assert JITFunction.run is run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_next_launch_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("runtime.jit_post_compile_hook", "compilation.listener"):
        monkeypatch.setattr(f"triton.knobs.{part}", None, raising=False)
    monkeypatch.setattr("triton.knobs.compilation.always_compile", True)
    gate_up = torch.randn(3, 2 * 977, device="cuda")
    kernels = KernelCompilations()
    with compiled_side_by_side(2):
        silu_mul_triton(gate_up)
    assert (kernels.count, kernels.num_compiled) == (0, 1)
    torch.testing.assert_close(silu_mul_triton(gate_up), silu_mul_reference(gate_up))
    assert (kernels.count, kernels.num_compiled) == (0, 1)
