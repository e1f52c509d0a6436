"""One decode step of linear attention on Hopper GPUs, for heads of 128 and 16-bit inputs (`takes` checks).

Shape letters, formulas and edge cases are those of gated_delta_decode.py. Written in Gluon, Triton's language
of explicit layouts.

A tile is one value head of one row. PROGRAMS programs to a multiprocessor go through all tiles. While a
program computes a tile, whose state is in registers, all that the next tile needs is copied to shared memory:
its state and, for the columns of its q, k and v, the last TAPS tokens and the convolution's taps. So memory
never waits for a program that computes or stores. Where there are not more tiles than programs, states are
loaded into registers at once: programs of little shared memory start while the kernel before still runs.

Each warp has some rows of the state, and of each row all columns, four to a thread. What belongs to the
columns (v, z, the sums over the state's rows, and, as D = E, q and k until they are normalised) is in every
warp, so that sums over columns need no other warp. Only the sums over the state's rows do.

Cost: as gated_delta_decode.py's.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# Gluon's compile-time values are plain objects to a reader of types, and its tensors are built by them.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false
# What only several tiles need is there for them only.
# pyright: reportPossiblyUnboundVariable=false

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from triton_kernels.early_start import after_predecessor_here, can_start_early
from triton_kernels.gated_delta import QK_EPS, TAPS, DeltaStates, DeltaWeights
from triton_kernels.gated_delta_ends import softplus
from triton_kernels.gpu import gpu_of, num_multiprocessors

HEAD_DIM = 128
"""D and E."""
PROGRAMS = 2
"""For each multiprocessor: as many as have room for their registers and shared memory."""
_WARPS = 4
_STATE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [_WARPS, 1], [1, 0]))  # of [D, E]
_WINDOW_LAYOUT = gl.constexpr(gl.BlockedLayout([TAPS, 4], [1, 32], [1, _WARPS], [1, 0]))  # of [TAPS, D]
_COPIED_WINDOW = gl.constexpr(gl.BlockedLayout([1, 8], [TAPS, 32 // TAPS], [1, _WARPS], [1, 0]))
_COPIED_LINE = gl.constexpr(gl.BlockedLayout([8], [32], [_WARPS], [0]))  # of [D]
_COPIED_TAPS = gl.constexpr(gl.BlockedLayout([2, TAPS], [32, 1], [_WARPS, 1], [1, 0]))  # of [D, TAPS]

# async_load is there since Triton 3.8, without the older name.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _find(tile, num_tiles, row_ids_ptr, context_len_ptr, last_line, V: gl.constexpr):
    """A tile's line, its newest token's position, and whether it is there and no padding."""
    row = gl.minimum(tile, num_tiles - 1) // V
    line = gl.load(row_ids_ptr + row).to(gl.int64)
    position = gl.load(context_len_ptr + row) - 1
    return line, position, (tile < num_tiles) & (line != last_line)


@gluon.jit
def _at_state(state_ptr, head, line, is_wanted, V: gl.constexpr, D: gl.constexpr, E: gl.constexpr):
    """Pointers to a head's state, and their mask."""
    d = gl.arange(0, D, gl.SliceLayout(1, _STATE_LAYOUT))
    e = gl.arange(0, E, gl.SliceLayout(0, _STATE_LAYOUT))
    pointers = state_ptr + (line * V + head) * (D * E) + (d[:, None] * E + e[None, :])
    return pointers, ((d >= 0)[:, None] & (e >= 0)[None, :]) & is_wanted


@gluon.jit
def _columns_of(part: gl.constexpr, head, K: gl.constexpr, V: gl.constexpr, D: gl.constexpr, E: gl.constexpr):
    """The first column of the head's q (part 0), k (1) or v (2)."""
    if part == 2:
        return 2 * K * D + head * E
    else:
        return part * K * D + head // (V // K) * D


# A copy writes zeros where its mask is false, so no two copies to one place may be under way at once.


