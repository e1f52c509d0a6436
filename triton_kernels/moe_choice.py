"""The choice of experts where it is more than the largest logits: a launch between router and experts.

    score[t, e]  = sigmoid(logits[t, e]), or softmax(logits[t]) over the experts
    rank[t, e]   = score[t, e] + bias[e]; -inf outside the `kept_groups` groups of E / num_groups experts
                   whose two largest ranks have the largest sums
    S(t)         = the top_k experts with the largest rank, the lowest id first among equals
    w[t, e]      = score[t, e] * |expert_scale[e]|
    choice[t, e] = log(w[t, e]) for e in S(t), else -inf
    factor[t]    = factor * sum over S(t) of w[t] / (renormalize ? sum over S(t) of score[t] : 1)

So fused_moe, given `choice` as its logits and told to renormalize, goes to S(t) with weights
w[t, e] / sum over S(t) of w[t]; times factor[t], these are the weights that were asked for. The kernels of
the experts need not know how a family chooses: DeepSeek's sigmoid, correction bias and groups (GLM-4.5), the
scale of each expert (Gemma 4's, quantized; fused_moe itself takes scales, and negative ones too).

T tokens, E experts. Float32 inside. NaN logits count as -inf; a token all of whose logits are -inf, which is
padding, keeps -inf everywhere and a factor of 0. 1 <= top_k <= E <= 1024.

Cost: 2 * T * E elements: a launch.
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
from triton_kernels.moe_route import NO_KEY, expert_lanes, logit_keys


class Choice(NamedTuple):
    """How experts are chosen and weighted."""

    top_k: int
    sigmoid: bool = True
    """The scores are sigmoids, not a softmax."""
    renormalize: bool = True
    """The chosen experts' scores are divided by their sum."""
    factor: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1


