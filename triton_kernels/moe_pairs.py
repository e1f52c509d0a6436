"""A mixture of experts for one to a few tokens: each (token, expert) pair separately, no sort, two launches.

    hidden[t, s] = silu(gate[e] @ x[t]) * (up[e] @ x[t])          e = the s-th expert of token t
    out[t]       = sum over s of weight[t, s] * down[e] @ hidden[t, s]
                   both products with a bias of the expert, if there is one, weight with a scale of it;
                   moe_gate.py has other activations

A shared expert (fused_moe.py) is one more slot of every token, with expert E and a weight of its own.

T tokens, E experts, M model width, F expert width; gate[e] and up[e] are the upper and lower F rows of
gate_up[e]. Routing as in moe_route.py; each program repeats it, which costs less than a launch. Float32
inside; hidden and out are rounded once each.

Reading the weights dominates. A program is a single warp (no barriers) with a few rows of weights; it loads
the next tiles into registers while it multiplies one on the ordinary cores. The second launch may start
during the first: it finds the experts itself, and prefetches its first tiles of weights. Programs process
the tokens one after the other; padding tokens end at once.

Cost: the weights of each pair's expert: if tokens share an expert, once more from L2. Memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import after_predecessor, between_kernels, can_start_early
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.moe_gate import SILU, Gate, bent_gate, bent_up
from triton_kernels.moe_route import expert_lanes, key_logits, load_keys, pick_expert


class PairsConfig(NamedTuple):
    """A launch configuration of moe_pairs; a tile is block_n rows and block_k columns of a matrix."""

    up_block_n: int = 4
    up_block_k: int = 512
    up_ahead: int = 1  # tiles of gate and of up that are prefetched while one is multiplied
    down_block_n: int = 2
    down_block_k: int = 256
    down_ahead: int = 12


@triton.jit
def _load_tile(ptrs, rows, lanes, k0, ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load weights, which are read once; zeros beyond the matrix unless it is EVEN."""
    if EVEN:
        return tl.load(ptrs + k0, eviction_policy="evict_first")
    else:
        inside = (rows < ROWS)[:, None] & (k0 + lanes < WIDTH)[None, :]
        return tl.load(ptrs + k0, inside, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["num_tokens"])
def _pairs_up_kernel(
    x_ptr,
    logits_ptr,
    gate_up_ptr,
    bias_ptr,
    hidden_ptr,
    num_tokens,
    x_stride,
    logits_stride,
    M: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    EVEN: tl.constexpr = M % BLOCK_K == 0 and F % BLOCK_N == 0
    STEPS: tl.constexpr = (M + BLOCK_K - 1) // BLOCK_K
    slot = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ids = tl.arange(0, BLOCK_E)
    lanes = tl.arange(0, BLOCK_K)
    num_tokens = between_kernels(num_tokens, EARLY)
    for token in range(num_tokens):
        keys = load_keys(logits_ptr + token * logits_stride, ids, E)
        expert, key, keys = pick_expert(keys, ids, BLOCK_E)
        if key_logits(key) > float("-inf"):
            for _ in range(tl.where(slot == TOP_K, 0, slot) if SHARED else slot):
                expert, key, keys = pick_expert(keys, ids, BLOCK_E)
            if SHARED:
                expert = tl.where(slot == TOP_K, E, expert)
            gate_ptrs = gate_up_ptr + expert.to(tl.int64) * (2 * F * M) + rows[:, None] * M + lanes[None, :]
            gates = ()
            ups = ()
            for i in tl.static_range(AHEAD):
                gate = _load_tile(gate_ptrs, rows, lanes, i * BLOCK_K, F, M, EVEN)
                up = _load_tile(gate_ptrs + F * M, rows, lanes, i * BLOCK_K, F, M, EVEN)
                gates = gates + (gate,)  # noqa: RUF005 (the compiler knows no star)
                ups = ups + (up,)  # noqa: RUF005 (as above)
            gate_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            up_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            for i in tl.static_range(STEPS):
                if i + AHEAD < STEPS:
                    gate = _load_tile(gate_ptrs, rows, lanes, (i + AHEAD) * BLOCK_K, F, M, EVEN)
                    up = _load_tile(gate_ptrs + F * M, rows, lanes, (i + AHEAD) * BLOCK_K, F, M, EVEN)
                    gates = gates + (gate,)  # noqa: RUF005 (as above)
                    ups = ups + (up,)  # noqa: RUF005 (as above)
                x_ptrs = x_ptr + token * x_stride + i * BLOCK_K + lanes
                x = tl.load(x_ptrs) if EVEN else tl.load(x_ptrs, i * BLOCK_K + lanes < M, other=0.0)
                x = x.to(tl.float32)[None, :]
                gate_sum += gates[i].to(tl.float32) * x
                up_sum += ups[i].to(tl.float32) * x
            gate = tl.sum(gate_sum, 1)
            if BIAS:
                bias_ptrs = bias_ptr + expert * (2 * F) + rows
                gate += tl.load(bias_ptrs, rows < F, other=0.0).to(tl.float32)
            hidden = bent_gate(gate, GATE, ALPHA, LIMIT)
            up = tl.sum(up_sum, 1)
            if BIAS:
                up += tl.load(bias_ptrs + F, rows < F, other=0.0).to(tl.float32)
            hidden = hidden * bent_up(up, GATE, LIMIT)
            hidden_ptrs = hidden_ptr + (token * (TOP_K + SHARED) + slot) * F + rows
            tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), rows < F)


