"""Linear attention with the gated delta rule: what it means, its reference, and what a CPU runs.

    x      = (q | k | v), a token's channels            then, for each channel c and the last four tokens
    y[t,c] = silu(sum over j < 4 of conv[c, j] * x[t - 3 + j, c])      (zeros before the first token)
    q, k   = the parts of y, each head divided by sqrt(sum of squares + 1e-6); q also by sqrt(D)
    g      = -exp(a_log) * softplus(a + dt_bias)        beta = sigmoid(b)
    S      = exp(g) * S;  S = S + k (beta * (v - S^T k))^T;  o = S^T q        for each value head
    out    = norm * o / sqrt(mean(o^2) + eps) * silu(z)

T tokens, R rows of the batch, B lines of the state tables, K key heads, V value heads, G = V / K value heads
per key head, D and E elements of a key head and a value head, C = 2 * K * D + V * E channels. S is float32
[D, E]. A row's states lie in the line of its row id; the last line is scratch memory, for padding rows. Line
l's convolution state is a ring: entry p % 4 is the x of position p. So a decode step writes the one entry
that nobody reads. States of tokens before position 0 are never read (they may be NaN): a row whose first new
token has position 0 starts from zeros.

gated_delta_decode.py and gated_delta_prefill.py have the kernels.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TAPS = 4
"""Tokens that a channel's convolution sees."""
CHUNK = 64
"""Tokens that prefill computes at once; results depend on where a row's chunks begin by rounding only."""
QK_EPS = 1e-6


class DeltaWeights(NamedTuple):
    """A layer's parameters beside its projections."""

    conv: Tensor  # [C, 4]
    a_log: Tensor  # float32 [V]
    dt_bias: Tensor  # float32 [V]
    norm: Tensor  # [E]


class DeltaStates(NamedTuple):
    """A layer's states of all rows; both ops write the lines of their rows."""

    conv: Tensor  # [B, 4, C], of x's dtype
    recurrent: Tensor  # float32 [B, V, D, E]

    @property
    def num_key_heads(self) -> int:
        """K."""
        _, num_value_heads, key_dim, value_dim = self.recurrent.shape
        return (self.conv.shape[2] - num_value_heads * value_dim) // (2 * key_dim)


class DeltaSaves(NamedTuple):
    """Where prefill keeps states that rows have in the middle of their new tokens, as snapshots.

    A row's chunks begin anew there, as if it had been two prefills.
    """

    part_start: Tensor  # int32 [2R + 1], row r's first and second part; without a snapshot, this one is empty
    slots: Tensor  # int32 [R], the line of `states` that gets the state behind the first part; -1 = none
    states: DeltaStates  # [N, ...]


