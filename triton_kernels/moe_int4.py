"""A mixture of experts of 4-bit weights and 16-bit rows, as fused_moe.py has it for 16-bit weights.

    out[t] = sum over e of w[t, e] * (act(x[t] @ gate[e].T, x[t] @ up[e].T) @ down[e].T)

Weights are whole numbers in groups of 32, 64 or 128 inputs with a scale and perhaps a zero point
(quantize_int4.py), or MXFP4 (mxfp4.py), and stay so in memory. Both products may have biases. T tokens,
E experts, M model width, F expert width; routing as in moe_route.py. What the first product yields is rounded
to x's dtype. Rows of bfloat16: moe_int4_pairs.py has mixtures of up to four tokens, moe_int4_warp.py the
products of few rows an expert; moe_int4_gemm.py has all others.

Cost: 1.5 * M * F bytes for every expert hit, and as many numbers to make of them; 6 * T * top_k * M * F FLOP.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from triton_kernels.e2m1_packing import unpack_e2m1, unpack_scales
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES
from triton_kernels.launch import ceil_div
from triton_kernels.moe_gate import SILU, Gate, GateKind, gate_reference
from triton_kernels.moe_gemm import sum_slots_triton
from triton_kernels.moe_int4_gemm import (
    Int4GemmConfig,
    PackedExperts,
    int4_gemm_that_fits,
    multiply_experts_int4,
)
from triton_kernels.moe_int4_pairs import int4_pairs
from triton_kernels.moe_int4_warp import multiply_experts_warp, suits_warps
from triton_kernels.moe_route import route_triton, top_k_reference
from triton_kernels.mxfp4 import dequantize_mxfp4_codes
from triton_kernels.quantize_int4 import GROUPS, Int4Weight, dequantize_int4_reference
from triton_kernels.tuning import tuned

FEW_TOKENS = 4
"""Up to here warps multiply each pair separately."""
FEW_PAIRS = 8
"""Up to so many an expert, on average, warps multiply the sorted pairs."""


class MoeInt4Config(NamedTuple):
    """A launch configuration of fused_moe_int4."""

    gate_up: Int4GemmConfig
    down: Int4GemmConfig


_TABLE = (  # most pairs per expert for each configuration; the first two are the best of many on an H200
    (8, MoeInt4Config(Int4GemmConfig(16, 64, 4, 3, 1), Int4GemmConfig(16, 64, 4, 3, 1))),
    (64, MoeInt4Config(Int4GemmConfig(32, 64, 4, 4, 1), Int4GemmConfig(32, 64, 4, 4, 1))),
    (1 << 62, MoeInt4Config(Int4GemmConfig(64, 64, 8, 4, 8), Int4GemmConfig(64, 128, 8, 4, 8))),
)


def default_moe_int4_config(num_tokens: int, num_experts: int, top_k: int, gpu: Gpu) -> MoeInt4Config:
    """The configuration if none is given or tuned."""
    per_expert = num_tokens * top_k / num_experts
    config = next(config for most, config in _TABLE if per_expert <= most)
    return MoeInt4Config(
        int4_gemm_that_fits(config.gate_up, gpu, gated=True),
        int4_gemm_that_fits(config.down, gpu, gated=False),
    )


def dequantized_expert(weight: PackedExperts, expert: int, width: int, dtype: torch.dtype) -> Tensor:
    """One expert's matrix as numbers of `dtype`, [N, width], in plain torch."""
    packed, scales = weight.packed[expert], weight.scales[expert]
    if weight.is_mxfp4:
        numbers = dequantize_mxfp4_codes(unpack_e2m1(packed), unpack_scales(scales), dtype)
    else:
        zeros = None if weight.zeros is None else weight.zeros[expert]
        numbers = dequantize_int4_reference(Int4Weight(packed, scales, zeros), dtype)
    return numbers[:, :width]


