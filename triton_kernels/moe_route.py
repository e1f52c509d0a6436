"""Routing on the device: the experts of each token, and the (token, expert) pairs sorted by expert.

    p[t]                = softmax(logits[t])                    over the experts, in float32
    expert[t, s]        = the expert with the s-th largest logit, the lowest id first among equals
    weight[t, s]        = p[t, expert[t, s]], divided by their sum over s if renormalize, and times a scale of
                          the expert, if there is one
    order               = the pairs t * top_k + s, sorted by expert, by token within an expert
    expert_end[e]       = pairs of the experts 0..e: expert e owns order[expert_end[e-1] : expert_end[e]]

T tokens, E experts, P = T * top_k pairs. NaN logits count as -inf; a token all of whose logits are -inf (a
padding token, say) goes to no expert: its pairs carry expert E and are not in `order`, which then ends
earlier. 1 <= top_k <= E <= 1024.

Two launches, without atomics and host syncs: the grids depend on T alone. Up to FEW_PAIRS pairs, a warp
picks the experts of a token, and a pair's place is the number of pairs that come before it, each compared
with each. Both kernels start early. With more pairs, it is a counting sort: each block of tokens picks its
experts, numbers each expert's pairs and writes a histogram. Then each block sums the histograms before its
own and writes its pairs to their places.

Cost: T * E logits read, 16 bytes a pair; P^2 comparisons for few pairs, else (T / BLOCK_T)^2 * E * 4 bytes
of histograms from L2.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import between_kernels, can_start_early
from triton_kernels.launch import ceil_div, next_power_of_2

FEW_PAIRS = 4096
"""Up to here each pair is compared with each."""
_BLOCK_T = 32
_PLACES = 16
"""Pairs of a program that places them, and experts whose ends it counts."""


class Routing(NamedTuple):
    """The routing of T tokens to E experts."""

    experts: Tensor  # int32 [T, top_k]; E = no expert
    weights: Tensor  # float32 [T, top_k]
    order: Tensor  # int32 [T * top_k], the pairs by expert
    expert_end: Tensor  # int32 [E]


def top_k_reference(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """(experts int32 [T, top_k], weights float32 or float64 [T, top_k]) in plain torch."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = wide.masked_fill(wide.isnan(), float("-inf"))
    experts = wide.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(1).gather(1, experts)
    if renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    nowhere = wide.amax(1, keepdim=True) == float("-inf")
    experts = experts.masked_fill(nowhere, logits.shape[1])
    return experts.int(), weights.masked_fill(nowhere, 0.0)


NO_KEY = tl.constexpr(-(2**31))
"""Key of lanes without an expert and of picked lanes: the smallest integer, which no logit maps to."""


@triton.jit
def logit_keys(logits):
    """int32 in the order of the float32 logits (-0 as 0, no NaN): a warp's maximum is one instruction."""
    keys = (logits + 0.0).to(tl.int32, bitcast=True)
    return keys ^ ((keys >> 31) & 0x7FFFFFFF)


