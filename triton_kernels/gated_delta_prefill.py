"""Linear attention over the new tokens of a ragged batch of prompts, in chunks of 64 tokens.

gated_delta.py has the formulas and the shape letters, gated_delta_ends.py the first and the last launch. Row
r owns the new tokens row_start[r] : row_start[r + 1], the last of its context_len[r]; a row may own none. A
row's chunks begin at its first new token, and anew where a state in its middle is saved (`DeltaSaves`).
Tokens that no row owns yield zeros. Five launches:

    convolve   (32 tokens, head of q, k or v)  y, q and k normalised; writes the convolution states
    solve      (chunk, value head)             gated_delta_chunks.py has both: w, u, p and g of each token,
    prepare    (chunk, value head)             all that the scan needs besides the state
    scan       (row, value head, part of E)    for each chunk: n = u - w S, o = exp(g) q S + p n,
                                               S = exp(g_end) S + (exp(g_end - g) k)^T n
    gated norm (tokens)                        out = norm * o / rms(o) * silu(z)

g is the sum of the chunk's decays up to a token; decays below -30 count as -30. D and E are powers of two
from 16 to 128. Products take operands of x's dtype and sum in float32; S and g stay float32. How many columns
of S a program of the scan has depends on the number of rows, and changes no bit.

Cost for each token and value head: 6 D E FLOP (three products with S), 128 E (p n), and what
gated_delta_chunks.py says. The scan's latency, one chunk after the other, bounds single prompts; else memory,
from 9 D + 9 E + 256 numbers of 16 bits on.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.gated_delta import (
    CHUNK,
    DeltaSaves,
    DeltaStates,
    DeltaWeights,
    gated_delta_prefill_cpu,
)
from triton_kernels.gated_delta_chunks import FLOAT32_PRODUCT, Chunks, prepare_chunks
from triton_kernels.gated_delta_ends import convolve, gated_norm
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.tuning import tuned


class DeltaPrefillConfig(NamedTuple):
    """A launch configuration; one for all T, because numbers of warps change the last bits."""

    prepare_warps: int
    block_e: int  # columns of S of a program of the scan
    crowded_block_e: int  # the same, where such programs would not all run at once
    scan_warps: int
    scan_stages: int  # 2 or more for Hopper's matrix instructions: with 1, Triton 3.6 gets them wrong


def default_delta_prefill_config(
    key_dim: int, value_dim: int, element_size: int, gpu: Gpu
) -> DeltaPrefillConfig:
    """The configuration if none is given or tuned."""
    block_e = min(32, value_dim)
    if element_size > 2:
        # For tests. Eight warps in `prepare` read memory that is not theirs (heads of 16 and 32, Triton 3.6).
        return DeltaPrefillConfig(4, block_e, block_e, 8, 1)
    stages = scan_stages_that_fit(3, key_dim, block_e, gpu)
    # Where operands take registers, they would not hold 64 columns.
    crowded = min(64, value_dim) if gpu.multiplies_from_shared else block_e
    if scan_stages_that_fit(3, key_dim, crowded, gpu) < stages:
        crowded = block_e
    return DeltaPrefillConfig(8 if key_dim == value_dim == 128 else 4, block_e, crowded, 4, stages)


def scan_stages_that_fit(stages: int, key_dim: int, block_e: int, gpu: Gpu) -> int:
    """The most stages of the scan, up to `stages`, whose tiles of 16-bit numbers fit in shared memory."""
    stage_bytes = 2 * CHUNK * (3 * key_dim + CHUNK + block_e)
    return gpu.stages_that_fit(stages, stage_bytes, 2 * (key_dim + CHUNK) * block_e)


@triton.jit
def _delta_scan_kernel(
    y_ptr,
    w_ptr,
    u_ptr,
    p_ptr,
    total_ptr,
    state_ptr,
    row_ids_ptr,
    context_len_ptr,
    part_start_ptr,
    slots_ptr,
    saved_ptr,
    o_ptr,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A row has PARTS parts: 1, or 2, behind the first of which its state is saved if it has a slot."""
    C: tl.constexpr = 2 * K * D + V * E
    row = tl.program_id(2)
    first = tl.load(part_start_ptr + PARTS * row)
    middle = tl.load(part_start_ptr + PARTS * row + 1)
    end = tl.load(part_start_ptr + PARTS * row + PARTS)
    if first == end:
        return
    head = tl.program_id(1)
    key_head = head // (V // K)
    begin = tl.load(context_len_ptr + row) - (end - first)
    c = tl.arange(0, CHUNK)
    d = tl.arange(0, D)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    line = tl.load(row_ids_ptr + row).to(tl.int64)
    state_at = (line * V + head) * (D * E) + d[:, None] * E + e[None, :]
    state = tl.load(state_ptr + state_at, mask=begin > 0, other=0.0)
    saved_at = state_at
    slot = -1
    if PARTS == 2:
        slot = tl.load(slots_ptr + row)
        saved_at = (slot.to(tl.int64) * V + head) * (D * E) + d[:, None] * E + e[None, :]
    dtype = y_ptr.dtype.element_ty
    chunks_before = (middle - first + CHUNK - 1) // CHUNK
    num_chunks = chunks_before + (end - middle + CHUNK - 1) // CHUNK
    for chunk in tl.range(0, num_chunks, num_stages=STAGES):
        is_before = chunk < chunks_before
        part_end = tl.where(is_before, middle, end)
        t = tl.where(is_before, first + chunk * CHUNK, middle + (chunk - chunks_before) * CHUNK)
        t = (t + c).to(tl.int64)
        inside = (t < part_end)[:, None]
        w = tl.load(w_ptr + (t[:, None] * V + head) * D + d[None, :], inside, other=0.0)
        u = tl.load(u_ptr + (t[:, None] * V + head) * E + e[None, :], inside, other=0.0)
        q = tl.load(y_ptr + t[:, None] * C + key_head * D + d[None, :], inside, other=0.0)
        k = tl.load(y_ptr + t[:, None] * C + (K + key_head) * D + d[None, :], inside, other=0.0)
        p = tl.load(p_ptr + (t[:, None] * V + head) * CHUNK + c[None, :], inside, other=0.0)
        total = tl.load(total_ptr + t * V + head, t < part_end, other=0.0)
        at_end = tl.min(total, 0)  # decays only fall
        old = state.to(dtype)
        new = u.to(tl.float32) - tl.dot(w, old, input_precision=FLOAT32_PRODUCT)
        o = tl.dot(q, old, input_precision=FLOAT32_PRODUCT) * tl.exp(total)[:, None]
        o = tl.dot(p, new.to(dtype), o, input_precision=FLOAT32_PRODUCT)
        left = (new * tl.exp(at_end - total)[:, None]).to(dtype)
        state = tl.dot(tl.trans(k), left, state * tl.exp(at_end), input_precision=FLOAT32_PRODUCT)
        tl.store(o_ptr + (t[:, None] * V + head) * E + e[None, :], o.to(o_ptr.dtype.element_ty), inside)
        if PARTS == 2:
            tl.store(saved_ptr + saved_at, state, (chunk == chunks_before - 1) & (slot >= 0))
    tl.store(state_ptr + state_at, state)


