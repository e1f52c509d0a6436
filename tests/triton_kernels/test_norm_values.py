"""Normalised values: the reference against a formula, the kernel against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_kernels.norm_values import norm_values_reference, norm_values_triton

EPS = 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("from_keys", [False, True])
def test_reference_equals_the_formula(from_keys):
    heads = torch.randn(3, 4 if from_keys else 6, 8, dtype=torch.float64)
    out = norm_values_reference(heads.flatten(1), 16, 8, EPS, from_keys).unflatten(1, (6, 8))
    torch.testing.assert_close(out[:, :4], heads[:, :4])
    values = heads[:, -2:]
    torch.testing.assert_close(out[:, 4:], values / (values.square().mean(2, keepdim=True) + EPS).sqrt())


@settings(max_examples=20)
@given(
    tokens=st.integers(0, 5),
    query_heads=st.integers(1, 9),
    value_heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 40, 64, 256, 512]),
    from_keys=st.booleans(),
    half=st.booleans(),
    extra=st.integers(0, 3),
)
def test_kernel_equals_the_reference(tokens, query_heads, value_heads, head_dim, from_keys, half, extra):
    dtype = torch.float16 if half else torch.float32
    width = (query_heads + value_heads * (1 if from_keys else 2)) * head_dim
    rng = torch.Generator().manual_seed(width + tokens)
    qkv = torch.randn(tokens, width + extra, generator=rng).to(DEVICE, dtype)[:, :width]
    arguments = (qkv, value_heads * head_dim, head_dim, EPS, from_keys)
    got, expected = norm_values_triton(*arguments), norm_values_reference(*arguments)
    tolerance = 2e-3 if half else 1e-5
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    others = qkv.shape[1] - (0 if from_keys else value_heads * head_dim)
    assert torch.equal(got[:, :others], expected[:, :others])
