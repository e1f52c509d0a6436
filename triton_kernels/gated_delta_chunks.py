"""What each chunk of a prompt is without the state before it: the middle of linear attention's prefill.

gated_delta.py has the formulas and the shape letters, gated_delta_prefill.py the whole. Two launches, each a
program for (chunk, value head):

    solve    M = (I + A)^-1 for A = strictly lower(beta k k^T exp(g_i - g_j)), in blocks of 16; and g
    prepare  w = M (beta exp(g) k), u = M (beta v), p = lower(q k^T exp(g_i - g_j))

A program of `solve` is one warp: its products are small and follow each other, so what counts is that many
programs share a multiprocessor, and that none waits for a barrier. Products of float32 (of M) are as exact as
float32.

Cost for each token and value head: 64 (4 D + 2 E) FLOP of `prepare`, about 80 D of `solve`; 4 D + 2 E + 192
numbers of 16 bits moved, k and q mostly from L2.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.gated_delta import CHUNK, DeltaStates, DeltaWeights
from triton_kernels.gated_delta_ends import BLOCK_R, find_chunk, num_chunks_of, softplus

FLOAT32_PRODUCT = tl.constexpr("tf32x3")
"""Of products of float32: about its own precision, by matrix instructions."""


class Chunks(NamedTuple):
    """What `prepare_chunks` finds for each token and value head."""

    w: Tensor  # [T, V, D]
    u: Tensor  # [T, V, E]
    p: Tensor  # [T, V, CHUNK]
    total: Tensor  # float32 [T, V], g: the sum of the chunk's decays up to the token


@triton.jit
def _inverse_row(r, lower, inverse):
    """One step of forward substitution: row r of (I + A)^-1 of a block, from the rows above it.

    lower[s, r] is A[r, s]: transposed, so that the sum over s is a thread's own.
    """
    i = tl.arange(0, 16)
    row = tl.sum(tl.where(i[None, :] == r, lower, 0.0), 1)
    solved = tl.sum(row[:, None] * inverse, 0)
    return tl.where(i[:, None] == r, inverse - solved[None, :], inverse)


@triton.jit
def _block_on_diagonal(k, beta, total):
    """A of 16 tokens, transposed: [s, r] = beta_r (k_r k_s) exp(total_r - total_s) for s < r."""
    i = tl.arange(0, 16)
    below = i[:, None] < i[None, :]
    decay = tl.exp(tl.where(below, total[None, :] - total[:, None], float("-inf")))
    return tl.dot(k, tl.trans(k), input_precision=FLOAT32_PRODUCT) * decay * beta[None, :]


@triton.jit
def _block_below(k_row, k_column, beta, total_row, total_column):
    """A block of A below the diagonal."""
    pairs = tl.dot(k_row, tl.trans(k_column), input_precision=FLOAT32_PRODUCT)
    return pairs * tl.exp(total_row[:, None] - total_column[None, :]) * beta[:, None]


@triton.jit
def _times(a, b):
    return tl.dot(a, b, input_precision=FLOAT32_PRODUCT)


@triton.jit
def _gates(ba, there, a_log, dt_bias, V: tl.constexpr):
    """The decays and betas of tokens; 0 where there is none."""
    b = tl.load(ba, there, other=0.0).to(tl.float32)
    a = tl.load(ba + V, there, other=0.0).to(tl.float32) + dt_bias
    # Below, nothing is left (1e-13) that counts, and sums of decays would lose the digits of small ones.
    g = tl.maximum(-tl.exp(a_log) * softplus(a), -30.0)
    return tl.where(there, g, 0.0), tl.where(there, tl.sigmoid(b), 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _delta_solve_kernel(
    y_ptr,
    ba_ptr,
    a_log_ptr,
    dt_bias_ptr,
    row_start_ptr,
    m_ptr,
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
    a10 = _block_below(k1, k0, b1, s1, s0)
    a20 = _block_below(k2, k0, b2, s2, s0)
    a21 = _block_below(k2, k1, b2, s2, s1)
    a30 = _block_below(k3, k0, b3, s3, s0)
    a31 = _block_below(k3, k1, b3, s3, s1)
    a32 = _block_below(k3, k2, b3, s3, s2)
    a00 = _block_on_diagonal(k0, b0, s0)
    a11 = _block_on_diagonal(k1, b1, s1)
    a22 = _block_on_diagonal(k2, b2, s2)
    a33 = _block_on_diagonal(k3, b3, s3)
    # Row after row: the products of a series would cancel. Four blocks at once, as each waits for itself.
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    m00 = identity
    m11 = identity
    m22 = identity
    m33 = identity
    for r in range(1, 16):
        m00 = _inverse_row(r, a00, m00)
        m11 = _inverse_row(r, a11, m11)
        m22 = _inverse_row(r, a22, m22)
        m33 = _inverse_row(r, a33, m33)
    m10 = -_times(m11, _times(a10, m00))
    m21 = -_times(m22, _times(a21, m11))
    m32 = -_times(m33, _times(a32, m22))
    m20 = -_times(m22, _times(a20, m00) + _times(a21, m10))
    m31 = -_times(m33, _times(a31, m11) + _times(a32, m21))
    m30 = -_times(m33, _times(a30, m00) + _times(a31, m10) + _times(a32, m20))

    dtype = m_ptr.dtype.element_ty
    none = tl.zeros([16, 16], dtype)
    m0 = m_ptr + (t0[:, None] * V + head) * CHUNK + i[None, :]
    tl.store(m0, m00.to(dtype), in0[:, None])
    tl.store(m0 + 16, none, in0[:, None])
    tl.store(m0 + 32, none, in0[:, None])
    tl.store(m0 + 48, none, in0[:, None])
    m1 = m0 + 16 * V * CHUNK
    tl.store(m1, m10.to(dtype), in1[:, None])
    tl.store(m1 + 16, m11.to(dtype), in1[:, None])
    tl.store(m1 + 32, none, in1[:, None])
    tl.store(m1 + 48, none, in1[:, None])
    m2 = m1 + 16 * V * CHUNK
    tl.store(m2, m20.to(dtype), in2[:, None])
    tl.store(m2 + 16, m21.to(dtype), in2[:, None])
    tl.store(m2 + 32, m22.to(dtype), in2[:, None])
    tl.store(m2 + 48, none, in2[:, None])
    m3 = m2 + 16 * V * CHUNK
    tl.store(m3, m30.to(dtype), in3[:, None])
    tl.store(m3 + 16, m31.to(dtype), in3[:, None])
    tl.store(m3 + 32, m32.to(dtype), in3[:, None])
    tl.store(m3 + 48, m33.to(dtype), in3[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _delta_prepare_kernel(
    y_ptr,
    ba_ptr,
    m_ptr,
    total_ptr,
    row_start_ptr,
    w_ptr,
    u_ptr,
    p_ptr,
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
    c = tl.arange(0, CHUNK)
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    t = (tl.load(row_start_ptr + row) + chunk * CHUNK + c).to(tl.int64)
    inside = t < tl.load(row_start_ptr + row + 1)
    here = inside[:, None]
    dtype = y_ptr.dtype.element_ty
    m = tl.load(m_ptr + (t[:, None] * V + head) * CHUNK + c[None, :], here, other=0.0)
    k = tl.load(y_ptr + t[:, None] * C + (K + key_head) * D + d[None, :], here, other=0.0)
    v = tl.load(y_ptr + t[:, None] * C + 2 * K * D + head * E + e[None, :], here, other=0.0)
    q = tl.load(y_ptr + t[:, None] * C + key_head * D + d[None, :], here, other=0.0)
    total = tl.load(total_ptr + t * V + head, inside, other=0.0)
    b = tl.load(ba_ptr + t * ba_stride + head, inside, other=0.0).to(tl.float32)
    beta = tl.where(inside, tl.sigmoid(b), 0.0)
    decayed = (k.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(dtype)
    w = tl.dot(m, decayed, input_precision=FLOAT32_PRODUCT)
    tl.store(w_ptr + (t[:, None] * V + head) * D + d[None, :], w.to(dtype), here)
    u = tl.dot(m, (v.to(tl.float32) * beta[:, None]).to(dtype), input_precision=FLOAT32_PRODUCT)
    tl.store(u_ptr + (t[:, None] * V + head) * E + e[None, :], u.to(dtype), here)
    seen = c[:, None] >= c[None, :]
    decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
    p = tl.dot(q, tl.trans(k), input_precision=FLOAT32_PRODUCT) * decay
    tl.store(p_ptr + (t[:, None] * V + head) * CHUNK + c[None, :], p.to(dtype), here)


def prepare_chunks(
    y: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    row_start: Tensor,
    num_warps: int,
) -> Chunks:
    """`Chunks` of y, of y's dtype; arguments as in `gated_delta_prefill`. Only tokens of rows are written.

    Args:
        y: [T, C], what `convolve` returned.
        num_warps: of `prepare`.
    """
    device, dtype = y.device, y.dtype
    _, num_value_heads, key_dim, value_dim = states.recurrent.shape
    num_tokens, num_rows = y.shape[0], row_start.shape[0] - 1
    m, p = (torch.empty((num_tokens, num_value_heads, CHUNK), dtype=dtype, device=device) for _ in range(2))
    w = torch.empty((num_tokens, num_value_heads, key_dim), dtype=dtype, device=device)
    u = torch.empty((num_tokens, num_value_heads, value_dim), dtype=dtype, device=device)
    total = torch.empty((num_tokens, num_value_heads), dtype=torch.float32, device=device)
    grid = (num_chunks_of(num_tokens, num_rows), num_value_heads)
    sizes = (states.num_key_heads, num_value_heads, key_dim, value_dim, CHUNK, BLOCK_R)
    _delta_solve_kernel[grid](
        y,
        ba,
        weights.a_log,
        weights.dt_bias,
        row_start,
        m,
        total,
        num_rows,
        ba.stride(0),
        *sizes,
        num_warps=1,
    )
    _delta_prepare_kernel[grid](
        y,
        ba,
        m,
        total,
        row_start,
        w,
        u,
        p,
        num_rows,
        ba.stride(0),
        *sizes,
        num_warps=num_warps,
    )
    return Chunks(w, u, p, total)
