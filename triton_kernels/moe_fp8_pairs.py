"""FP8 experts of one or two tokens: each (token, expert) pair separately, no sort.

As moe_pairs.py, which says how programs of one warp read weights; the formulas, kinds of scales and shape
letters are those of moe_fp8.py. Rows of x come rounded to FP8. A program of the second launch rounds the
rows of h itself, each of which it needs whole anyway: what all of them do again takes less than a launch.

The numbers are multiplied in float32, scales of blocks with each product. So sums have other last bits than
those of more tokens, which the tensor cores make.

Cost: 3 * M * F bytes for each pair's expert; if tokens share an expert, once more from L2. Memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.e4m3 import LARGEST, as_fp8
from triton_kernels.early_start import after_predecessor, between_kernels, can_start_early
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.moe_fp8_gemm import _GIVEN, _GROUPS, _ROW, Fp8Rows
from triton_kernels.moe_pairs import PairsConfig, _load_tile
from triton_kernels.moe_route import expert_lanes, key_logits, load_keys, pick_expert
from triton_kernels.quantize_fp8 import GROUP, SMALLEST_PEAK

MOST_TOKENS = 2
"""Four are slower than by moe_fp8_gemm.py. One request's step has two, of which one is padding."""
FP8_PAIRS = PairsConfig(2, 512, 4, 2, 1024, 4)
BLOCK_SCALED_PAIRS = PairsConfig(4, 512, 2, 2, 256, 12)
"""With scales of blocks, which a program loads for every column, narrow tiles are faster."""
_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_PEAK = tl.constexpr(SMALLEST_PEAK)
_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["num_tokens"])
def _pairs_up_fp8_kernel(
    x_ptr,
    x_scale_ptr,
    logits_ptr,
    gate_up_ptr,
    w_scale_ptr,
    hidden_ptr,
    num_tokens,
    logits_stride,
    K: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """K: columns of x and of the weights, M or more."""
    EVEN: tl.constexpr = K % BLOCK_K == 0 and F % BLOCK_N == 0
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BLOCKS: tl.constexpr = SCALES == _GROUPS
    GROUPS: tl.constexpr = (K + _GROUP - 1) // _GROUP
    SCALE_ROWS: tl.constexpr = (F + _GROUP - 1) // _GROUP
    slot = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = tl.arange(0, BLOCK_E)
    lanes = tl.arange(0, BLOCK_K)
    num_tokens = between_kernels(num_tokens, EARLY)
    for token in range(num_tokens):
        keys = load_keys(logits_ptr + token * logits_stride, ids, E)
        expert, key, keys = pick_expert(keys, ids, BLOCK_E)
        if key_logits(key) > float("-inf"):
            for _ in range(slot):
                expert, key, keys = pick_expert(keys, ids, BLOCK_E)
            gate_ptrs = gate_up_ptr + expert.to(tl.int64) * (2 * F * K) + rows[:, None] * K + lanes[None, :]
            gates = ()
            ups = ()
            for i in tl.static_range(AHEAD):
                gate = _load_tile(gate_ptrs, rows, lanes, i * BLOCK_K, F, K, EVEN)
                up = _load_tile(gate_ptrs + F * K, rows, lanes, i * BLOCK_K, F, K, EVEN)
                gates = gates + (gate,)  # noqa: RUF005 (the compiler knows no star)
                ups = ups + (up,)  # noqa: RUF005 (as above)
            gate_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            up_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            for i in tl.static_range(STEPS):
                if i + AHEAD < STEPS:
                    gate = _load_tile(gate_ptrs, rows, lanes, (i + AHEAD) * BLOCK_K, F, K, EVEN)
                    up = _load_tile(gate_ptrs + F * K, rows, lanes, (i + AHEAD) * BLOCK_K, F, K, EVEN)
                    gates = gates + (gate,)  # noqa: RUF005 (as above)
                    ups = ups + (up,)  # noqa: RUF005 (as above)
                columns = i * BLOCK_K + lanes
                x = tl.load(x_ptr + token * K + columns, columns < K, other=0.0).to(tl.float32)
                if BLOCKS:
                    groups = tl.minimum(columns, K - 1) // _GROUP
                    x = x * tl.load(x_scale_ptr + groups * num_tokens + token)
                    # BLOCK_N divides 128, so the rows lie in one block.
                    block = expert * (2 * SCALE_ROWS) + tl.program_id(0) * BLOCK_N // _GROUP
                    gate_scale = tl.load(w_scale_ptr + block * GROUPS + groups)
                    up_scale = tl.load(w_scale_ptr + (block + SCALE_ROWS) * GROUPS + groups)
                    gate_sum += gates[i].to(tl.float32) * (x * gate_scale)[None, :]
                    up_sum += ups[i].to(tl.float32) * (x * up_scale)[None, :]
                else:
                    gate_sum += gates[i].to(tl.float32) * x[None, :]
                    up_sum += ups[i].to(tl.float32) * x[None, :]
            gate = tl.sum(gate_sum, 1)
            up = tl.sum(up_sum, 1)
            if not BLOCKS:
                scale = tl.load(x_scale_ptr + (token if SCALES == _ROW else 0))
                w_scale_ptrs = w_scale_ptr + expert * (2 * F) + rows
                gate *= scale * tl.load(w_scale_ptrs, rows < F, other=0.0)
                up *= scale * tl.load(w_scale_ptrs + F, rows < F, other=0.0)
            hidden = gate * tl.sigmoid(gate) * up
            hidden_ptrs = hidden_ptr + (token * TOP_K + slot) * F + rows
            tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), rows < F)


