"""A mixture of SwiGLU experts: from the router's logits and the tokens to the layer's output.

    p[t]      = softmax(router_logits[t])                         over the E experts, in float32
    S(t)      = the top_k experts with the largest logits, the lowest id first among equals
    w[t, e]   = p[t, e] / (renormalize ? sum over S(t) of p[t] : 1)
    out[t]    = sum over e in S(t) of w[t, e] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t]))

With biases of the experts, both products have theirs; moe_gate.py has other activations than SiLU. With
scales of the experts (Gemma 4), each w[t, e] is then multiplied by that of e. There may be a shared expert
(Qwen3.5, Qwen3-Next): one more expert of the same width, whose column follows the others' in the logits, but
which every token goes to:

    out[t]   += sigmoid(router_logits[t, E]) * down[E] @ (silu(gate[E] @ x[t]) * (up[E] @ x[t]))

T tokens, E experts, M model width, F expert width (both multiples of 16); gate[e] and up[e] are the upper and
lower F rows of gate_up[e]. T may be 0; rows of x and of the logits may be strided. NaN logits count as -inf.
A token whose logits are all -inf (padding) goes to no expert, costs nothing and yields zeros. Weights of
experts without tokens are never read (they may hold NaN).

Up to four tokens, or as many as a tuning table says, use moe_pairs.py (two launches). More tokens are sorted
by expert (moe_route.py, two launches) and multiplied in tiles (moe_gemm.py, three); a shared expert of theirs
is two products as of any layer. There are no host syncs and no atomics, and grids depend only on T: one CUDA
graph serves every routing, and equal inputs give equal bits. The last bits depend on T (through the
configuration), not on the other tokens of a batch of the same T.

Cost: 3 * M * F elements for every expert hit (decode: memory bound), 6 * T * top_k * M * F FLOP (prefill).
Scratch: T * top_k * (M + F) elements, and T * (M + 3 * F) at most for a shared expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.launch import next_power_of_2
from triton_kernels.linear import gated_linear, linear
from triton_kernels.moe_gate import SILU, Gate, GateKind, gate_reference
from triton_kernels.moe_gemm import GemmConfig, down_triton, gate_up_triton, gemm_that_fits, sum_slots_triton
from triton_kernels.moe_pairs import PairsConfig, moe_pairs_triton
from triton_kernels.moe_route import route_triton, top_k_reference
from triton_kernels.tuning import tuned


class MoeConfig(NamedTuple):
    """A launch configuration of fused_moe: `pairs` for the pair kernels if given, else the two products."""

    gate_up: GemmConfig
    down: GemmConfig
    pairs: PairsConfig | None = None


_SMALL = MoeConfig(GemmConfig(16, 64, 128, 4, 4, 1), GemmConfig(16, 128, 128, 4, 3, 1))
_TABLE = (  # most pairs per expert for each configuration (measured on an H200: M 2048, F 768, E 128)
    (8, _SMALL),
    (16, MoeConfig(GemmConfig(32, 64, 128, 4, 3, 1), GemmConfig(32, 128, 64, 4, 4, 1))),
    (48, MoeConfig(GemmConfig(64, 64, 64, 4, 4, 4), GemmConfig(64, 128, 64, 4, 4, 4))),
    (1 << 62, MoeConfig(GemmConfig(128, 128, 64, 8, 4, 8), GemmConfig(128, 256, 64, 8, 4, 8))),
)
_FLOAT32 = MoeConfig(GemmConfig(32, 32, 32, 4, 2, 4), GemmConfig(32, 64, 32, 4, 2, 4))
_PAIRS = PairsConfig()
_PAIRS_OF_WIDE_EXPERTS = PairsConfig(1, 1024, 1, 1, 1024, 6)
"""For wide experts: fewer tiles, because the kernel unrolls them."""


def default_moe_config(
    num_tokens: int, num_experts: int, expert_width: int, top_k: int, element_size: int, gpu: Gpu
) -> MoeConfig:
    """The configuration if none is given or tuned."""
    config = _hopper_config(num_tokens, num_experts, expert_width, top_k, element_size)
    return config._replace(
        gate_up=gemm_that_fits(config.gate_up, gpu, element_size, gated=True),
        down=gemm_that_fits(config.down, gpu, element_size, gated=False),
    )


def _hopper_config(
    num_tokens: int, num_experts: int, expert_width: int, top_k: int, element_size: int
) -> MoeConfig:
    if num_tokens <= 4:
        pairs = _PAIRS if expert_width <= 2048 else _PAIRS_OF_WIDE_EXPERTS
        if element_size > 2:
            pairs = pairs._replace(up_block_n=1, down_ahead=pairs.down_ahead // 2)
        return _SMALL._replace(pairs=pairs)
    if element_size > 2:
        return _FLOAT32
    per_expert = num_tokens * top_k / num_experts
    return next(config for most, config in _TABLE if per_expert <= most)


Biases = tuple[Tensor, Tensor]


def fused_moe_reference(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalize: bool = True,
    biases: Biases | None = None,
    gate: Gate = SILU,
    *,
    shared: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """The same as fused_moe, in plain torch, one expert at a time; float64 if x is."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    num_experts = down.shape[0] - shared
    logits = router_logits.to(dtype)
    experts, weights = top_k_reference(logits[:, :num_experts], top_k, renormalize)
    if scales is not None:
        weights = weights * torch.cat([scales, scales.new_zeros(1)]).to(dtype)[experts.long()]
    if shared:
        nowhere = experts[:, :1] == num_experts
        everyone = torch.where(nowhere, num_experts + 1, num_experts)
        experts = torch.cat([experts.masked_fill(nowhere, num_experts + 1), everyone.int()], 1)
        weights = torch.cat([weights, logits[:, num_experts : num_experts + 1].sigmoid()], 1)
    slots = torch.zeros((*experts.shape, x.shape[1]), dtype=dtype, device=x.device)
    for expert in experts.unique().tolist():
        if expert == down.shape[0]:
            continue
        token, slot = (experts == expert).nonzero(as_tuple=True)
        both = x[token].to(dtype) @ gate_up[expert].to(dtype).T
        both = both if biases is None else both + biases[0][expert].to(dtype)
        gates, ups = both.chunk(2, dim=-1)
        y = gate_reference(gates, ups, gate) @ down[expert].to(dtype).T
        y = y if biases is None else y + biases[1][expert].to(dtype)
        slots[token, slot] = y * weights[token, slot, None]
    return slots.sum(1).to(x.dtype)


