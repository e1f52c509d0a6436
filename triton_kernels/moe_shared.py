"""A mixture of experts with a shared expert that has a gate of its own (Qwen3.5, Qwen3-Next), for few tokens.

    out[t] = mixture(x[t], logits[t, :E]) + sigmoid(logits[t, E]) * down @ (silu(gate @ x[t]) * (up @ x[t]))

T tokens, E experts, M model width, F width of each expert and of the shared one; gate and up are the upper
and lower F rows of the shared expert's gate_up. The mixture is fused_moe.py's. A token that goes to no
expert (padding) yields zeros. Float32 inside; hidden values are rounded once, and for more than four tokens
each output of an expert.

For one to four tokens the shared expert is one more slot of moe_pairs.py's two launches. For more, two
products follow those of the mixture, and the sum over its slots adds the result.

Cost: as the mixture's, and 3 * M * F elements.
"""

import torch
from torch import Tensor

from triton_kernels.fused_moe import SharedExpert, fused_moe_reference, fused_moe_triton
from triton_kernels.linear import MAX_ROWS
from triton_kernels.moe_gate import SILU, gate_reference


def suits_shared_slot(x: Tensor) -> bool:
    """Whether the kernels are faster than the ops one after the other: on a GPU, for few rows."""
    return x.device.type == "cuda" and 1 <= x.shape[0] <= MAX_ROWS


def moe_shared_reference(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: SharedExpert,
    top_k: int,
    renormalize: bool = True,
) -> Tensor:
    """The same as moe_shared, in plain torch; float64 if x is."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide = x.to(dtype)
    routed = fused_moe_reference(wide, logits[:, :-1], gate_up.to(dtype), down.to(dtype), top_k, renormalize)
    gates, ups = (wide @ shared.gate_up.to(dtype).T).chunk(2, dim=-1)
    y = gate_reference(gates, ups, SILU) @ shared.down.to(dtype).T
    somewhere = (logits[:, :-1] > float("-inf")).any(1, keepdim=True)
    return (routed + torch.where(somewhere, logits[:, -1:].to(dtype).sigmoid() * y, 0.0)).to(x.dtype)


def moe_shared_triton(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: SharedExpert,
    top_k: int,
    renormalize: bool = True,
) -> Tensor:
    """Launch the kernels on any device."""
    return fused_moe_triton(x, logits, gate_up, down, top_k, renormalize, shared=shared)


@torch.library.custom_op("triton_kernels::moe_shared", mutates_args=())
def _moe_shared(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,
    shared_down: Tensor,
    top_k: int,
    renormalize: bool,
) -> Tensor:
    launch = moe_shared_reference if x.device.type == "cpu" else moe_shared_triton
    return launch(x, logits, gate_up, down, SharedExpert(shared_gate_up, shared_down), top_k, renormalize)


@_moe_shared.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def moe_shared(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: SharedExpert,
    top_k: int,
    renormalize: bool = True,
) -> Tensor:
    """The mixture with its shared expert, a contiguous [T, M] of x's dtype.

    x [T, M], logits [T, E + 1] (any float dtype; the last is the shared expert's gate's), gate_up [E, 2F, M]
    and down [E, M, F] as fused_moe's; all contiguous but x and the logits, whose rows may be strided.
    """
    return _moe_shared(x, logits, gate_up, down, *shared, top_k, renormalize)
