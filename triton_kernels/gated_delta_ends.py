"""What prefill of linear attention does before and behind its chunks: the convolution, and the gated norm.

gated_delta.py has the formulas and the shape letters. A row's chunks are of 32 tokens here.

    convolve    y [T, C], q and k normalised; writes the rows' convolution states
    gated_norm  norm * o / rms(o) * silu(z) for the tokens that a row owns, zeros for others

Cost: 4 * T * C and 6 * T * V * E bytes moved in 16-bit types: memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.gated_delta import CHUNK, QK_EPS, TAPS, DeltaSaves, DeltaStates, DeltaWeights
from triton_kernels.launch import ceil_div

BLOCK_R = 128
"""Rows among which a program looks for its own at once."""
_CONV_TOKENS = 32
_CONV_WARPS = 4
_NORM_HEADS = 8


def num_chunks_of(num_tokens: int, num_rows: int, size: int = CHUNK) -> int:
    """The most chunks of `size` tokens that these tokens of these rows can have."""
    return (num_tokens + (size - 1) * num_rows) // size


@triton.jit
def softplus(x):
    """log(1 + exp(x)), right to the last digits where exp(x) is small, too (log1p as Kahan computes it)."""
    power = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + power
    more = rounded - 1.0
    near_zero = more == 0.0
    log = tl.where(near_zero, power, tl.log(rounded) * (power / tl.where(near_zero, 1.0, more)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def _count_chunks(chunks, target, rows_before, row_begin, total):
    """One step of the search for the row of the target-th chunk, over a block of rows."""
    ends = total + tl.cumsum(chunks, 0)
    before = ends <= target
    rows_before += tl.sum(before.to(tl.int32), 0)
    row_begin = tl.maximum(row_begin, tl.max(tl.where(before, ends, 0), 0))
    return rows_before, row_begin, total + tl.sum(chunks, 0)


@triton.jit
def find_chunk(target, row_start_ptr, num_rows, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr):
    """The target-th chunk of the batch: its row (num_rows if there is none), and its number in the row."""
    rows_before = target * 0
    row_begin = target * 0
    total = target * 0
    for r0 in range(0, num_rows, BLOCK_R):
        rows = r0 + tl.arange(0, BLOCK_R)
        new = tl.load(row_start_ptr + rows + 1, rows < num_rows, other=0)
        new -= tl.load(row_start_ptr + rows, rows < num_rows, other=0)
        # Rows behind the last one must not count as rows before the chunk.
        chunks = tl.where(rows < num_rows, (new + CHUNK - 1) // CHUNK, 1 << 20)
        rows_before, row_begin, total = _count_chunks(chunks, target, rows_before, row_begin, total)
    return tl.minimum(rows_before, num_rows), target - row_begin


@triton.jit
def _new(x, index, count, back: tl.constexpr):
    """The inputs `back` tokens before the row's tokens `index`, 0 where these are not new."""
    x_ptr, x_stride, first = x
    at = (first + index - back).to(tl.int64)[:, None] * x_stride
    return tl.load(x_ptr + at, mask=((index >= back) & (index < count))[:, None], other=0.0)