def gated_delta_reference(
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
    """Both ops in plain torch, token by token, in float32 (or float64); see `gated_delta_prefill`."""
    dtype = torch.float64 if qkvz.dtype == torch.float64 else torch.float32
    num_channels = states.conv.shape[2]
    out = torch.zeros(qkvz.shape[0], qkvz.shape[1] - num_channels, dtype=qkvz.dtype, device=qkvz.device)
    starts = row_start.tolist()
    for r, (line, length) in enumerate(zip(row_ids.tolist(), context_len.tolist(), strict=True)):
        for t in range(starts[r], starts[r + 1]):
            position = length - starts[r + 1] + t
            x, z = qkvz[t].split((num_channels, qkvz.shape[1] - num_channels))
            states.conv[line, position % TAPS] = x
            if position == 0:
                states.recurrent[line] = 0
            seen = [states.conv[line, p % TAPS] for p in range(max(0, position - TAPS + 1), position + 1)]
            y = sum(
                weights.conv[:, TAPS - len(seen) + j].to(dtype) * one.to(dtype) for j, one in enumerate(seen)
            )
            assert isinstance(y, Tensor)
            q, k, v = heads_of(F.silu(y).unsqueeze(0), states)
            decay, beta = gates_of(ba[t : t + 1], weights, dtype)
            state = states.recurrent[line].to(dtype) * decay[0].exp()[:, None, None]
            predicted = torch.einsum("vde,vd->ve", state, k[0])
            state = state + torch.einsum("vd,ve->vde", k[0], beta[0][:, None] * (v[0] - predicted))
            states.recurrent[line] = state
            o = torch.einsum("vde,vd->ve", state, q[0])
            out[t] = gated_norm(o.unsqueeze(0), z.unsqueeze(0), weights.norm, eps)[0].to(out.dtype)
            if saves is not None and t == saves.part_start[2 * r + 1] - 1 and saves.slots[r] >= 0:
                saves.states.conv[saves.slots[r]] = states.conv[line]
                saves.states.recurrent[saves.slots[r]] = states.recurrent[line]
    return out


def heads_of(y: Tensor, states: DeltaStates) -> tuple[Tensor, Tensor, Tensor]:
    """y [T, C] -> q, k [T, V, D] and v [T, V, E], q and k normalised."""
    _, num_value_heads, key_dim, value_dim = states.recurrent.shape
    key_size = states.num_key_heads * key_dim
    q, k, v = y.split((key_size, key_size, num_value_heads * value_dim), dim=1)
    group = num_value_heads // states.num_key_heads
    q, k = (one.view(len(y), states.num_key_heads, key_dim).repeat_interleave(group, dim=1) for one in (q, k))
    q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + QK_EPS) for one in (q, k))
    return q * key_dim**-0.5, k, v.view(len(y), num_value_heads, value_dim)


