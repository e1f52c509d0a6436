"""What the ops compute on a CPU, against their references in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from triton_kernels.linear import gated_linear, linear
from triton_kernels.on_cpu import BLOCK_ROWS, FEW_ROWS, on_one_thread
from triton_kernels.packed_weights import (
    ELEMENTS_AT_ONCE,
    can_halve,
    can_pack,
    halve_weight,
    pack_weight,
    unpack_weight,
)
from triton_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from triton_kernels.rope_store import rope_store, rope_store_reference
from triton_kernels.sample import sample
from triton_kernels.sample_reference import NO_TOKEN, sample_reference
from triton_kernels.silu_mul import silu_mul, silu_mul_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = [0, 1, 3, FEW_ROWS + 1]
NAN = float("nan")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_as_exact(got: Tensor, reference: Tensor, exact: Tensor) -> None:
    """At most twice as far from float64 as the reference in the same precision, plus a rounding."""
    assert got.dtype == reference.dtype
    assert got.shape == reference.shape
    rounding = torch.finfo(got.dtype).eps * exact.norm()
    assert (got.double() - exact).norm() <= 2 * (reference.double() - exact).norm() + rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_norms_are_as_exact_as_the_reference_and_write_no_input(rows, dtype):
    x = random(rows, 2 * 37, dtype=dtype)[:, :37]  # rows lie apart
    residual, weight = random(rows, 37, dtype=dtype), 1 + 0.1 * random(37, dtype=dtype)
    before = x.clone(), residual.clone(), weight.clone()
    exact = rms_norm_reference(x.double(), weight.double(), 1e-5)
    assert_as_exact(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), exact)
    assert_as_exact(rms_norm(x, weight.float(), 1e-5), rms_norm_reference(x, weight, 1e-5), exact)
    y, total = add_rms_norm(x, residual, weight, 1e-5)
    expected, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_as_exact(y, expected, rms_norm_reference(expected_total.double(), weight.double(), 1e-5))
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight), before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [*ROWS, 2 * BLOCK_ROWS + 3])
def test_silu_mul_is_as_exact_as_the_reference_and_writes_no_input(rows, dtype):
    gate_up = random(rows, 2 * 45, dtype=dtype)[:, :74]
    before = gate_up.clone()
    exact = silu_mul_reference(gate_up.double())
    assert_as_exact(silu_mul(gate_up), silu_mul_reference(gate_up), exact)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("is_avx2", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "width"), [(0, 33, 47), (1, 33, 47), (1, 2600, 209), (2, 33, 47), (70, 33, 47)]
)
def test_linear_layers_are_as_exact_as_torchs(rows, outputs, width, dtype, is_avx2, monkeypatch):
    monkeypatch.setattr("triton_kernels.on_cpu.IS_AVX2", is_avx2)
    x = random(rows, 2 * width, dtype=dtype)[:, :width]
    weight, bias = random(2 * outputs, width, dtype=dtype), random(2 * outputs, dtype=dtype)
    for added in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        got = linear(x, weight, added)
        assert got.is_contiguous()
        assert_as_exact(got, F.linear(x, weight, added), exact)
    exact = silu_mul_reference(F.linear(x.double(), weight.double()))
    assert_as_exact(gated_linear(x, weight), silu_mul_reference(F.linear(x, weight)), exact)


@pytest.mark.parametrize(("outputs", "width"), [(33, 47), (320, 576)])
def test_packed_weights_are_as_exact_and_a_row_gets_the_same_bits_in_any_company(outputs, width):
    weight, bias = random(outputs, width, dtype=torch.bfloat16), random(outputs, dtype=torch.bfloat16)
    if not can_pack(weight):
        pytest.skip("needs a processor with AVX-512")
    packed = pack_weight(weight)
    assert torch.equal(unpack_weight(packed), weight)
    x = random(40, 2 * width, dtype=torch.bfloat16)[:, :width]
    for added in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        all_rows = linear(x, packed, added)
        assert_as_exact(all_rows, F.linear(x, weight, added), exact)
        for rows in (0, 1, 3, 8, 17):
            assert torch.equal(linear(x[:rows], packed, added), all_rows[:rows])


halves = pytest.mark.skipif(not can_halve(torch.empty(1, 1)), reason="needs an x86")


@halves
@pytest.mark.parametrize("power", [0, 20, -30])
@pytest.mark.parametrize(("outputs", "width"), [(33, 47), (320, 576), (5, 1)])
@pytest.mark.parametrize("at_once", [ELEMENTS_AT_ONCE, 300])
def test_halved_weights_hold_bfloat16_and_multiply_as_exactly_as_float32(
    outputs, width, power, at_once, monkeypatch
):
    for name in ("ELEMENTS_AT_ONCE", "ELEMENTS_CHECKED_AT_ONCE"):
        monkeypatch.setattr(f"triton_kernels.packed_weights.{name}", at_once)
    # Few elements of a real weight are far smaller than the others; here a row's are.
    weight = random(outputs, width, dtype=torch.bfloat16).float() * 2.0**power
    weight[0] *= 2.0**-12
    bias = random(outputs)
    halved = halve_weight(weight)
    assert halved is not None
    assert halved.shape == weight.shape
    assert halved.dtype == torch.float32
    assert torch.equal(unpack_weight(halved), weight)
    x = random(40, 2 * width)[:, :width]
    for added in (None, bias):
        exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
        for rows in (0, 1, 3, 8, 40):
            got, wanted = linear(x[:rows], halved, added), exact[:rows]
            assert got.dtype == torch.float32
            # Sums of one row after the other, each product rounded once.
            bound = width * torch.finfo(torch.float32).eps * x[:rows].double().abs() @ weight.double().abs().T
            assert ((got.double() - wanted).abs() <= bound + 1e-6 * wanted.abs()).all()
            assert (got.double() - wanted).norm() <= 1e-6 * wanted.norm()


@halves
def test_weights_that_float16_does_not_hold_are_not_halved():
    weight = random(33, 47, dtype=torch.bfloat16).float()
    for element in (1 + 2.0**-20, float("nan"), float("inf")):
        other = weight.clone()
        other[3, 4] = element
        assert halve_weight(other) is None
    for nothing in ((3, 4), (0, 4), (3, 0)):
        assert halve_weight(torch.zeros(nothing)) is None
    assert halve_weight(weight * 2.0**-121) is None  # would have to be multiplied by more than float32 holds
    assert halve_weight(weight) is not None
    assert halve_weight(weight, lambda: False) is None
    tiny = weight.clone()
    tiny[3, 4] = 1e-30  # less than a rounding of any sum
    halved = halve_weight(tiny)
    assert halved is not None
    tiny[3, 4] = 0
    assert torch.equal(unpack_weight(halved), tiny)
    with pytest.raises(NotImplementedError, match="packed weight"):
        halved.sum()
    assert "(33, 47)" in repr(halved)
    assert not can_halve(halved)
    assert not can_halve(weight.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norms", "values"), [("", None), ("q", "values"), ("qk", None), ("qk", "keys")])
@pytest.mark.parametrize(("tokens", "padding"), [(0, ()), (1, ()), (1, (0,)), (7, (2, 6)), (40, ())])
@pytest.mark.parametrize("contiguous", [True, False])
def test_rope_store_equals_the_reference_and_touches_no_other_memory(
    tokens, padding, norms, values, contiguous, dtype
):
    heads, kv_heads, head_dim, page_size, num_pages = 6, 2, 10, 3, 20
    width = (heads + kv_heads * (1 if values == "keys" else 2)) * head_dim
    qkv = random(tokens, 2 * width, dtype=dtype)[:, :width]
    cos_sin = random(50, head_dim)
    positions = torch.arange(tokens, dtype=torch.int32) + 4
    slots = torch.randperm(num_pages * page_size, generator=torch.Generator().manual_seed(1))[:tokens].int()
    for token in padding:  # whose position is not in the table
        slots[token], positions[token] = -1, 10_000
    weights = [random(head_dim, dtype=dtype) if part in norms else None for part in "qk"]

    def pools() -> list[Tensor]:
        shape = (num_pages, page_size, kv_heads, head_dim)
        return [
            torch.full(shape, NAN, dtype=dtype)
            if contiguous
            else torch.full((*shape[:2], 2 * kv_heads, head_dim), NAN, dtype=dtype)[:, :, :kv_heads]
            for _ in range(2)
        ]

    before, got, expected = qkv.clone(), pools(), pools()
    q_weight, k_weight = weights
    more = (q_weight, k_weight, 1e-6, None, values)
    q = rope_store(qkv, cos_sin, positions, slots, got[0], got[1], *more)
    expected_q = rope_store_reference(qkv, cos_sin, positions, slots, expected[0], expected[1], *more)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(q, expected_q, rtol=tolerance, atol=tolerance)
    for pool, expected_pool in zip(got, expected, strict=True):
        torch.testing.assert_close(pool, expected_pool, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("temperature", [[0.0] * 5, [1.0] * 5, [0.0, 0.7, 1.3, 0.0, 1e-12]])
@pytest.mark.parametrize("limit", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1)])
def test_samples_equal_the_reference(temperature, limit):
    logits = random(5, 211, dtype=torch.bfloat16)
    logits[1, ::2], logits[2, 5], logits[3, 7], logits[4, :] = -torch.inf, torch.inf, NAN, -torch.inf
    top_k, top_p, min_p = limit
    for draw in range(20):
        arguments = (
            logits,
            torch.tensor(temperature),
            torch.full((5,), top_k, dtype=torch.int32),
            torch.full((5,), top_p),
            torch.full((5,), min_p),
            torch.arange(5) * 1000 + draw,
            torch.full((5,), draw, dtype=torch.int32),
        )
        got = sample(*arguments)
        assert torch.equal(got, sample_reference(*arguments))
        assert got[4] == NO_TOKEN


def test_the_number_of_threads_is_restored_after_an_error():
    num_threads = torch.get_num_threads()
    with pytest.raises(RuntimeError):
        on_one_thread(torch.mv, torch.zeros(2, 3), torch.zeros(2))
    assert torch.get_num_threads() == num_threads