def scan_chunks(
    y: Tensor,
    chunks: Chunks,
    states: DeltaStates,
    row_ids: Tensor,
    context_len: Tensor,
    row_start: Tensor,
    config: DeltaPrefillConfig,
    saves: DeltaSaves | None = None,
) -> Tensor:
    """o [T, V * E] of y's dtype, before the gated norm; writes the rows' recurrent states.

    Args:
        y: [T, C], what `convolve` returned.
        chunks: what `prepare_chunks` returned.
        row_ids, context_len, row_start, saves: as in `gated_delta_prefill`.
    """
    # Without saves, any pointers behind the first.
    saved = (row_start, row_ids, states.recurrent)
    if saves is not None:
        saved = (saves.part_start, saves.slots, saves.states.recurrent)
    _, num_value_heads, key_dim, value_dim = states.recurrent.shape
    num_rows = row_ids.shape[0]
    o = torch.empty((y.shape[0], num_value_heads * value_dim), dtype=y.dtype, device=y.device)
    block_e = min(config.block_e, value_dim)
    if num_rows * num_value_heads * (value_dim // block_e) > gpu_of(y.device).multiprocessors:
        block_e = min(config.crowded_block_e, value_dim)
    _delta_scan_kernel[(value_dim // block_e, num_value_heads, num_rows)](
        y,
        *chunks,
        states.recurrent,
        row_ids,
        context_len,
        *saved,
        o,
        states.num_key_heads,
        num_value_heads,
        key_dim,
        value_dim,
        CHUNK,
        block_e,
        config.scan_stages,
        1 if saves is None else 2,
        num_warps=config.scan_warps,
    )
    return o


def gated_delta_prefill_triton(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    row_ids: Tensor,
    context_len: Tensor,
    row_start: Tensor,
    eps: float,
    config: DeltaPrefillConfig | None = None,
    saves: DeltaSaves | None = None,
) -> Tensor:
    """Launch the kernels on any device."""
    device, dtype = qkvz.device, qkvz.dtype
    _, num_value_heads, key_dim, value_dim = states.recurrent.shape
    if config is None:
        default = default_delta_prefill_config(key_dim, value_dim, dtype.itemsize, gpu_of(device))
        config = tuned(
            default, "gated_delta_prefill", device, dtype, exact=(key_dim, value_dim), near=(num_value_heads,)
        )
    y = convolve(qkvz, weights, states, row_ids, context_len, row_start, saves)
    part_start = row_start if saves is None else saves.part_start
    chunks = prepare_chunks(y, ba, weights, states, part_start, config.prepare_warps)
    o = scan_chunks(y, chunks, states, row_ids, context_len, row_start, config, saves)
    return gated_norm(o, qkvz, weights.norm, row_start, states, eps)


def gated_delta_prefill(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    row_ids: Tensor,
    context_len: Tensor,
    row_start: Tensor,
    eps: float,
    saves: DeltaSaves | None = None,
) -> Tensor:
    """The new tokens of a batch: [T, V * E] of qkvz's dtype; writes the rows' lines of `states`.

    Args:
        qkvz: [T, C + V * E], the projections: q, k, v of all heads, then the gate z of the norm.
        ba: [T, 2V], b and a of each value head.
        row_ids: int32 [R], each row's line of the states, once but for the last line and rows without tokens.
        context_len: int32 [R], tokens of each row, the new ones included.
        row_start: int32 [R + 1].
        eps: of the norm.
        saves: states in the middle of rows to save, as snapshots.
    """
    run = gated_delta_prefill_cpu if qkvz.device.type == "cpu" else gated_delta_prefill_triton
    return run(qkvz, ba, weights, states, row_ids, context_len, row_start, eps, saves=saves)
