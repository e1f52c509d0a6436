"""SiLU-mul and GELU-mul: references against float64 formulas, the kernel against the references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_kernels.silu_mul import (
    gelu_tanh_mul,
    gelu_tanh_mul_reference,
    gelu_tanh_mul_triton,
    silu_mul,
    silu_mul_reference,
    silu_mul_triton,
)


def test_reference_equals_the_formula():
    gate_up = torch.randn(6, 34)
    gate, up = gate_up[:, :17].double(), gate_up[:, 17:].double()
    torch.testing.assert_close(silu_mul(gate_up).double(), gate / (1 + torch.exp(-gate)) * up)


def test_gelu_reference_equals_the_formula():
    gate_up = torch.randn(6, 34)
    gate, up = gate_up[:, :17].double(), gate_up[:, 17:].double()
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_tanh_mul(gate_up).double(), gate / 2 * (1 + torch.tanh(inner)) * up)


@pytest.mark.parametrize(
    ("kernel", "reference"),
    [(silu_mul_triton, silu_mul_reference), (gelu_tanh_mul_triton, gelu_tanh_mul_reference)],
)
@settings(max_examples=20)
@given(tokens=st.integers(1, 9), width=st.integers(1, 1500), half=st.booleans())
def test_kernel_equals_the_reference(kernel, reference, tokens, width, half):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator().manual_seed(width)
    gate_up = (3 * torch.randn((tokens, 2 * width + 1), generator=rng)).to(device)[:, :-1]
    gate_up = gate_up.half() if half else gate_up
    tolerance = 2e-3 if half else 1e-5
    torch.testing.assert_close(kernel(gate_up), reference(gate_up), atol=tolerance, rtol=tolerance)


def test_large_gates_do_not_overflow(device):
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 2.0, 2.0]], device=device)
    assert silu_mul_triton(gate_up).tolist() == [[0.0, 2e4, 0.0]]
    assert gelu_tanh_mul_triton(gate_up).tolist()[0][:2] == [0.0, 2e4]
