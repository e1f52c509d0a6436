"""Linear attention over the new tokens of a ragged batch of prompts, in chunks of 64 tokens.

gated_delta.py has the formulas and the shape letters, gated_delta_ends.py the first and the last launch. Row
r owns the new tokens row_start[r] : row_start[r + 1], the last of its context_len[r]; a row may own none. A
row's chunks begin at its first new token. Tokens that no row owns yield zeros. Four launches:

    convolve   (chunk, head of q, k or v)  y, q and k normalised; writes the convolution states
    prepare    (chunk, value head)         M = (I + strictly lower(beta k k^T exp(g_i - g_j)))^-1 in blocks of
                                           16; w = M (beta exp(g) k), u = M (beta v), p = lower(q k^T ...)
    scan       (row, value head, part of E)    for each chunk: n = u - w S, o = exp(g) q S + p n,
                                               S = exp(g_end) S + (exp(g_end - g) k)^T n
    gated norm (tokens)                    out = norm * o / rms(o) * silu(z)

g is the sum of the chunk's decays up to a token; decays below -30 count as -30. D and E are powers of two
from 16 to 128. Products take operands of x's dtype and sum in float32; S, g and M stay float32.

Cost for each token and value head: 2 D E (3 products with S) + 64 (2 D + 2 E) FLOP: the scan's latency, one
chunk after the other, bounds single prompts; else memory, about 2 * (6 D + 5 E + 64) bytes.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.gated_delta import CHUNK, DeltaStates, DeltaWeights, gated_delta_prefill_cpu
from triton_kernels.gated_delta_ends import BLOCK_R, convolve, find_chunk, gated_norm, num_chunks_of, softplus
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.tuning import tuned

_PRECISION = tl.constexpr("tf32x3")
"""Of products of float32: about its own, by matrix instructions."""


class DeltaPrefillConfig(NamedTuple):
    """A launch configuration; one for all T, because it changes the last bits."""

    prepare_warps: int
    block_e: int  # columns of S of a program of the scan
    scan_warps: int
    scan_stages: int  # 2 or more for Hopper's matrix instructions: with 1, Triton 3.6 gets them wrong


def default_delta_prefill_config(
    key_dim: int, value_dim: int, element_size: int, gpu: Gpu
) -> DeltaPrefillConfig:
    """The configuration if none is given or tuned."""
    block_e = min(32, value_dim)
    stage_bytes = element_size * CHUNK * (3 * key_dim + CHUNK + block_e)
    other_bytes = element_size * (key_dim + CHUNK) * block_e
    stages = gpu.stages_that_fit(2, stage_bytes, other_bytes)
    if element_size > 2:
        return DeltaPrefillConfig(8, block_e, 8, 1)  # float32 is for tests
    return DeltaPrefillConfig(4, block_e, 4, stages)


@triton.jit
def _inverse_of_diagonal(pairs, beta, total):
    """(I + A)^-1 of a block, A[r, s] = beta_r * pairs[r, s] * exp(total_r - total_s) for s < r.

    Row after row, by forward substitution: the products of a series would cancel.
    """
    i = tl.arange(0, 16)
    # Transposed: lower[s, r] is A[r, s], so that a row of A lies along the first dimension.
    below = i[:, None] < i[None, :]
    decay = tl.exp(tl.where(below, total[None, :] - total[:, None], float("-inf")))
    lower = pairs * decay * beta[None, :]
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, 16):
        row = tl.sum(tl.where(i[None, :] == r, lower, 0.0), 1)
        solved = tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(i[:, None] == r, inverse - solved[None, :], inverse)
    return inverse


@triton.jit
def _block_below(k_row, k_column, beta, total_row, total_column):
    """A block of A below the diagonal."""
    pairs = tl.dot(k_row, tl.trans(k_column), input_precision=_PRECISION)
    return pairs * tl.exp(total_row[:, None] - total_column[None, :]) * beta[:, None]


@triton.jit
def _times(a, b):
    return tl.dot(a, b, input_precision=_PRECISION)


@triton.jit
def _gates(ba, there, a_log, dt_bias, V: tl.constexpr):
    """The decays and betas of tokens; 0 where there is none."""
    b = tl.load(ba, there, other=0.0).to(tl.float32)
    a = tl.load(ba + V, there, other=0.0).to(tl.float32) + dt_bias
    # Below, nothing is left (1e-13) that counts, and sums of decays would lose the digits of small ones.
    g = tl.maximum(-tl.exp(a_log) * softplus(a), -30.0)
    return tl.where(there, g, 0.0), tl.where(there, tl.sigmoid(b), 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _delta_prepare_kernel(
    y_ptr,
    ba_ptr,
    a_log_ptr,
    dt_bias_ptr,
    row_start_ptr,
    w_ptr,
    u_ptr,
    p_ptr,
    total_ptr,
    num_rows,
    ba_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    C: tl.constexpr = 2 * K * D + V * E
    row, chunk = find_chunk(tl.program_id(0), row_start_ptr, num_rows, CHUNK, BLOCK_R)
    if row == num_rows:
        return
    head = tl.program_id(1)
    key_head = head // (V // K)
    begin = tl.load(row_start_ptr + row) + chunk * CHUNK
    end = tl.load(row_start_ptr + row + 1)
    a_log = tl.load(a_log_ptr + head).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    i = tl.arange(0, 16)
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    t0 = (begin + i).to(tl.int64)
    t1, t2, t3 = t0 + 16, t0 + 32, t0 + 48
    in0, in1, in2, in3 = t0 < end, t1 < end, t2 < end, t3 < end
    ba = ba_ptr + head
    g0, b0 = _gates(ba + t0 * ba_stride, in0, a_log, dt_bias, V)
    g1, b1 = _gates(ba + t1 * ba_stride, in1, a_log, dt_bias, V)
    g2, b2 = _gates(ba + t2 * ba_stride, in2, a_log, dt_bias, V)
    g3, b3 = _gates(ba + t3 * ba_stride, in3, a_log, dt_bias, V)
    s0 = tl.cumsum(g0, 0)
    s1 = tl.cumsum(g1, 0) + tl.sum(g0, 0)
    s2 = tl.cumsum(g2, 0) + (tl.sum(g0, 0) + tl.sum(g1, 0))
    s3 = tl.cumsum(g3, 0) + (tl.sum(g0, 0) + tl.sum(g1, 0) + tl.sum(g2, 0))
    tl.store(total_ptr + t0 * V + head, s0, in0)
    tl.store(total_ptr + t1 * V + head, s1, in1)
    tl.store(total_ptr + t2 * V + head, s2, in2)
    tl.store(total_ptr + t3 * V + head, s3, in3)

    keys = y_ptr + (K + key_head) * D + d[None, :]
    k0 = tl.load(keys + t0[:, None] * C, in0[:, None], other=0.0)
    k1 = tl.load(keys + t1[:, None] * C, in1[:, None], other=0.0)
    k2 = tl.load(keys + t2[:, None] * C, in2[:, None], other=0.0)
    k3 = tl.load(keys + t3[:, None] * C, in3[:, None], other=0.0)
    kk00 = _times(k0, tl.trans(k0))
    kk11 = _times(k1, tl.trans(k1))
    kk22 = _times(k2, tl.trans(k2))
    kk33 = _times(k3, tl.trans(k3))
    m00 = _inverse_of_diagonal(kk00, b0, s0)
    m11 = _inverse_of_diagonal(kk11, b1, s1)
    m22 = _inverse_of_diagonal(kk22, b2, s2)
    m33 = _inverse_of_diagonal(kk33, b3, s3)
    a10 = _block_below(k1, k0, b1, s1, s0)
    a20 = _block_below(k2, k0, b2, s2, s0)
    a21 = _block_below(k2, k1, b2, s2, s1)
    a30 = _block_below(k3, k0, b3, s3, s0)
    a31 = _block_below(k3, k1, b3, s3, s1)
    a32 = _block_below(k3, k2, b3, s3, s2)
    m10 = -_times(m11, _times(a10, m00))
    m21 = -_times(m22, _times(a21, m11))
    m32 = -_times(m33, _times(a32, m22))
    m20 = -_times(m22, _times(a20, m00) + _times(a21, m10))
    m31 = -_times(m33, _times(a31, m11) + _times(a32, m21))
    m30 = -_times(m33, _times(a30, m00) + _times(a31, m10) + _times(a32, m20))

    dtype = y_ptr.dtype.element_ty
    n00, n10, n11 = m00.to(dtype), m10.to(dtype), m11.to(dtype)
    n20, n21, n22 = m20.to(dtype), m21.to(dtype), m22.to(dtype)
    n30, n31, n32, n33 = m30.to(dtype), m31.to(dtype), m32.to(dtype), m33.to(dtype)
    w = w_ptr + head * D + d[None, :]
    k0w = (k0.to(tl.float32) * (b0 * tl.exp(s0))[:, None]).to(dtype)
    k1w = (k1.to(tl.float32) * (b1 * tl.exp(s1))[:, None]).to(dtype)
    k2w = (k2.to(tl.float32) * (b2 * tl.exp(s2))[:, None]).to(dtype)
    k3w = (k3.to(tl.float32) * (b3 * tl.exp(s3))[:, None]).to(dtype)
    w0 = _times(n00, k0w)
    tl.store(w + t0[:, None] * (V * D), w0.to(dtype), in0[:, None])
    w1 = _times(n10, k0w) + _times(n11, k1w)
    tl.store(w + t1[:, None] * (V * D), w1.to(dtype), in1[:, None])
    w2 = _times(n20, k0w) + _times(n21, k1w) + _times(n22, k2w)
    tl.store(w + t2[:, None] * (V * D), w2.to(dtype), in2[:, None])
    w3 = _times(n30, k0w) + _times(n31, k1w) + _times(n32, k2w) + _times(n33, k3w)
    tl.store(w + t3[:, None] * (V * D), w3.to(dtype), in3[:, None])

    values = y_ptr + 2 * K * D + head * E + e[None, :]
    v0 = tl.load(values + t0[:, None] * C, in0[:, None], other=0.0).to(tl.float32)
    v1 = tl.load(values + t1[:, None] * C, in1[:, None], other=0.0).to(tl.float32)
    v2 = tl.load(values + t2[:, None] * C, in2[:, None], other=0.0).to(tl.float32)
    v3 = tl.load(values + t3[:, None] * C, in3[:, None], other=0.0).to(tl.float32)
    v0u = (v0 * b0[:, None]).to(dtype)
    v1u = (v1 * b1[:, None]).to(dtype)
    v2u = (v2 * b2[:, None]).to(dtype)
    v3u = (v3 * b3[:, None]).to(dtype)
    u = u_ptr + head * E + e[None, :]
    u0 = _times(n00, v0u)
    tl.store(u + t0[:, None] * (V * E), u0.to(dtype), in0[:, None])
    u1 = _times(n10, v0u) + _times(n11, v1u)
    tl.store(u + t1[:, None] * (V * E), u1.to(dtype), in1[:, None])
    u2 = _times(n20, v0u) + _times(n21, v1u) + _times(n22, v2u)
    tl.store(u + t2[:, None] * (V * E), u2.to(dtype), in2[:, None])
    u3 = _times(n30, v0u) + _times(n31, v1u) + _times(n32, v2u) + _times(n33, v3u)
    tl.store(u + t3[:, None] * (V * E), u3.to(dtype), in3[:, None])

    c = tl.arange(0, CHUNK)
    t = (begin + c).to(tl.int64)
    inside = t < end
    g, _ = _gates(ba + t * ba_stride, inside, a_log, dt_bias, V)
    total = tl.cumsum(g, 0)
    q = tl.load(y_ptr + key_head * D + t[:, None] * C + d[None, :], inside[:, None], other=0.0)
    k = tl.load(keys + t[:, None] * C, inside[:, None], other=0.0)
    seen = c[:, None] >= c[None, :]
    decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
    p = _times(q, tl.trans(k)) * decay
    p_at = (t[:, None] * V + head) * CHUNK + c[None, :]
    tl.store(p_ptr + p_at, p.to(dtype), inside[:, None])


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
    row_start_ptr,
    o_ptr,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 2 * K * D + V * E
    row = tl.program_id(2)
    first = tl.load(row_start_ptr + row)
    end = tl.load(row_start_ptr + row + 1)
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
    state = tl.load(state_ptr + state_at, mask=(begin > 0) & (e[None, :] < E), other=0.0)
    dtype = y_ptr.dtype.element_ty
    for chunk in tl.range(first, end, CHUNK, num_stages=STAGES):
        t = (chunk + c).to(tl.int64)
        inside = (t < end)[:, None]
        w = tl.load(w_ptr + (t[:, None] * V + head) * D + d[None, :], inside, other=0.0)
        u = tl.load(u_ptr + (t[:, None] * V + head) * E + e[None, :], inside, other=0.0)
        q = tl.load(y_ptr + t[:, None] * C + key_head * D + d[None, :], inside, other=0.0)
        k = tl.load(y_ptr + t[:, None] * C + (K + key_head) * D + d[None, :], inside, other=0.0)
        p = tl.load(p_ptr + (t[:, None] * V + head) * CHUNK + c[None, :], inside, other=0.0)
        total = tl.load(total_ptr + t * V + head, t < end, other=0.0)
        at_end = tl.min(total, 0)  # decays only fall
        old = state.to(dtype)
        new = u.to(tl.float32) - tl.dot(w, old, input_precision=_PRECISION)
        o = tl.dot(q, old, input_precision=_PRECISION) * tl.exp(total)[:, None]
        o = tl.dot(p, new.to(dtype), o, input_precision=_PRECISION)
        left = (new * tl.exp(at_end - total)[:, None]).to(dtype)
        state = tl.dot(tl.trans(k), left, state * tl.exp(at_end), input_precision=_PRECISION)
        tl.store(o_ptr + (t[:, None] * V + head) * E + e[None, :], o.to(o_ptr.dtype.element_ty), inside)
    tl.store(state_ptr + state_at, state)


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
) -> Tensor:
    """Launch the kernels on any device."""
    device, dtype = qkvz.device, qkvz.dtype
    _, num_value_heads, key_dim, value_dim = states.recurrent.shape
    num_channels = states.conv.shape[2]
    num_key_heads = (num_channels - num_value_heads * value_dim) // (2 * key_dim)
    if config is None:
        default = default_delta_prefill_config(key_dim, value_dim, dtype.itemsize, gpu_of(device))
        config = tuned(
            default, "gated_delta_prefill", device, dtype, exact=(key_dim, value_dim), near=(num_value_heads,)
        )
    num_tokens, num_rows = qkvz.shape[0], row_ids.shape[0]
    value_size = num_value_heads * value_dim
    y = convolve(qkvz, weights, states, row_ids, context_len, row_start)
    w = torch.empty((num_tokens, num_value_heads, key_dim), dtype=dtype, device=device)
    u, o = (torch.empty((num_tokens, value_size), dtype=dtype, device=device) for _ in range(2))
    p = torch.empty((num_tokens, num_value_heads, CHUNK), dtype=dtype, device=device)
    total = torch.empty((num_tokens, num_value_heads), dtype=torch.float32, device=device)
    num_chunks = num_chunks_of(num_tokens, num_rows)
    _delta_prepare_kernel[(num_chunks, num_value_heads)](
        y,
        ba,
        weights.a_log,
        weights.dt_bias,
        row_start,
        w,
        u,
        p,
        total,
        num_rows,
        ba.stride(0),
        num_key_heads,
        num_value_heads,
        key_dim,
        value_dim,
        CHUNK,
        BLOCK_R,
        num_warps=config.prepare_warps,
    )
    block_e = min(config.block_e, value_dim)
    _delta_scan_kernel[(value_dim // block_e, num_value_heads, num_rows)](
        y,
        w,
        u,
        p,
        total,
        states.recurrent,
        row_ids,
        context_len,
        row_start,
        o,
        num_key_heads,
        num_value_heads,
        key_dim,
        value_dim,
        CHUNK,
        block_e,
        config.scan_stages,
        num_warps=config.scan_warps,
    )
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
) -> Tensor:
    """The new tokens of a batch: [T, V * E] of qkvz's dtype; writes the rows' lines of `states`.

    Args:
        qkvz: [T, C + V * E], the projections: q, k, v of all heads, then the gate z of the norm.
        ba: [T, 2V], b and a of each value head.
        row_ids: int32 [R], each row's line of the states, once but for the last line and rows without tokens.
        context_len: int32 [R], tokens of each row, the new ones included.
        row_start: int32 [R + 1].
        eps: of the norm.
    """
    run = gated_delta_prefill_cpu if qkvz.device.type == "cpu" else gated_delta_prefill_triton
    return run(qkvz, ba, weights, states, row_ids, context_len, row_start, eps)
