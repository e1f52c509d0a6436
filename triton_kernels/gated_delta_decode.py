"""One decode step of linear attention: each row's next token, its states read and written in place.

gated_delta.py has the formulas and the shape letters. Everything between the layer's projections is one
launch: convolution, normalisation of q and k, gates, delta rule, gated norm. A program is one value head of a
row, whose state S of D x E numbers stays in registers. It loads the state before the projections' kernel has
ended, as early_start.py allows: no kernel of the step has written it. S k and S q are summed together; what
the step adds to S k^T q is then known without S. On Hopper GPUs gated_delta_decode_hopper.py runs the calls
that it takes: there a program copies one state while it computes another.

D and E are powers of two from 16 to 128, columns of a row lie next to each other, rows may be strided. Rows
whose id is the last line are padding: they touch no state, and yield zeros.

Cost: 8 * R * V * D * E bytes moved, about 7 FLOP for each 8 bytes: memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import after_predecessor, can_start_early
from triton_kernels.gated_delta import QK_EPS, TAPS, DeltaStates, DeltaWeights, gated_delta_decode_cpu
from triton_kernels.gated_delta_decode_hopper import gated_delta_decode_hopper, takes
from triton_kernels.gated_delta_ends import softplus
from triton_kernels.tuning import tuned


class DeltaDecodeConfig(NamedTuple):
    """A launch configuration; one for all R, because num_warps changes the last bits."""

    num_warps: int


def default_delta_decode_config(key_dim: int, value_dim: int) -> DeltaDecodeConfig:
    """The configuration if none is given or tuned: up to 128 numbers of the state for each thread.

    Two programs then fit a multiprocessor; with twice the warps, one would.
    """
    return DeltaDecodeConfig(max(1, key_dim * value_dim // 4096))


MANY_PROGRAMS = 1024
"""From so many on, programs of 16-bit inputs have FEW_REGISTERS."""
FEW_REGISTERS = 168
"""For each thread: three programs of 128 threads share a multiprocessor instead of two, and what does not fit
waits in L1."""


@triton.jit
def _add_both(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _gated_delta_decode_kernel(
    x_ptr,
    ba_ptr,
    conv_ptr,
    a_log_ptr,
    dt_bias_ptr,
    norm_ptr,
    conv_state_ptr,
    state_ptr,
    row_ids_ptr,
    context_len_ptr,
    out_ptr,
    x_stride,
    ba_stride,
    last_line,
    eps: tl.constexpr,
    qk_eps: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    TAPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    C: tl.constexpr = 2 * K * D + V * E
    head = tl.program_id(0)
    row = tl.program_id(1)
    key_head = head // (V // K)
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    taps = tl.arange(0, TAPS)[None, :]
    q_columns = key_head * D + d
    k_columns = K * D + key_head * D + d
    v_columns = 2 * K * D + head * E + e

    line = tl.load(row_ids_ptr + row)
    position = tl.load(context_len_ptr + row) - 1
    is_real = line != last_line
    line = line.to(tl.int64)
    # What older tokens give is loaded as tiles of columns and taps: of single vectors in the state's layout,
    # threads would repeat the loads. The state comes last, because the last tile's layout wins (Triton 3.6).
    ring = conv_state_ptr + line * (TAPS * C)
    entries = ((position + 1 + taps) % TAPS) * C
    is_old = is_real & (taps < TAPS - 1) & (position + taps >= TAPS - 1)
    q_taps = tl.load(conv_ptr + q_columns[:, None] * TAPS + taps).to(tl.float32)
    k_taps = tl.load(conv_ptr + k_columns[:, None] * TAPS + taps).to(tl.float32)
    v_taps = tl.load(conv_ptr + v_columns[:, None] * TAPS + taps).to(tl.float32)
    old_q = tl.load(ring + (entries + q_columns[:, None]), mask=is_old, other=0.0).to(tl.float32)
    old_k = tl.load(ring + (entries + k_columns[:, None]), mask=is_old, other=0.0).to(tl.float32)
    old_v = tl.load(ring + (entries + v_columns[:, None]), mask=is_old, other=0.0).to(tl.float32)
    q = tl.sum(q_taps * old_q, 1)
    k = tl.sum(k_taps * old_k, 1)
    v = tl.sum(v_taps * old_v, 1)
    q_tap = tl.sum(tl.where(taps == TAPS - 1, q_taps, 0.0), 1)
    k_tap = tl.sum(tl.where(taps == TAPS - 1, k_taps, 0.0), 1)
    v_tap = tl.sum(tl.where(taps == TAPS - 1, v_taps, 0.0), 1)
    speed = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    shift = tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + e).to(tl.float32)
    states = state_ptr + (line * V + head) * (D * E)
    state_at = d[:, None] * E + e[None, :]
    has_state = is_real & (position > 0)
    state = tl.load(states + state_at, mask=has_state, other=0.0, eviction_policy="evict_first")

    row = after_predecessor(row, EARLY).to(tl.int64)
    x = x_ptr + row * x_stride
    new_q = tl.load(x + q_columns, mask=is_real, other=0.0)
    new_k = tl.load(x + k_columns, mask=is_real, other=0.0)
    new_v = tl.load(x + v_columns, mask=is_real, other=0.0)
    z = tl.load(x + C + head * E + e, mask=is_real, other=0.0).to(tl.float32)
    b = tl.load(ba_ptr + row * ba_stride + head, mask=is_real, other=0.0).to(tl.float32)
    a = tl.load(ba_ptr + row * ba_stride + V + head, mask=is_real, other=0.0).to(tl.float32)

    q += q_tap * new_q.to(tl.float32)
    k += k_tap * new_k.to(tl.float32)
    v += v_tap * new_v.to(tl.float32)
    q = q * tl.sigmoid(q)
    k = k * tl.sigmoid(k)
    v = v * tl.sigmoid(v)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + qk_eps) * (D**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + qk_eps)
    state = state * tl.exp(-speed * softplus(a + shift))
    predicted, o = tl.reduce((state * k[:, None], state * q[:, None]), 0, _add_both)
    change = tl.sigmoid(b) * (v - predicted)
    state = state + k[:, None] * change[None, :]
    o += tl.sum(k * q, 0) * change
    o = o * tl.rsqrt(tl.sum(o * o, 0) / E + eps) * norm * z * tl.sigmoid(z)

    # Only what depends on the loads behind the wait may be stored: these values do, and `row` does.
    entry = ring + (position % TAPS) * C
    writes_key = is_real & (head % (V // K) == 0)
    tl.store(entry + q_columns, new_q, mask=writes_key)
    tl.store(entry + k_columns, new_k, mask=writes_key)
    tl.store(entry + v_columns, new_v, mask=is_real)
    tl.store(states + state_at, state, mask=is_real, cache_modifier=".cs")  # as the load: not needed soon
    o = tl.where(is_real, o, 0.0)
    tl.store(out_ptr + row * (V * E) + head * E + e, o.to(out_ptr.dtype.element_ty))


def gated_delta_decode_triton(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    row_ids: Tensor,
    context_len: Tensor,
    eps: float,
    config: DeltaDecodeConfig | None = None,
) -> Tensor:
    """Launch a kernel on any device: without a configuration Hopper's, if it takes the call."""
    if config is None and takes(qkvz, weights, states):
        return gated_delta_decode_hopper(qkvz, ba, weights, states, row_ids, context_len, eps)
    num_lines, num_value_heads, key_dim, value_dim = states.recurrent.shape
    num_key_heads = (states.conv.shape[2] - num_value_heads * value_dim) // (2 * key_dim)
    if config is None:
        default = default_delta_decode_config(key_dim, value_dim)
        config = tuned(
            default,
            "gated_delta_decode",
            qkvz.device,
            qkvz.dtype,
            exact=(key_dim, value_dim),
            near=(num_value_heads,),
        )
    num_rows = qkvz.shape[0]
    out = torch.empty((num_rows, num_value_heads * value_dim), dtype=qkvz.dtype, device=qkvz.device)
    needs_many_registers = key_dim * value_dim // config.num_warps == 4096
    crowded = (
        needs_many_registers
        and num_rows * num_value_heads >= MANY_PROGRAMS
        and qkvz.element_size() == 2  # of 32 bits, too much does not fit
        and qkvz.device.type != "cpu"
    )
    _gated_delta_decode_kernel[(num_value_heads, num_rows)](
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
        eps,
        QK_EPS,
        num_key_heads,
        num_value_heads,
        key_dim,
        value_dim,
        TAPS,
        can_start_early(qkvz.device),
        num_warps=config.num_warps,
        **({"maxnreg": FEW_REGISTERS} if crowded else {}),
    )
    return out