@triton.jit
def _load_hidden(hidden_ptrs, lanes, k0, F: tl.constexpr):
    return tl.load(hidden_ptrs + k0, k0 + lanes < F, other=0.0).to(tl.float32)


@triton.jit
def _round_groups(hidden, BLOCK_K: tl.constexpr):
    """The float32 values of hidden [BLOCK_K] rounded to FP8 with a scale for each 128, times that scale."""
    parts = tl.reshape(hidden, [BLOCK_K // _GROUP, _GROUP])
    scales = tl.maximum(tl.max(tl.abs(parts), 1), _SMALLEST_PEAK) / _LARGEST
    rounded = as_fp8(parts / scales[:, None]).to(tl.float32) * scales[:, None]
    return tl.reshape(rounded, [BLOCK_K])


@triton.jit
def _down_sum_fp8(
    tiles,
    matrices,
    experts,
    masses,
    hidden_ptrs,
    hidden_scale_ptr,
    w_scale_ptr,
    rows,
    lanes,
    M: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A token's output before its division by the masses' sum; the first `tiles` are already loading."""
    STEPS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = K % BLOCK_K == 0 and M % BLOCK_N == 0
    GROUPS: tl.constexpr = (K + _GROUP - 1) // _GROUP
    SCALE_ROWS: tl.constexpr = (M + _GROUP - 1) // _GROUP
    all_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for slot in tl.static_range(SLOTS):
        expert = experts[slot]
        row_ptrs = hidden_ptrs + slot * F
        scale = 0.0
        if SCALES == _ROW:
            peak = tl.zeros([BLOCK_K], tl.float32)
            for i in tl.static_range(STEPS):
                peak = tl.maximum(peak, tl.abs(_load_hidden(row_ptrs, lanes, i * BLOCK_K, F)))
            scale = tl.maximum(tl.max(peak, 0), _SMALLEST_PEAK) / _LARGEST
        elif SCALES == _GIVEN:
            scale = tl.load(hidden_scale_ptr + expert)
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for i in tl.static_range(STEPS):
            if slot * STEPS + i + AHEAD < SLOTS * STEPS:
                ptrs = matrices[(slot * STEPS + i + AHEAD) // STEPS]
                k0 = (slot * STEPS + i + AHEAD) % STEPS * BLOCK_K
                tiles = tiles + (_load_tile(ptrs, rows, lanes, k0, M, K, EVEN),)  # noqa: RUF005 (as above)
            hidden = _load_hidden(row_ptrs, lanes, i * BLOCK_K, F)
            if SCALES == _GROUPS:
                hidden = _round_groups(hidden, BLOCK_K)
                block = expert * SCALE_ROWS + tl.program_id(0) * BLOCK_N // _GROUP
                groups = tl.minimum(i * BLOCK_K + lanes, K - 1) // _GROUP
                hidden = hidden * tl.load(w_scale_ptr + block * GROUPS + groups)
            else:
                hidden = tl.minimum(tl.maximum(hidden / scale, -_LARGEST, _NAN), _LARGEST, _NAN)
                hidden = as_fp8(hidden).to(tl.float32)
            sums += tiles[slot * STEPS + i].to(tl.float32) * hidden[None, :]
        factor = tl.zeros([BLOCK_N], tl.float32) + masses[slot]
        if SCALES != _GROUPS:
            factor *= scale * tl.load(w_scale_ptr + expert * M + rows, rows < M, other=0.0)
        all_sums += sums * factor[:, None]
    return tl.sum(all_sums, 1)


@triton.jit(do_not_specialize=["num_tokens"])
def _pairs_down_fp8_kernel(
    hidden_ptr,
    hidden_scale_ptr,
    logits_ptr,
    down_ptr,
    w_scale_ptr,
    out_ptr,
    num_tokens,
    logits_stride,
    M: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """K: columns of the weights, F or more."""
    STEPS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = tl.arange(0, BLOCK_E)
    lanes = tl.arange(0, BLOCK_K)
    for token in range(num_tokens):
        # The kernel that wrote the logits has ended: the first kernel waits for it before it lets this one
        # begin to run.
        keys = load_keys(logits_ptr + token * logits_stride, ids, E)
        top = key_logits(tl.max(keys, 0))
        somewhere = top > float("-inf")
        all_masses = tl.where(ids < E, tl.exp(key_logits(keys) - top), 0.0)
        total = 0.0 if RENORMALIZE else tl.sum(all_masses, 0)
        matrices = ()
        experts = ()
        masses = ()
        for _ in tl.static_range(TOP_K):
            expert, key, keys = pick_expert(keys, ids, BLOCK_E)
            mass = tl.exp(key_logits(key) - top)
            if RENORMALIZE:
                total += mass
            tile_ptrs = down_ptr + expert.to(tl.int64) * (M * K) + rows[:, None] * K + lanes[None, :]
            matrices = matrices + (tile_ptrs,)  # noqa: RUF005 (the compiler knows no star)
            experts = experts + (expert,)  # noqa: RUF005 (as above)
            masses = masses + (mass,)  # noqa: RUF005 (as above)
        tiles = ()
        wanted = tl.where(somewhere, rows, M)
        for i in tl.static_range(AHEAD):
            tile = _load_tile(matrices[i // STEPS], wanted, lanes, i % STEPS * BLOCK_K, M, K, False)
            tiles = tiles + (tile,)  # noqa: RUF005 (as above)
        token = after_predecessor(token, EARLY)
        out = tl.zeros([BLOCK_N], tl.float32)
        if somewhere:
            out = _down_sum_fp8(
                tiles,
                matrices,
                experts,
                masses,
                hidden_ptr + token * (TOP_K * F) + lanes,
                hidden_scale_ptr,
                w_scale_ptr,
                rows,
                lanes,
                M,
                F,
                K,
                SCALES,
                TOP_K,
                BLOCK_N,
                BLOCK_K,
                AHEAD,
            )
            out = out / total
        tl.store(out_ptr + token * M + rows, out.to(out_ptr.dtype.element_ty), rows < M)


def moe_fp8_pairs_triton(
    rows: Fp8Rows,
    logits: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    hidden_scale: Tensor | None,
    top_k: int,
    renormalize: bool,
    dtype: torch.dtype,
    config: PairsConfig | None = None,
) -> Tensor:
    """The whole mixture, [T, M] of `dtype`; weights and scales as `Fp8ExpertWeights` has them.

    Args:
        rows: of all tokens, with as many columns as gate_up.
        logits: [T, E].
        dtype: to which h is rounded before it is rounded to FP8.
    """
    num_experts, width, padded_half = down.shape
    expert_width, padded_width = gate_up.shape[1] // 2, gate_up.shape[2]
    num_tokens = rows.values.shape[0]
    device = rows.values.device
    kind = _ROW
    if gate_up_scale.dim() > 2:
        kind = _GROUPS
    elif hidden_scale is not None:
        kind = _GIVEN
    config = config or (BLOCK_SCALED_PAIRS if kind is _GROUPS else FP8_PAIRS)
    hidden = torch.empty((num_tokens * top_k, expert_width), dtype=dtype, device=device)
    out = torch.empty((num_tokens, width), dtype=dtype, device=device)
    early = can_start_early(device)
    up_block_k = min(config.up_block_k, next_power_of_2(padded_width))
    down_block_k = min(config.down_block_k, max(GROUP, next_power_of_2(expert_width)))
    _pairs_up_fp8_kernel[(ceil_div(expert_width, config.up_block_n), top_k)](
        rows.values,
        rows.scales,
        logits,
        gate_up,
        gate_up_scale,
        hidden,
        num_tokens,
        logits.stride(0),
        padded_width,
        expert_width,
        num_experts,
        top_k,
        kind.value,
        expert_lanes(num_experts),
        config.up_block_n,
        up_block_k,
        min(config.up_ahead, ceil_div(padded_width, up_block_k)),
        early,
        num_warps=1,
    )
    _pairs_down_fp8_kernel[(ceil_div(width, config.down_block_n),)](
        hidden,
        down_scale if hidden_scale is None else hidden_scale,
        logits,
        down,
        down_scale,
        out,
        num_tokens,
        logits.stride(0),
        width,
        expert_width,
        padded_half,
        num_experts,
        top_k,
        renormalize,
        kind.value,
        expert_lanes(num_experts),
        config.down_block_n,
        down_block_k,
        min(config.down_ahead, top_k * ceil_div(expert_width, down_block_k)),
        early,
        num_warps=1,
        launch_pdl=early,
    )
    return out