@triton.jit
def _old(ring, index, count, begin, back: tl.constexpr, TAPS: tl.constexpr):
    """The same from the convolution state: 0 where they are new, or before the row's first token."""
    ring_ptr, C = ring
    from_row = index - back
    is_old = (from_row < 0) & (begin + from_row >= 0) & (index < count)
    entry = (begin + from_row + TAPS) % TAPS
    return tl.load(ring_ptr + entry[:, None] * C, mask=is_old[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _delta_convolve_kernel(
    x_ptr,
    conv_ptr,
    conv_state_ptr,
    row_ids_ptr,
    context_len_ptr,
    row_start_ptr,
    y_ptr,
    part_start_ptr,
    slots_ptr,
    saved_ptr,
    num_rows,
    x_stride,
    C,
    heads_before: tl.constexpr,
    columns_before: tl.constexpr,
    num_queries: tl.constexpr,
    num_normed: tl.constexpr,
    scale: tl.constexpr,
    qk_eps: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SAVES: tl.constexpr,
):
    """Heads of one width: those below `num_queries` are q's, those below `num_normed` are q's or k's."""
    row, chunk = find_chunk(tl.program_id(0), row_start_ptr, num_rows, TOKENS, BLOCK_R)
    if row == num_rows:
        return
    head = tl.program_id(1) + heads_before
    columns = columns_before + tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first = tl.load(row_start_ptr + row)
    count = tl.load(row_start_ptr + row + 1) - first
    begin = tl.load(context_len_ptr + row) - count
    ring = conv_state_ptr + tl.load(row_ids_ptr + row).to(tl.int64) * (TAPS * C) + columns[None, :]
    index = chunk * TOKENS + tl.arange(0, TOKENS)
    # All taps of a column at once, which lie together: loads of single ones would take longer than the rest.
    taps = tl.load(conv_ptr + (columns * TAPS)[:, None] + tl.arange(0, TAPS)[None, :]).to(tl.float32)
    even, odd = tl.split(tl.reshape(taps, [WIDTH, 2, 2]))
    tap0, tap2 = tl.split(even)
    tap1, tap3 = tl.split(odd)
    x = (x_ptr + columns[None, :], x_stride, first)
    new0 = _new(x, index, count, 0)
    new1 = _new(x, index, count, 1)
    new2 = _new(x, index, count, 2)
    new3 = _new(x, index, count, 3)
    y = new0.to(tl.float32) * tap3[None, :]
    if chunk == 0:
        old = (ring, C)
        y += (new1.to(tl.float32) + _old(old, index, count, begin, 1, TAPS)) * tap2[None, :]
        y += (new2.to(tl.float32) + _old(old, index, count, begin, 2, TAPS)) * tap1[None, :]
        y += (new3.to(tl.float32) + _old(old, index, count, begin, 3, TAPS)) * tap0[None, :]
    else:
        y += new1.to(tl.float32) * tap2[None, :]
        y += new2.to(tl.float32) * tap1[None, :]
        y += new3.to(tl.float32) * tap0[None, :]
    y = y * tl.sigmoid(y)
    if num_normed > 0:
        inverse = tl.rsqrt(tl.sum(y * y, 1) + qk_eps)
        inverse = tl.where(head < num_normed, inverse, 1.0) * tl.where(head < num_queries, scale, 1.0)
        y = y * inverse[:, None]
    at = (first + index).to(tl.int64)[:, None] * C + columns[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=(index < count)[:, None])
    if chunk == 0:
        if SAVES:
            slot = tl.load(slots_ptr + row)
            if slot >= 0:
                # The ring behind the row's first part.
                newer = tl.load(part_start_ptr + 2 * row + 1) - first - 1 - tl.arange(0, TAPS)
                entry = ((begin + newer + TAPS) % TAPS)[:, None] * C
                from_x = (first + newer).to(tl.int64)[:, None] * x_stride + columns[None, :]
                saved = tl.load(x_ptr + from_x, mask=(newer >= 0)[:, None], other=0.0)
                is_older = (newer < 0) & (begin + newer >= 0)
                older = tl.load(ring + entry, mask=is_older[:, None], other=0.0)
                saved = tl.where((newer >= 0)[:, None], saved, older)
                to_ring = saved_ptr + slot.to(tl.int64) * (TAPS * C) + columns[None, :] + entry
                tl.store(to_ring, saved, mask=(begin + newer >= 0)[:, None])
        # Only this program reads the ring of these columns, and has done so.
        tl.debug_barrier()
        last = count - 1 - tl.arange(0, TAPS)
        newest_at = (first + last).to(tl.int64)[:, None] * x_stride + columns[None, :]
        newest = tl.load(x_ptr + newest_at, mask=(last >= 0)[:, None], other=0.0)
        tl.store(ring + ((begin + last + TAPS) % TAPS)[:, None] * C, newest, mask=(last >= 0)[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _delta_norm_kernel(
    o_ptr,
    x_ptr,
    norm_ptr,
    row_start_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    x_stride,
    z_begin,
    eps: tl.constexpr,
    V: tl.constexpr,
    E: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    first = tl.load(row_start_ptr)
    end = tl.load(row_start_ptr + num_rows)
    part = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    t, head = part // V, part % V
    e = tl.arange(0, E)
    inside = ((t >= first) & (t < end))[:, None]
    o = tl.load(o_ptr + part[:, None] * E + e[None, :], inside, other=0.0).to(tl.float32)
    z_at = t[:, None] * x_stride + z_begin + head[:, None] * E + e[None, :]
    z = tl.load(x_ptr + z_at, inside, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + e).to(tl.float32)
    o = o * tl.rsqrt(tl.sum(o * o, 1) / E + eps)[:, None] * norm[None, :] * z * tl.sigmoid(z)
    tl.store(
        out_ptr + part[:, None] * E + e[None, :], o.to(out_ptr.dtype.element_ty), (t < num_tokens)[:, None]
    )


def convolve(
    qkvz: Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    row_ids: Tensor,
    context_len: Tensor,
    row_start: Tensor,
    saves: DeltaSaves | None = None,
) -> Tensor:
    """y [T, C]; arguments as in `gated_delta_prefill`. Tokens that no row owns are not written."""
    # Without saves, any pointers.
    saved = (row_start, row_ids, states.conv)
    if saves is not None:
        saved = (saves.part_start, saves.slots, saves.states.conv)
    _, num_value_heads, key_dim, value_dim = states.recurrent.shape
    num_channels, num_key_heads = states.conv.shape[2], states.num_key_heads
    num_tokens, num_rows = qkvz.shape[0], row_ids.shape[0]
    num_chunks = num_chunks_of(num_tokens, num_rows, _CONV_TOKENS)
    y = torch.empty((num_tokens, num_channels), dtype=qkvz.dtype, device=qkvz.device)
    # Heads of q and k, then those of v: their widths may differ.
    for before, columns, heads, width in (
        (0, 0, 2 * num_key_heads, key_dim),
        (2 * num_key_heads, 2 * num_key_heads * key_dim, num_value_heads, value_dim),
    ):
        _delta_convolve_kernel[(num_chunks, heads)](
            qkvz,
            weights.conv,
            states.conv,
            row_ids,
            context_len,
            row_start,
            y,
            *saved,
            num_rows,
            qkvz.stride(0),
            num_channels,
            before,
            columns,
            num_key_heads,
            0 if before else heads,
            key_dim**-0.5,
            QK_EPS,
            width,
            TAPS,
            _CONV_TOKENS,
            BLOCK_R,
            saves is not None,
            num_warps=_CONV_WARPS,
        )
    return y


def gated_norm(
    o: Tensor, qkvz: Tensor, norm: Tensor, row_start: Tensor, states: DeltaStates, eps: float
) -> Tensor:
    """[T, V * E] of o's dtype, from o [T, V * E] and the gates in qkvz."""
    num_tokens, num_rows = o.shape[0], row_start.shape[0] - 1
    _, num_value_heads, _, value_dim = states.recurrent.shape
    num_channels = states.conv.shape[2]
    out = torch.empty_like(o)
    _delta_norm_kernel[(ceil_div(num_tokens * num_value_heads, _NORM_HEADS),)](
        o,
        qkvz,
        norm,
        row_start,
        out,
        num_tokens,
        num_rows,
        qkvz.stride(0),
        num_channels,
        eps,
        num_value_heads,
        value_dim,
        _NORM_HEADS,
        num_warps=4,
    )
    return out