def choose_experts_reference(
    logits: Tensor, choice: Choice, bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same as choose_experts, in plain torch; float64 if the logits are."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = wide.masked_fill(wide.isnan(), float("-inf"))
    nowhere = wide.amax(1, keepdim=True) == float("-inf")
    log_score = torch.nn.functional.logsigmoid(wide) if choice.sigmoid else wide.log_softmax(1)
    rank = log_score.exp() if bias is None else log_score.exp() + bias
    if bias is None and choice.num_groups == 1:
        rank = wide  # the same order, without ties that a rounding makes
    if choice.num_groups > 1:
        groups = rank.unflatten(1, (choice.num_groups, -1))
        sums = groups.topk(2, dim=2).values.sum(2)
        kept = sums.sort(dim=1, descending=True, stable=True).indices[:, : choice.kept_groups]
        is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter(1, kept, True)
        rank = groups.masked_fill(~is_kept.unsqueeze(2), float("-inf")).flatten(1)
    chosen = rank.sort(dim=1, descending=True, stable=True).indices[:, : choice.top_k]
    log_weight = log_score if expert_scale is None else log_score + expert_scale.abs().log()
    weights = torch.full_like(wide, float("-inf")).scatter(1, chosen, log_weight.gather(1, chosen))
    total = weights.logsumexp(1, keepdim=True)
    if choice.renormalize:
        total = total - log_score.gather(1, chosen).logsumexp(1, keepdim=True)
    factors = (total.exp() * choice.factor).nan_to_num(0.0)  # no chosen expert has a weight
    return weights.masked_fill(nowhere, float("-inf")), factors.masked_fill(nowhere, 0.0)


@triton.jit
def _largest(keys, lanes, BLOCK: tl.constexpr):
    """(lowest lane with each row's largest key, the keys without it)."""
    best = keys == tl.max(keys, 1)[:, None]
    lowest = tl.min(tl.where(best, lanes[None, :], BLOCK), 1)
    return lowest, tl.where(lanes[None, :] == lowest[:, None], NO_KEY, keys)


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_kernel(
    logits_ptr,
    bias_ptr,
    expert_scale_ptr,
    weights_ptr,
    factors_ptr,
    num_tokens,
    logits_stride,
    factor: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    EARLY: tl.constexpr,
):
    num_tokens = between_kernels(num_tokens, EARLY)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lanes = tl.arange(0, BLOCK_E)
    in_range = (tokens < num_tokens)[:, None] & (lanes < E)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * logits_stride + lanes[None, :]
    logits = tl.load(logits_ptr + offsets, in_range, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    top = tl.max(logits, 1)
    somewhere = top > float("-inf")
    if SIGMOID:
        small = tl.exp(-tl.abs(logits))
        log_score = tl.minimum(logits, 0.0) - tl.log(1.0 + small)
    else:
        shifted = logits - tl.where(somewhere, top, 0.0)[:, None]
        mass = tl.sum(tl.exp(shifted), 1)
        log_score = shifted - tl.log(tl.where(somewhere, mass, 1.0))[:, None]
    score = tl.exp(log_score)
    rank = logits
    if BIAS:
        rank = score + tl.load(bias_ptr + lanes, lanes < E, other=0.0).to(tl.float32)[None, :]
    elif GROUPS > 1:
        rank = score
    keys = tl.where(in_range, logit_keys(rank), NO_KEY)
    if GROUPS > 1:
        group_of = lanes // (E // GROUPS)
        groups = tl.arange(0, BLOCK_G)
        sums = tl.full([BLOCK_T, BLOCK_G], float("-inf"), tl.float32)
        for group in range(GROUPS):
            mine = tl.where((group_of == group)[None, :], keys, NO_KEY)
            first, rest = _largest(mine, lanes, BLOCK_E)
            second, rest = _largest(rest, lanes, BLOCK_E)
            two = (lanes[None, :] == first[:, None]) | (lanes[None, :] == second[:, None])
            both = tl.sum(tl.where(two, rank, 0.0), 1)
            sums = tl.where((groups == group)[None, :], both[:, None], sums)
        group_keys = tl.where((groups < GROUPS)[None, :], logit_keys(sums), NO_KEY)
        kept = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
        for _ in range(KEPT):
            best, group_keys = _largest(group_keys, groups, BLOCK_G)
            kept = kept | (group_of[None, :] == best[:, None]).to(tl.int32)
        keys = tl.where(kept > 0, keys, NO_KEY)
    chosen = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
    for _ in range(TOP_K):
        best, keys = _largest(keys, lanes, BLOCK_E)
        chosen = chosen | (lanes[None, :] == best[:, None]).to(tl.int32)
    taken = (chosen > 0) & in_range & somewhere[:, None]
    log_weight = log_score
    if SCALE:
        scale = tl.load(expert_scale_ptr + lanes, lanes < E, other=1.0).to(tl.float32)
        log_weight += tl.log(tl.abs(scale))[None, :]
    base = tl.zeros([BLOCK_T], tl.float32)
    if RENORMALIZE:  # relative to the largest, so that no score vanishes
        base = tl.max(tl.where(taken, log_score, float("-inf")), 1)
        base = tl.where(base > float("-inf"), base, 0.0)
    total = tl.sum(tl.where(taken, tl.exp(log_weight - base[:, None]), 0.0), 1)
    if RENORMALIZE:
        scores = tl.sum(tl.where(taken, tl.exp(log_score - base[:, None]), 0.0), 1)
        total = total / tl.where(scores > 0, scores, 1.0)
    there = tokens.to(tl.int64)[:, None] * E + lanes[None, :]
    tl.store(weights_ptr + there, tl.where(taken, log_weight, float("-inf")), in_range)
    tl.store(factors_ptr + tokens, tl.where(somewhere, total * factor, 0.0), tokens < num_tokens)


def choose_experts_triton(
    logits: Tensor, choice: Choice, bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel on any device; for T of at least 1."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=logits.device)
    factors = torch.empty((num_tokens, 1), dtype=torch.float32, device=logits.device)
    block_e = expert_lanes(num_experts)
    block_t = max(1, min(8, 2048 // block_e))
    _choose_kernel[(ceil_div(num_tokens, block_t),)](
        logits,
        logits if bias is None else bias,
        logits if expert_scale is None else expert_scale,
        weights,
        factors,
        num_tokens,
        logits.stride(0),
        choice.factor,
        num_experts,
        choice.top_k,
        choice.sigmoid,
        choice.renormalize,
        bias is not None,
        expert_scale is not None,
        choice.num_groups,
        choice.kept_groups,
        block_t,
        block_e,
        max(2, next_power_of_2(choice.num_groups)),
        can_start_early(logits.device),
        num_warps=4,
    )
    return weights, factors


def choose_experts(
    logits: Tensor, choice: Choice, bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(choice float32 [T, E], factors float32 [T, 1]) of the router's logits [T, E].

    bias and expert_scale are [E]; num_groups divides E into groups of at least 2, and the kept ones have at
    least top_k experts.
    """
    if logits.device.type == "cuda":
        return choose_experts_triton(logits, choice, bias, expert_scale)
    return choose_experts_reference(logits, choice, bias, expert_scale)