@gluon.jit
def _copy_older(
    older_s, conv_state_ptr, head, line, position, is_real, K: gl.constexpr, V: gl.constexpr, D: gl.constexpr,
    E: gl.constexpr, TAPS: gl.constexpr,
):  # fmt: skip
    """Columns of q, k and v of the last TAPS tokens; zeros for the newest."""
    C: gl.constexpr = 2 * K * D + V * E
    t = gl.arange(0, TAPS, gl.SliceLayout(1, _COPIED_WINDOW))
    i = gl.arange(0, D, gl.SliceLayout(0, _COPIED_WINDOW))
    is_older = (t < TAPS - 1) & (position + t >= TAPS - 1)
    mask = (is_older & is_real)[:, None] & (i >= 0)[None, :]
    entries = conv_state_ptr + line * (TAPS * C) + (position + 1 + t) % TAPS * C
    for part in gl.static_range(3):
        pointers = entries[:, None] + (_columns_of(part, head, K, V, D, E) + i)[None, :]
        _copy(older_s.index(part), pointers, mask=mask)


@gluon.jit
def _copy_newest(
    newest_s, x_ptr, row, head, is_real, x_stride, K: gl.constexpr, V: gl.constexpr, D: gl.constexpr,
    E: gl.constexpr,
):  # fmt: skip
    """Columns of q, k, v and z of the newest token."""
    i = gl.arange(0, D, _COPIED_LINE)
    x = x_ptr + row * x_stride
    for part in gl.static_range(3):
        _copy(newest_s.index(part), x + _columns_of(part, head, K, V, D, E) + i, mask=is_real & (i >= 0))
    _copy(newest_s.index(3), x + (2 * K * D + V * E + head * E) + i, mask=is_real & (i >= 0))


@gluon.jit
def _copy_taps(
    taps_s, conv_ptr, head, is_real, K: gl.constexpr, V: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    TAPS: gl.constexpr,
):  # fmt: skip
    i = gl.arange(0, D, gl.SliceLayout(1, _COPIED_TAPS))
    t = gl.arange(0, TAPS, gl.SliceLayout(0, _COPIED_TAPS))
    mask = ((i >= 0)[:, None] & (t >= 0)[None, :]) & is_real
    for part in gl.static_range(3):
        columns = _columns_of(part, head, K, V, D, E) + i
        _copy(taps_s.index(part), conv_ptr + (columns[:, None] * TAPS + t[None, :]), mask=mask)


@gluon.jit
def _load_gates(ba_ptr, a_log_ptr, dt_bias_ptr, row, head, is_real, ba_stride, V: gl.constexpr):
    """b, a, a_log and dt_bias of the head."""
    b = gl.load(ba_ptr + row * ba_stride + head, mask=is_real, other=0.0)
    a = gl.load(ba_ptr + row * ba_stride + V + head, mask=is_real, other=0.0)
    return b, a, gl.load(a_log_ptr + head), gl.load(dt_bias_ptr + head)


@gluon.jit
def _silu(x):
    return x / (1 + gl.exp(-x))


@gluon.jit
def _convolve(older_s, newest, taps_s, TAPS: gl.constexpr):
    """Columns behind the convolution and SiLU."""
    older = older_s.load(_WINDOW_LAYOUT)
    taps = taps_s.permute((1, 0)).load(_WINDOW_LAYOUT).to(gl.float32)
    is_newest = gl.arange(0, TAPS, gl.SliceLayout(1, _WINDOW_LAYOUT)) == TAPS - 1
    newest = gl.convert_layout(newest, gl.SliceLayout(0, _WINDOW_LAYOUT))
    window = gl.where(is_newest[:, None], newest[None, :], older).to(gl.float32)
    return _silu(gl.convert_layout(gl.sum(window * taps, 0), gl.SliceLayout(0, _STATE_LAYOUT)))