def gated_delta_decode(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    row_ids: Tensor,
    context_len: Tensor,
    eps: float,
) -> Tensor:
    """One token of each row: [R, V * E] of qkvz's dtype; writes the rows' lines of `states`.

    Args:
        qkvz: [R, C + V * E], the projections: q, k, v of all heads, then the gate z of the norm.
        ba: [R, 2V], b and a of each value head.
        row_ids: int32 [R], each row's line of the states, once but for the last line, which is padding's.
        context_len: int32 [R], tokens of each row, this one included.
        eps: of the norm.
    """
    if qkvz.device.type == "cpu":
        return gated_delta_decode_cpu(qkvz, ba, weights, states, row_ids, context_len, eps)
    return _decode(qkvz, ba, *weights, *states, row_ids, context_len, eps)


# Opaque to torch.compile, whose code serves any number of rows: the op chooses when it runs, which is once
# for each recorded graph.


@torch.library.custom_op("minisgl::gated_delta_decode", mutates_args=("conv_state", "recurrent_state"))
def _decode(
    qkvz: Tensor,
    ba: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    conv_state: Tensor,
    recurrent_state: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    eps: float,
) -> Tensor:
    weights = DeltaWeights(conv, a_log, dt_bias, norm)
    states = DeltaStates(conv_state, recurrent_state)
    return gated_delta_decode_triton(qkvz, ba, weights, states, row_ids, context_len, eps)


@_decode.register_fake
def _(
    qkvz: Tensor,
    ba: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    conv_state: Tensor,
    recurrent_state: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    eps: float,
) -> Tensor:
    _, num_value_heads, _, value_dim = recurrent_state.shape
    return qkvz.new_empty((qkvz.shape[0], num_value_heads * value_dim))