def fused_moe_int4_reference(
    x: Tensor,
    router_logits: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    top_k: int,
    renormalize: bool = True,
    gate: Gate = SILU,
) -> Tensor:
    """The same as fused_moe_int4, in plain torch, one expert at a time; in float64 if x is, else float32."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    experts, pair_weights = top_k_reference(router_logits.to(wide), top_k, renormalize)
    num_experts, width = gate_up.packed.shape[0], x.shape[1]
    slots = torch.zeros((*experts.shape, width), dtype=wide, device=x.device)

    def product(rows: Tensor, weight: PackedExperts, expert: int) -> Tensor:
        y = rows.to(wide) @ dequantized_expert(weight, expert, rows.shape[1], wide).T
        return y if weight.bias is None else y + weight.bias[expert].to(wide)

    for expert in experts.unique().tolist():
        if expert == num_experts:
            continue
        token, slot = (experts == expert).nonzero(as_tuple=True)
        first, up = product(x[token], gate_up, expert).chunk(2, dim=1)
        hidden = gate_reference(first, up, gate).to(x.dtype)
        slots[token, slot] = product(hidden, down, expert) * pair_weights[token, slot, None]
    return slots.sum(1).to(x.dtype)


def fused_moe_int4_triton(
    x: Tensor,
    router_logits: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    top_k: int,
    renormalize: bool = True,
    gate: Gate = SILU,
    config: MoeInt4Config | None = None,
) -> Tensor:
    """Launch the kernels on any device."""
    num_tokens, num_experts = router_logits.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    by_warps = config is None and suits_warps(x, gate_up, down)
    if by_warps and num_tokens <= FEW_TOKENS:
        return int4_pairs(x, router_logits, gate_up, down, top_k, renormalize, gate)
    routing = route_triton(router_logits, top_k, renormalize)
    if by_warps and num_tokens * top_k <= FEW_PAIRS * num_experts:
        hidden = multiply_experts_warp(x, gate_up, routing, gated=True, gate=gate)
        partial = multiply_experts_warp(hidden, down, routing, gated=False)
        return sum_slots_triton(partial, routing, num_experts)
    if config is None:
        config = _tuned_config(x, gate_up, top_k)
    hidden = multiply_experts_int4(x, gate_up, routing, config.gate_up, gated=True, gate=gate)
    partial = multiply_experts_int4(hidden, down, routing, config.down, gated=False)
    return sum_slots_triton(partial, routing, num_experts)


def _tuned_config(x: Tensor, gate_up: PackedExperts, top_k: int) -> MoeInt4Config:
    """The measured configuration for this shape on this GPU, or the default."""
    num_tokens, width = x.shape
    num_experts, _, double_width, _ = gate_up.packed.shape
    default = default_moe_int4_config(num_tokens, num_experts, top_k, gpu_of(x.device))
    op = "fused_moe_mxfp4" if gate_up.is_mxfp4 else "fused_moe_int4"
    near = (num_experts, width, double_width // 2)
    first, second = tuned(default, op, x.device, x.dtype, (top_k,), near, num_tokens)
    return MoeInt4Config(Int4GemmConfig(*first), Int4GemmConfig(*second))


@torch.library.custom_op("triton_kernels::fused_moe_int4", mutates_args=())
def _fused_moe_int4(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_zero: Tensor | None,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_zero: Tensor | None,
    down_bias: Tensor | None,
    top_k: int,
    renormalize: bool,
    gate_kind: int,
    alpha: float,
    limit: float,
) -> Tensor:
    first = PackedExperts(gate_up, gate_up_scale, gate_up_zero, gate_up_bias)
    second = PackedExperts(down, down_scale, down_zero, down_bias)
    gate = Gate(GateKind(gate_kind), alpha, limit)
    function = fused_moe_int4_reference if x.device.type == "cpu" else fused_moe_int4_triton
    return function(x, router_logits, first, second, top_k, renormalize, gate)


@_fused_moe_int4.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def fused_moe_int4(
    x: Tensor,
    router_logits: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    top_k: int,
    renormalize: bool = True,
    gate: Gate = SILU,
) -> Tensor:
    """The mixture's output, a contiguous [T, M] of x's dtype.

    Args:
        x: [T, M], 16-bit or float32; rows may be strided.
        router_logits: [T, E], any float dtype; a row of -inf (padding) goes to no expert and yields zeros.
        gate_up: [2F, M] of each expert, the gate's outputs first.
        down: [M, F] of each expert.
        renormalize: the chosen experts' weights sum to 1.
        gate: the activation.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    _check(x, router_logits, gate_up, down)
    return _fused_moe_int4(x, router_logits, *gate_up, *down, top_k, renormalize, *gate)


def _check(x: Tensor, logits: Tensor, gate_up: PackedExperts, down: PackedExperts) -> None:
    width, half = x.shape[1], gate_up.packed.shape[2] // 2
    for weight, outputs, inputs in ((gate_up, 2 * half, width), (down, width, half)):
        wanted = (logits.shape[1], ceil_div(inputs, BLOCK), outputs, BLOCK_BYTES)
        groups = weight.scales.shape[1]
        fits = (
            tuple(weight.packed.shape) == wanted
            and weight.scales.shape == (wanted[0], groups, outputs)
            and groups > 0
            and wanted[1] * BLOCK % groups == 0
            and (groups == wanted[1] if weight.is_mxfp4 else weight.group in GROUPS)
            and (weight.zeros is None or (weight.zeros.shape == weight.scales.shape and not weight.is_mxfp4))
            and (weight.bias is None or weight.bias.shape == (wanted[0], outputs))
        )
        if not fits:
            raise ValueError(
                f"4-bit experts over rows of {width} and logits of {logits.shape[1]} need packed {wanted} "
                f"with scales [E, K / group, N], group one of {GROUPS} (of MXFP4 int32 [E, K / 128, N]), "
                f"zeros like them; got {tuple(weight.packed.shape)} and scales {tuple(weight.scales.shape)}"
            )