def fused_moe_triton(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalize: bool = True,
    config: MoeConfig | None = None,
    biases: Biases | None = None,
    gate: Gate = SILU,
    *,
    shared: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """Launch the kernels on any device."""
    num_tokens = x.shape[0]
    num_experts = down.shape[0] - shared
    if num_tokens == 0:
        return torch.empty_like(x)
    if config is None:
        config = _tuned_config(x, num_experts, top_k, expert_width=down.shape[2])
    if config.pairs is not None:
        arguments = (x, router_logits, gate_up, down, top_k, renormalize, config.pairs)
        return moe_pairs_triton(*arguments, biases, gate, shared=shared, scales=scales)
    gate_up_bias, down_bias = biases or (None, None)
    routing = route_triton(router_logits[:, :num_experts], top_k, renormalize, scales)
    hidden = gate_up_triton(x, gate_up[:num_experts], routing, config.gate_up, gate_up_bias, gate)
    partial = down_triton(hidden, down[:num_experts], routing, config.down, down_bias)
    of_shared = None
    if shared:
        of_shared = (linear(gated_linear(x, gate_up[-1]), down[-1]), router_logits)
    return sum_slots_triton(partial, routing, num_experts, of_shared)


def _tuned_config(x: Tensor, num_experts: int, top_k: int, expert_width: int) -> MoeConfig:
    """The measured configuration for this shape on this GPU, or the default."""
    num_tokens, width = x.shape
    default = default_moe_config(
        num_tokens, num_experts, expert_width, top_k, x.element_size(), gpu_of(x.device)
    )
    near = (num_experts, width, expert_width)
    gate_up, down, pairs = tuned(default, "fused_moe", x.device, x.dtype, (top_k,), near, num_tokens)
    config = MoeConfig(GemmConfig(*gate_up), GemmConfig(*down))
    return config._replace(pairs=pairs_that_suit(PairsConfig(*pairs), width)) if pairs else config


def pairs_that_suit(config: PairsConfig, width: int) -> PairsConfig:
    """The default first product's tiles, or others if those suit the model's width better.

    Masked loads cost more than narrower tiles: 33.4 instead of 26.0 us for Gemma 4 26B on an H200. Up to
    2,048 inputs, narrower tiles take fewer registers, so that all programs are there at once: a layer of
    Qwen3.5-35B-A3B takes 48.8 instead of 54.1 us. Tiles that differ from the default's were measured, and
    stay.
    """
    is_default = config[:3] == _PAIRS[:3]
    if not is_default or width % 256:
        return config
    if width % min(config.up_block_k, next_power_of_2(width)):
        return config._replace(up_block_n=2, up_block_k=256, up_ahead=3)
    return config._replace(up_block_k=256) if width <= 2048 else config


@torch.library.custom_op("triton_kernels::fused_moe", mutates_args=())
def _fused_moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalize: bool,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate_kind: int,
    alpha: float,
    limit: float,
    shared: bool,
    scales: Tensor | None,
) -> Tensor:
    biases = None if gate_up_bias is None or down_bias is None else (gate_up_bias, down_bias)
    launch = fused_moe_reference if x.device.type == "cpu" else fused_moe_triton
    gate = Gate(GateKind(gate_kind), alpha, limit)
    tensors = (x, router_logits, gate_up, down)
    return launch(*tensors, top_k, renormalize, biases=biases, gate=gate, shared=shared, scales=scales)


@_fused_moe.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def fused_moe(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalize: bool = True,
    biases: Biases | None = None,
    gate: Gate = SILU,
    *,
    shared: bool = False,
    scales: Tensor | None = None,
) -> Tensor:
    """The mixture's output, a contiguous [T, M] of x's dtype.

    x [T, M], router_logits [T, E] (any float dtype), gate_up [E, 2F, M] (gate first) and down [E, M, F], both
    contiguous. renormalize: the chosen experts' weights sum to 1 (Qwen3's norm_topk_prob, Mixtral). biases:
    of gate_up, [E, 2F], and of down, [E, M], contiguous. gate: the activation. shared: the weights have one
    expert more, which all tokens go to, and the logits at least one column more; without biases, with SiLU.
    scales: [E], factors of the experts' weights.
    """
    if shared and (biases is not None or gate != SILU):
        raise ValueError("a shared expert has no biases, and SiLU for its activation")
    tensors = (x, router_logits, gate_up, down)
    return _fused_moe(*tensors, top_k, renormalize, *(biases or (None, None)), *gate, shared, scales)