def gates_of(ba: Tensor, weights: DeltaWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """ba [T, 2V] -> g and beta, [T, V] each."""
    b, a = ba.to(dtype).chunk(2, dim=1)
    g = -weights.a_log.to(dtype).exp() * F.softplus(a + weights.dt_bias.to(dtype))
    return g, torch.sigmoid(b)


def gated_norm(o: Tensor, z: Tensor, norm: Tensor, eps: float) -> Tensor:
    """o [T, V, E], z [T, V * E] -> [T, V * E]."""
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * norm.to(o.dtype)
    return normed.flatten(1) * F.silu(z.to(o.dtype))


def gated_delta_decode_cpu(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    states: DeltaStates,
    row_ids: Tensor,
    context_len: Tensor,
    eps: float,
) -> Tensor:
    """`gated_delta_decode`, all rows at once."""
    num_channels = states.conv.shape[2]
    out = torch.zeros(qkvz.shape[0], qkvz.shape[1] - num_channels, dtype=qkvz.dtype, device=qkvz.device)
    (real,) = torch.where(row_ids != states.conv.shape[0] - 1)
    line, position = row_ids[real].long(), context_len[real].long() - 1
    x, z = qkvz[real].split((num_channels, out.shape[1]), dim=1)
    states.conv[line, position % TAPS] = x
    y = x.float() * weights.conv[:, TAPS - 1].float()
    for back in range(1, TAPS):
        there = position >= back
        before = states.conv[line, (position - back) % TAPS].float().masked_fill(~there[:, None], 0.0)
        y += before * weights.conv[:, TAPS - 1 - back].float()
    q, k, v = heads_of(F.silu(y), states)
    decay, beta = gates_of(ba[real], weights, torch.float32)
    state = states.recurrent[line].masked_fill((position == 0)[:, None, None, None], 0.0)
    state *= decay.exp()[:, :, None, None]
    predicted = torch.einsum("rvde,rvd->rve", state, k)
    state += k.unsqueeze(3) * (beta.unsqueeze(2) * (v - predicted)).unsqueeze(2)
    states.recurrent[line] = state
    o = torch.einsum("rvde,rvd->rve", state, q)
    out[real] = gated_norm(o, z, weights.norm, eps).to(out.dtype)
    return out


def gated_delta_prefill_cpu(
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
    """`gated_delta_prefill`, a part of a row at a time, in chunks."""
    num_channels = states.conv.shape[2]
    out = torch.zeros(qkvz.shape[0], qkvz.shape[1] - num_channels, dtype=qkvz.dtype, device=qkvz.device)
    starts = (row_start if saves is None else saves.part_start).tolist()
    per_row = 1 if saves is None else 2
    ends = [end for end in starts[per_row::per_row] for _ in range(per_row)]
    lines, lengths = (one.tolist() for one in (row_ids, context_len))
    for part, (first, end, row_end) in enumerate(zip(starts, starts[1:], ends, strict=False)):
        line = lines[part // per_row]
        if first == end:
            continue
        begin = lengths[part // per_row] - (row_end - first)
        x, z = qkvz[first:end].split((num_channels, out.shape[1]), dim=1)
        y = _convolved(x, states.conv[line], begin, weights.conv)
        q, k, v = (one.transpose(0, 1) for one in heads_of(F.silu(y), states))
        decay, beta = (one.transpose(0, 1) for one in gates_of(ba[first:end], weights, torch.float32))
        state = states.recurrent[line] if begin else torch.zeros_like(states.recurrent[line])
        parts = []
        for low in range(0, end - first, CHUNK):
            span = slice(low, min(low + CHUNK, end - first))
            chunk = (q[:, span], k[:, span], v[:, span], decay[:, span], beta[:, span])
            o, state = _chunk(*chunk, state)
            parts.append(o)
        states.recurrent[line] = state
        o = torch.cat(parts, dim=1).transpose(0, 1)
        out[first:end] = gated_norm(o, z, weights.norm, eps).to(out.dtype)
        if saves is not None and part % 2 == 0:
            slot = int(saves.slots[part // 2])
            if slot >= 0:
                saves.states.conv[slot] = states.conv[line]
                saves.states.recurrent[slot] = state
    return out


def _convolved(x: Tensor, ring: Tensor, begin: int, conv: Tensor) -> Tensor:
    """The convolution of new tokens x [n, C], the first of which has position `begin`; updates the ring."""
    count = len(x)
    before = torch.zeros(TAPS - 1, x.shape[1], dtype=torch.float32, device=x.device)
    for back in range(1, min(TAPS - 1, begin) + 1):
        before[TAPS - 1 - back] = ring[(begin - back) % TAPS].float()
    seen = torch.cat((before, x.float()))
    for position in range(max(begin, begin + count - TAPS), begin + count):
        ring[position % TAPS] = x[position - begin]
    taps = conv.float()
    y = seen[:count] * taps[:, 0]
    for j in range(1, TAPS):
        y += seen[j : j + count] * taps[:, j]
    return y


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Up to CHUNK tokens at once: q, k [V, n, D], v [V, n, E], decay, beta [V, n], state [V, D, E].

    The delta rule of a chunk in its WY form (https://arxiv.org/abs/2412.06464): a unit triangular system
    gives what each token writes if the state at the chunk's begin were zero, and what that state changes.
    """
    total = decay.cumsum(1)
    # Sums of the decays behind j up to i; differences of totals would be less exact, and NaN at -inf.
    between = decay.unsqueeze(2).expand(-1, -1, decay.shape[1]).tril(-1).cumsum(1).exp().tril()
    system = (beta.unsqueeze(2) * (k @ k.transpose(1, 2)) * between).tril(-1)
    right = torch.cat((beta.unsqueeze(2) * v, (beta * total.exp()).unsqueeze(2) * k), dim=2)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split((v.shape[2], k.shape[2]), dim=2)
    new = written - read @ state
    o = (q * total.exp().unsqueeze(2)) @ state + ((q @ k.transpose(1, 2)) * between) @ new
    left = between[:, -1].unsqueeze(2)
    return o, state * total[:, -1].exp()[:, None, None] + (k * left).transpose(1, 2) @ new
