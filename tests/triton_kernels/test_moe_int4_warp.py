"""Mixtures of 4-bit experts that warps compute from registers. All but the choice needs a GPU."""

import pytest
import torch

from tests.triton_kernels.test_moe_int4 import CLAMPED, Mixture, assert_close
from triton_kernels.moe_gate import SILU, Gate
from triton_kernels.moe_gemm import sum_slots_triton
from triton_kernels.moe_int4 import fused_moe_int4_triton
from triton_kernels.moe_int4_pairs import Int4WarpsConfig, int4_pairs
from triton_kernels.moe_int4_warp import ExpertsWarpConfig, multiply_experts_warp, suits_warps
from triton_kernels.moe_route import route_triton

CONFIGS = (
    Int4WarpsConfig(ExpertsWarpConfig(2, 2, 1, 1), ExpertsWarpConfig(2, 4, 1, 2)),
    Int4WarpsConfig(ExpertsWarpConfig(1, 1, 2, 3), ExpertsWarpConfig(1, 8, 1, 1)),
)
"""With tiles that the last program computes again, with more warps than blocks, with one warp."""
SORTED_CONFIGS = (
    Int4WarpsConfig(ExpertsWarpConfig(1, 1, 1, 1, beside=4), ExpertsWarpConfig(3, 1, 1, 1, beside=2)),
    Int4WarpsConfig(ExpertsWarpConfig(1, 2, 1, 1, beside=2), ExpertsWarpConfig(2, 1, 1, 1)),
)
"""With warps beside each other, and a last turn of smaller tiles."""


def configs(one: Mixture) -> tuple[Int4WarpsConfig | None, ...]:
    """The default, and others where ptxas takes seconds: not of groups of 32 whole numbers."""
    has_few_values = one.gate_up.is_mxfp4 or one.gate_up.group > 32
    return (None, *CONFIGS) if has_few_values else (None,)


CASES = [
    ((1, 4, 2, 144, 48), 128, "plain", SILU),
    ((4, 40, 8, 640, 288), 128, "zeros", SILU),
    ((3, 3, 3, 160, 144), 64, "plain bias", SILU),
    ((2, 3, 1, 128, 32), 32, "zeros", SILU),
    ((4, 4, 2, 736, 96), 32, "mxfp4 bias", CLAMPED),
    ((1, 33, 3, 64, 352), 32, "mxfp4", SILU),
]
MORE = [(19, 4, 2), (40, 6, 3), (9, 33, 1)]
"""Tokens, experts, experts of each."""


def by_warps(one: Mixture, gate: Gate, config: Int4WarpsConfig | None) -> torch.Tensor:
    """The mixture over sorted pairs."""
    up, down = config or (None, None)
    routing = route_triton(one.logits, one.top_k, True)
    hidden = multiply_experts_warp(one.x, one.gate_up, routing, up, gated=True, gate=gate)
    partial = multiply_experts_warp(hidden, one.down, routing, down, gated=False)
    return sum_slots_triton(partial, routing, one.logits.shape[1])


@pytest.mark.parametrize(("size", "group", "kind", "gate"), CASES)
def test_each_pair_separately_equals_float64(size, group, kind, gate, device):
    if device != "cuda":
        pytest.skip("the instructions need a GPU")
    one = Mixture(size, group, kind, device)
    assert suits_warps(one.x, one.gate_up, one.down)
    expected = one.expected(gate)
    for config in configs(one):
        out = int4_pairs(one.x, one.logits, one.gate_up, one.down, one.top_k, True, gate, config)
        assert_close(out, expected)
    one.logits[0], one.x[0] = float("-inf"), float("nan")
    out = int4_pairs(one.x, one.logits, one.gate_up, one.down, one.top_k, False, gate)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out.isfinite().all()


@pytest.mark.parametrize("counts", MORE)
@pytest.mark.parametrize(("size", "group", "kind", "gate"), CASES)
def test_sorted_pairs_equal_float64(size, group, kind, gate, counts, device):
    if device != "cuda":
        pytest.skip("the instructions need a GPU")
    one = Mixture((*counts, *size[3:]), group, kind, device)
    expected = one.expected(gate)
    chosen = configs(one)
    for config in (*chosen, *SORTED_CONFIGS) if len(chosen) > 1 else chosen:
        assert_close(by_warps(one, gate, config), expected)


def test_a_row_is_the_same_in_all_batches_of_a_size_class(device):
    if device != "cuda":
        pytest.skip("the instructions need a GPU")
    one = Mixture((40, 6, 2, 736, 96), 32, "mxfp4 bias", device)
    arguments = (one.gate_up, one.down, one.top_k, True, CLAMPED)
    for rows, fewer in ((4, 1), (12, 5)):
        many = fused_moe_int4_triton(one.x[:rows], one.logits[:rows], *arguments)
        few = fused_moe_int4_triton(one.x[:fewer], one.logits[:fewer], *arguments)
        assert torch.equal(many[:fewer], few)


def test_only_bfloat16_and_whole_tiles_suit_warps():
    one = Mixture((3, 3, 2, 128, 32), 128, "plain", "cpu")
    assert not suits_warps(one.x, one.gate_up, one.down)  # float32