@triton.jit
def key_logits(keys):
    """The logits of these keys, float32."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_keys(logits_ptr, ids, E: tl.constexpr):
    """The keys of a token's logits."""
    logits = tl.load(logits_ptr + ids, ids < E, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    return tl.where(ids < E, logit_keys(logits), NO_KEY)


@triton.jit
def pick_expert(keys, ids, BLOCK_E: tl.constexpr):
    """(expert with the largest key, the lowest id first among equals; its key; the keys without it)."""
    key = tl.max(keys, 0)
    expert = tl.min(tl.where(keys == key, ids, BLOCK_E), 0)
    return expert, key, tl.where(ids == expert, NO_KEY, keys)


@triton.jit
def _pick_experts_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    scales_ptr,
    logits_stride,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr,
):
    ids = tl.arange(0, BLOCK_E)
    token = between_kernels(tl.program_id(0), EARLY).to(tl.int64)
    keys = load_keys(logits_ptr + token * logits_stride, ids, E)
    top = key_logits(tl.max(keys, 0))
    somewhere = top > float("-inf")
    mass = tl.where(ids < E, tl.exp(key_logits(keys) - tl.where(somewhere, top, 0.0)), 0.0)
    slots = tl.full([BLOCK_E], TOP_K, tl.int32)
    for slot in tl.static_range(TOP_K):
        expert, _, keys = pick_expert(keys, ids, BLOCK_E)
        slots = tl.where(ids == expert, slot, slots)
    chosen = slots < TOP_K
    total = tl.sum(tl.where(chosen, mass, 0.0) if RENORMALIZE else mass, 0)
    weights = mass / tl.where(somewhere, total, 1.0)
    if SCALES:
        weights *= tl.load(scales_ptr + ids, ids < E, other=0.0).to(tl.float32)
    tl.store(experts_ptr + token * TOP_K + slots, tl.where(somewhere, ids, E), chosen)
    tl.store(weights_ptr + token * TOP_K + slots, weights, chosen)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_pairs_kernel(
    experts_ptr,
    order_ptr,
    expert_end_ptr,
    num_pairs,
    E: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    num_pairs = between_kernels(num_pairs, EARLY)
    mine = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    expert = tl.load(experts_ptr + mine, mine < num_pairs, other=E)
    place = tl.zeros([PLACES], tl.int32)
    end = tl.zeros([PLACES], tl.int32)  # of the experts with the numbers `mine`
    for first in range(0, num_pairs, BLOCK):
        others = first + tl.arange(0, BLOCK)
        their = tl.load(experts_ptr + others, others < num_pairs, other=E)[None, :]
        is_earlier = (their == expert[:, None]) & (others[None, :] < mine[:, None])
        place += tl.sum(((their < expert[:, None]) | is_earlier).to(tl.int32), 1)
        end += tl.sum((their <= mine[:, None]).to(tl.int32), 1)
    tl.store(order_ptr + place, mine, expert < E)
    tl.store(expert_end_ptr + mine, end, mine < E)


@triton.jit(do_not_specialize=["num_tokens"])
def _top_k_kernel(
    logits_ptr,
    experts_ptr,
    weights_ptr,
    indices_ptr,
    counts_ptr,
    scales_ptr,
    num_tokens,
    logits_stride,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    tokens = block * BLOCK_T + tl.arange(0, BLOCK_T)
    lanes = tl.arange(0, BLOCK_E)
    in_range = (tokens < num_tokens)[:, None] & (lanes < E)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * logits_stride + lanes[None, :]
    logits = tl.load(logits_ptr + offsets, in_range, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    keys = tl.where(in_range, logit_keys(logits), NO_KEY)
    top = key_logits(tl.max(keys, 1))
    somewhere = (top > float("-inf")) & (tokens < num_tokens)
    mass = tl.exp(logits - tl.where(somewhere, top, 0.0)[:, None])
    slots = tl.full([BLOCK_T, BLOCK_E], TOP_K, tl.int32)
    for slot in range(TOP_K):
        best = keys == tl.max(keys, 1)[:, None]
        lowest = tl.min(tl.where(best, lanes[None, :], BLOCK_E), 1)
        picked = lanes[None, :] == lowest[:, None]
        slots = tl.where(picked, slot, slots)
        keys = tl.where(picked, NO_KEY, keys)
    chosen = (slots < TOP_K) & in_range
    total = tl.sum(tl.where(chosen, mass, 0.0), 1) if RENORMALIZE else tl.sum(mass, 1)
    weights = tl.where(somewhere[:, None], mass / tl.where(somewhere, total, 1.0)[:, None], 0.0)
    if SCALES:
        weights *= tl.load(scales_ptr + lanes, lanes < E, other=0.0).to(tl.float32)[None, :]
    routed = (chosen & somewhere[:, None]).to(tl.int32)
    indices = tl.cumsum(routed, 0) - routed
    counts = tl.sum(routed, 0)
    pairs = tokens[:, None] * TOP_K + slots
    expert = tl.where(somewhere[:, None], lanes[None, :], E)
    tl.store(experts_ptr + pairs, expert, chosen)
    tl.store(weights_ptr + pairs, weights, chosen)
    tl.store(counts_ptr + block * E + lanes, counts, lanes < E)
    tl.store(indices_ptr + pairs, indices, chosen)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _sort_kernel(
    experts_ptr,
    indices_ptr,
    counts_ptr,
    order_ptr,
    expert_end_ptr,
    num_pairs,
    num_blocks,
    E: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    block = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_E)
    all_counts = tl.zeros([BLOCK_B, BLOCK_E], tl.int32)
    counts_before = tl.zeros([BLOCK_B, BLOCK_E], tl.int32)
    for b0 in range(0, num_blocks, BLOCK_B):
        blocks = b0 + tl.arange(0, BLOCK_B)
        mask = (blocks < num_blocks)[:, None] & (lanes < E)[None, :]
        counts = tl.load(counts_ptr + blocks[:, None] * E + lanes[None, :], mask, other=0)
        all_counts += counts
        counts_before += tl.where((blocks < block)[:, None], counts, 0)
    total = tl.sum(all_counts, 0)
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(expert_end_ptr + lanes, ends, lanes < E)
    begin = ends - total + tl.sum(counts_before, 0)
    within = tl.arange(0, PAIRS)
    pairs = block * BLOCK_PAIRS + within
    mask = (within < BLOCK_PAIRS) & (pairs < num_pairs)
    expert = tl.load(experts_ptr + pairs, mask, other=E)
    index = tl.load(indices_ptr + pairs, mask, other=0)
    routed = mask & (expert < E)
    place = index + tl.gather(begin, tl.where(routed, expert, 0), 0)
    tl.store(order_ptr + place, pairs, routed)


def expert_lanes(num_experts: int) -> int:
    """The block that holds a value for every expert; under a warp's 32 lanes, Triton 3.6 fails to compile."""
    return max(32, next_power_of_2(num_experts))


def route_triton(logits: Tensor, top_k: int, renormalize: bool, scales: Tensor | None = None) -> Routing:
    """Routing of logits [T, E], T >= 1, rows may be strided; scales [E] are factors of the weights."""
    num_tokens, num_experts = logits.shape
    num_pairs = num_tokens * top_k

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=logits.device)

    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    routing = Routing(ints(num_tokens, top_k), weights, ints(num_pairs), ints(num_experts))
    if num_pairs > FEW_PAIRS:
        _route_many(logits, renormalize, scales, routing)
        return routing
    early = can_start_early(logits.device)
    _pick_experts_kernel[(num_tokens,)](
        logits,
        routing.experts,
        routing.weights,
        logits if scales is None else scales,
        logits.stride(0),
        num_experts,
        top_k,
        renormalize,
        scales is not None,
        expert_lanes(num_experts),
        early,
        num_warps=1,
    )
    _place_pairs_kernel[(ceil_div(max(num_pairs, num_experts), _PLACES),)](
        routing.experts,
        routing.order,
        routing.expert_end,
        num_pairs,
        num_experts,
        _PLACES,
        min(512, max(32, next_power_of_2(num_pairs))),
        early,
        num_warps=4,
    )
    return routing


def _route_many(logits: Tensor, renormalize: bool, scales: Tensor | None, routing: Routing) -> None:
    """Fill the routing of many pairs."""
    num_tokens, num_experts = logits.shape
    num_pairs, top_k = len(routing.order), routing.experts.shape[1]
    block_e = expert_lanes(num_experts)
    num_blocks = ceil_div(num_tokens, _BLOCK_T)
    indices = torch.empty_like(routing.experts)
    counts = indices.new_empty((num_blocks, num_experts))
    _top_k_kernel[(num_blocks,)](
        logits,
        routing.experts,
        routing.weights,
        indices,
        counts,
        logits if scales is None else scales,
        num_tokens,
        logits.stride(0),
        num_experts,
        top_k,
        renormalize,
        scales is not None,
        _BLOCK_T,
        block_e,
        num_warps=8,
    )
    _sort_kernel[(num_blocks,)](
        routing.experts,
        indices,
        counts,
        routing.order,
        routing.expert_end,
        num_pairs,
        num_blocks,
        num_experts,
        _BLOCK_T * top_k,
        next_power_of_2(_BLOCK_T * top_k),
        block_e,
        max(1, 8192 // block_e),
        num_warps=8,
    )