@triton.jit
def _down_sum(
    tiles,
    matrices,
    masses,
    hidden_ptrs,
    rows,
    lanes,
    M: tl.constexpr,
    F: tl.constexpr,
    EVEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A token's output before its division by the masses' sum; the first `tiles` are already loading."""
    STEPS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(SLOTS * STEPS):
        if i + AHEAD < SLOTS * STEPS:
            ptrs = matrices[(i + AHEAD) // STEPS]
            tile = _load_tile(ptrs, rows, lanes, (i + AHEAD) % STEPS * BLOCK_K, M, F, EVEN)
            tiles = tiles + (tile,)  # noqa: RUF005 (as above)
        k0 = i % STEPS * BLOCK_K
        ptrs = hidden_ptrs + (i // STEPS * F + k0)
        hidden = tl.load(ptrs) if EVEN else tl.load(ptrs, k0 + lanes < F, other=0.0)
        acc += tiles[i].to(tl.float32) * (hidden.to(tl.float32) * masses[i // STEPS])[None, :]
    return tl.sum(acc, 1)


@triton.jit(do_not_specialize=["num_tokens"])
def _pairs_down_kernel(
    hidden_ptr,
    logits_ptr,
    down_ptr,
    bias_ptr,
    scales_ptr,
    out_ptr,
    num_tokens,
    logits_stride,
    M: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    EVEN: tl.constexpr = F % BLOCK_K == 0 and M % BLOCK_N == 0
    STEPS: tl.constexpr = (F + BLOCK_K - 1) // BLOCK_K
    SLOTS: tl.constexpr = TOP_K + SHARED
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
        masses = ()
        bias = tl.zeros([BLOCK_N], tl.float32)
        for _ in tl.static_range(TOP_K):
            expert, key, keys = pick_expert(keys, ids, BLOCK_E)
            mass = tl.exp(key_logits(key) - top)
            if RENORMALIZE:
                total += mass
            if SCALES:
                mass *= tl.load(scales_ptr + expert).to(tl.float32)
            tile_ptrs = down_ptr + expert.to(tl.int64) * (M * F) + rows[:, None] * F + lanes[None, :]
            matrices = matrices + (tile_ptrs,)  # noqa: RUF005 (the compiler knows no star)
            masses = masses + (mass,)  # noqa: RUF005 (as above)
            if BIAS:
                bias += mass * tl.load(bias_ptr + expert * M + rows, rows < M, other=0.0).to(tl.float32)
        if SHARED:
            tile_ptrs = down_ptr + E * M * F + rows[:, None] * F + lanes[None, :]
            matrices = matrices + (tile_ptrs,)  # noqa: RUF005 (as above)
            # Its weight is not divided by the others' sum, so it is multiplied by it first.
            logit = tl.load(logits_ptr + token * logits_stride + E).to(tl.float32)
            masses = masses + (total * tl.sigmoid(logit),)  # noqa: RUF005 (as above)
        tiles = ()
        wanted = tl.where(somewhere, rows, M)
        for i in tl.static_range(AHEAD):
            tile = _load_tile(matrices[i // STEPS], wanted, lanes, i % STEPS * BLOCK_K, M, F, False)
            tiles = tiles + (tile,)  # noqa: RUF005 (as above)
        token = after_predecessor(token, EARLY)
        out = tl.zeros([BLOCK_N], tl.float32)
        if somewhere:
            hidden_ptrs = hidden_ptr + token * (SLOTS * F) + lanes
            out = _down_sum(
                tiles, matrices, masses, hidden_ptrs, rows, lanes, M, F, EVEN, SLOTS, BLOCK_N, BLOCK_K, AHEAD
            )
            if BIAS:
                out += bias
            out = out / total
        tl.store(out_ptr + token * M + rows, out.to(out_ptr.dtype.element_ty), rows < M)


def moe_pairs_triton(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalize: bool,
    config: PairsConfig,
    biases: tuple[Tensor, Tensor] | None = None,
    gate: Gate = SILU,
    *,
    shared: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """The whole mixture, [T, M] of x [T, M], logits [T, E], gate_up [E, 2F, M], down [E, M, F].

    biases: of gate_up, [E, 2F], and of down, [E, M]. shared: the weights have expert E too, all tokens', and
    the logits its gate's column; it has no biases. scales: factors [E] of the chosen experts' weights.
    """
    gate_up_bias, down_bias = biases or (x, x)
    num_tokens, width = x.shape
    num_experts, expert_width = down.shape[0] - shared, down.shape[2]
    slots = top_k + shared
    hidden = torch.empty((num_tokens * slots, expert_width), dtype=x.dtype, device=x.device)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    early = can_start_early(x.device)
    up_block_k = min(config.up_block_k, next_power_of_2(width))
    down_block_k = min(config.down_block_k, next_power_of_2(expert_width))
    _pairs_up_kernel[(ceil_div(expert_width, config.up_block_n), slots)](
        x,
        logits,
        gate_up,
        gate_up_bias,
        hidden,
        num_tokens,
        x.stride(0),
        logits.stride(0),
        width,
        expert_width,
        num_experts,
        top_k,
        shared,
        biases is not None,
        int(gate.kind),
        gate.alpha,
        gate.limit,
        expert_lanes(num_experts),
        config.up_block_n,
        up_block_k,
        min(config.up_ahead, ceil_div(width, up_block_k)),
        early,
        num_warps=1,
    )
    _pairs_down_kernel[(ceil_div(width, config.down_block_n),)](
        hidden,
        logits,
        down,
        down_bias,
        x if scales is None else scales,
        out,
        num_tokens,
        logits.stride(0),
        width,
        expert_width,
        num_experts,
        top_k,
        shared,
        renormalize,
        biases is not None,
        scales is not None,
        expert_lanes(num_experts),
        config.down_block_n,
        down_block_k,
        min(config.down_ahead, slots * ceil_div(expert_width, down_block_k)),
        early,
        num_warps=1,
        launch_pdl=early,
    )
    return out
