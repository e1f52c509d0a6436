"""Mixtures of 4-bit experts that warps compute from registers. All but the choice needs a GPU."""

from itertools import pairwise

import pytest
import torch

from minisgl.engine.graphs.early_starts import instantiate_with_early_starts
from tests.triton_kernels.test_moe_int4 import CLAMPED, Mixture, assert_close
from triton_kernels.early_start import EARLY_KERNELS
from triton_kernels.launch import ceil_div
from triton_kernels.moe_gate import SILU, Gate
from triton_kernels.moe_gemm import sum_slots_triton
from triton_kernels.moe_int4 import fused_moe_int4_triton
from triton_kernels.moe_int4_pairs import Int4WarpsConfig, int4_pairs
from triton_kernels.moe_int4_warp import TILE_ROWS, ExpertsWarpConfig, multiply_experts_warp, suits_warps
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
"""With warps beside each other; the second product with tiles that a last turn may cut up."""


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
CUT_UP = (32, 20, 4, 672, 96)
"""The same, width, and half of gate and up: on 132 multiprocessors, the second product has a turn of tiles of
96 outputs and a few more."""


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


def test_a_last_turn_of_smaller_tiles_and_warps_beside_each_other(device):
    if device != "cuda":
        pytest.skip("the instructions need a GPU")
    one = Mixture(CUT_UP, 32, "mxfp4 bias", device)
    _, down = SORTED_CONFIGS[0]
    ends = [0, *route_triton(one.logits, one.top_k, True).expert_end.tolist()]
    tile_rows = sum(ceil_div(end - start, TILE_ROWS) for start, end in pairwise(ends))
    programs = down.programs * torch.cuda.get_device_properties(0).multi_processor_count
    rest = tile_rows * (CUT_UP[3] // (16 * down.tiles * down.beside)) % programs
    if not 0 < rest * down.tiles <= programs:
        pytest.skip("other sizes would do on this GPU")
    assert_close(by_warps(one, CLAMPED, SORTED_CONFIGS[0]), one.expected(CLAMPED))


@pytest.mark.parametrize("tokens", [4, 9, 64])
def test_a_graph_with_early_starts_follows_new_routings_to_the_same_bits(tokens, device):
    if device != "cuda":
        pytest.skip("the instructions need a GPU")
    one = Mixture((tokens, 33, 3, 192, 96), 32, "mxfp4 bias", device)
    fixed = (one.gate_up, one.down, one.top_k, True, CLAMPED)
    nowhere = torch.full_like(one.logits, float("-inf"))
    batches = [
        (one.x, one.logits),
        (one.x.flip(0), one.logits.flip(1)),
        (one.x, nowhere),
        (one.x, one.logits),
    ]
    eager = [fused_moe_int4_triton(x, logits, *fixed) for x, logits in batches]
    x, logits = one.x.clone(), one.logits.clone()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = fused_moe_int4_triton(x, logits, *fixed)
    assert instantiate_with_early_starts(graph, EARLY_KERNELS)
    for _ in range(20):
        for (new_x, new_logits), expected in zip(batches, eager, strict=True):
            x.copy_(new_x)
            logits.copy_(new_logits)
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, expected)


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