@gluon.jit
def _add_both(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def _gated_delta_decode_hopper_kernel(
    x_ptr, ba_ptr, conv_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, conv_state_ptr, state_ptr, row_ids_ptr,
    context_len_ptr, out_ptr, x_stride, ba_stride, last_line, num_tiles, eps: gl.constexpr,
    qk_eps: gl.constexpr, K: gl.constexpr, V: gl.constexpr, D: gl.constexpr, E: gl.constexpr,
    TAPS: gl.constexpr, SEVERAL: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 2 * K * D + V * E
    ROWS: gl.constexpr = gl.SliceLayout(1, _STATE_LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, _STATE_LAYOUT)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if SEVERAL:
        state_s = gl.allocate_shared_memory(gl.float32, [D, E], PLAIN)
    older_s = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [3, TAPS, D], PLAIN)
    newest_s = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [4, D], LINE)
    taps_s = gl.allocate_shared_memory(conv_ptr.dtype.element_ty, [3, D, TAPS], PLAIN)
    q_s = gl.allocate_shared_memory(gl.float32, [D], LINE)
    k_s = gl.allocate_shared_memory(gl.float32, [D], LINE)
    e = gl.arange(0, E, COLUMNS)
    programs = gl.num_programs(0)
    tile = gl.program_id(0)

    # The first tile: what the step's other kernels do not store, and behind the wait what they do.
    line, position, is_real = _find(tile, num_tiles, row_ids_ptr, context_len_ptr, last_line, V)
    pointers, mask = _at_state(state_ptr, tile % V, line, is_real & (position > 0), V, D, E)
    if SEVERAL:
        _copy(state_s, pointers, mask=mask)
    else:
        state = gl.load(pointers, mask=mask, other=0.0)
    _copy_older(older_s, conv_state_ptr, tile % V, line, position, is_real, K, V, D, E, TAPS)
    _copy_taps(taps_s, conv_ptr, tile % V, is_real, K, V, D, E, TAPS)
    next_line, next_position, is_next_real = _find(
        tile + programs, num_tiles, row_ids_ptr, context_len_ptr, last_line, V
    )
    norm = gl.load(norm_ptr + e).to(gl.float32)
    tile = after_predecessor_here(tile, EARLY)
    head = tile % V
    row = (tile // V).to(gl.int64)
    _copy_newest(newest_s, x_ptr, row, head, is_real, x_stride, K, V, D, E)
    async_copy.commit_group()
    gates = _load_gates(ba_ptr, a_log_ptr, dt_bias_ptr, row, head, is_real, ba_stride, V)

    while tile < num_tiles:
        async_copy.wait_group(0)
        tl.debug_barrier()
        new_q = newest_s.index(0).load(COLUMNS)
        new_k = newest_s.index(1).load(COLUMNS)
        new_v = newest_s.index(2).load(COLUMNS)
        z = newest_s.index(3).load(COLUMNS).to(gl.float32)
        q = _convolve(older_s.index(0), new_q, taps_s.index(0), TAPS)
        k = _convolve(older_s.index(1), new_k, taps_s.index(1), TAPS)
        v = _convolve(older_s.index(2), new_v, taps_s.index(2), TAPS)
        if SEVERAL:
            state = state_s.load(_STATE_LAYOUT)
        b, a, a_log, dt_bias = gates
        states, mask = _at_state(state_ptr, head, line, is_real, V, D, E)
        entry = conv_state_ptr + line * (TAPS * C) + position % TAPS * C
        q_column = _columns_of(0, head, K, V, D, E)
        k_column = _columns_of(1, head, K, V, D, E)
        v_column = _columns_of(2, head, K, V, D, E)
        outs = out_ptr + row * (V * E) + head * E
        writes = is_real
        writes_key = is_real & (head % (V // K) == 0)
        tl.debug_barrier()

        tile += programs
        if SEVERAL:
            # The next tile's copies run while this one is computed.
            head = tile % V
            row = (tile // V).to(gl.int64)
            line = next_line
            position = next_position
            is_real = is_next_real
            pointers, has_state = _at_state(state_ptr, head, line, is_real & (position > 0), V, D, E)
            _copy(state_s, pointers, mask=has_state)
            _copy_older(older_s, conv_state_ptr, head, line, position, is_real, K, V, D, E, TAPS)
            _copy_newest(newest_s, x_ptr, row, head, is_real, x_stride, K, V, D, E)
            _copy_taps(taps_s, conv_ptr, head, is_real, K, V, D, E, TAPS)
            async_copy.commit_group()
            gates = _load_gates(ba_ptr, a_log_ptr, dt_bias_ptr, row, head, is_real, ba_stride, V)
            next_line, next_position, is_next_real = _find(
                tile + programs, num_tiles, row_ids_ptr, context_len_ptr, last_line, V
            )

        q = q * gl.rsqrt(gl.sum(q * q, 0) + qk_eps) * (D**-0.5)
        k = k * gl.rsqrt(gl.sum(k * k, 0) + qk_eps)
        q_s.store(q)
        k_s.store(k)
        tl.debug_barrier()
        q_rows = q_s.load(ROWS)[:, None]
        k_rows = k_s.load(ROWS)[:, None]
        speed = gl.exp(a_log.to(gl.float32))
        state = state * gl.exp(-speed * softplus(a.to(gl.float32) + dt_bias.to(gl.float32)))
        predicted, o = gl.reduce((state * k_rows, state * q_rows), 0, _add_both)
        change = (v - predicted) / (1 + gl.exp(-b.to(gl.float32)))
        state = state + k_rows * change[None, :]
        gl.store(states, state, mask=mask)
        o += gl.sum(k * q, 0) * change
        o = o * gl.rsqrt(gl.sum(o * o, 0) / E + eps) * norm * _silu(z)
        gl.store(outs + e, gl.where(writes, o, 0.0).to(out_ptr.dtype.element_ty))
        gl.store(entry + q_column + e, new_q, mask=writes_key & (e >= 0))
        gl.store(entry + k_column + e, new_k, mask=writes_key & (e >= 0))
        gl.store(entry + v_column + e, new_v, mask=writes & (e >= 0))


def takes(qkvz: Tensor, weights: DeltaWeights, states: DeltaStates) -> bool:
    """Whether gated_delta_decode_hopper supports this call; reads nothing from the device."""
    if qkvz.device.type != "cuda" or not gpu_of(qkvz.device).is_hopper:
        return False
    copied = (weights.conv, *states)
    return (
        states.recurrent.shape[2:] == (HEAD_DIM, HEAD_DIM)
        and qkvz.dtype in (torch.bfloat16, torch.float16)
        and states.conv.dtype == qkvz.dtype
        and weights.conv.element_size() == 2
        and qkvz.stride(0) % 16 == 0
        and all(one.is_contiguous() for one in copied)
        and all(one.data_ptr() % 16 == 0 for one in (qkvz, *copied))
    )


def gated_delta_decode_hopper(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    row_ids: Tensor,
    context_len: Tensor,
    eps: float,
) -> Tensor:
    """`gated_delta_decode` of a call that `takes` accepts."""
    num_lines, num_value_heads, key_dim, value_dim = states.recurrent.shape
    num_tiles = qkvz.shape[0] * num_value_heads
    num_programs = min(num_tiles, PROGRAMS * num_multiprocessors(qkvz.device))
    out = torch.empty((qkvz.shape[0], num_value_heads * value_dim), dtype=qkvz.dtype, device=qkvz.device)
    _gated_delta_decode_hopper_kernel[(num_programs,)](
        qkvz,
        ba,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.norm,
        states.conv,
        states.recurrent,
        row_ids,
        context_len,
        out,
        qkvz.stride(0),
        ba.stride(0),
        num_lines - 1,
        num_tiles,
        eps,
        QK_EPS,
        states.num_key_heads,
        num_value_heads,
        key_dim,
        value_dim,
        TAPS,
        num_tiles > num_programs,
        can_start_early(qkvz.device),
        num_warps=_WARPS,
    )
    return out
