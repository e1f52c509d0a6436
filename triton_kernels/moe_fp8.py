"""A mixture of SwiGLU experts of FP8 numbers (e4m3), as fused_moe.py has it for 16-bit ones.

    xq[t]     = x[t] rounded to FP8 with a scale for the row, for each 128 columns, or a given one for all
    h[p]      = silu(xq[t] @ gate[e].T) * (xq[t] @ up[e].T),   p = (token t, expert e), rounded to x's dtype
    out[t]    = sum over e of w[t, e] * (hq[p] @ down[e].T),   hq[p] = h[p] rounded to FP8 likewise

T tokens, P pairs, E experts, M model width, F expert width; routing as in moe_route.py. Weights have scales
of output features, or of blocks of 128 x 128; a given scale of h is one for each expert. Sums in float32:
what the tensor cores sum, with 14 bits, are the products of BLOCK_K inputs.

moe_fp8_gemm.py has the products, moe_fp8_pairs.py those of one or two tokens. GPUs before 8.9, which have no
FP8, multiply the same numbers in float16.

Cost: 3 * M * F bytes for every expert hit (decode: memory bound), 6 * T * top_k * M * F FLOP (prefill).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from triton_kernels.e4m3 import FP8, LARGEST
from triton_kernels.fp8_linear import dequantized_weight
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.launch import ceil_div
from triton_kernels.moe_fp8_gemm import Fp8GemmConfig, Fp8Rows, fp8_gemm_that_fits, multiply_experts_fp8
from triton_kernels.moe_fp8_pairs import MOST_TOKENS, moe_fp8_pairs_triton
from triton_kernels.moe_gemm import sum_slots_triton
from triton_kernels.moe_route import route_triton, top_k_reference
from triton_kernels.quantize_fp8 import (
    GROUP,
    dequantize_fp8,
    quantize_fp8_reference,
    quantize_fp8_triton,
)
from triton_kernels.tuning import tuned


class Fp8ExpertWeights(NamedTuple):
    """All experts' matrices; contiguous. Mp and Fp are M and F, or more, filled up with zeros.

    M may be any multiple of 16; with scales of blocks, Mp and Fp are multiples of 128.
    """

    gate_up: Tensor  # e4m3 [E, 2F, Mp], the gate in the upper F rows
    gate_up_scale: Tensor  # float32 [E, 2F], or of blocks [E, 2, ceil(F / 128), Mp / 128]
    down: Tensor  # e4m3 [E, M, Fp]
    down_scale: Tensor  # float32 [E, M], or of blocks [E, ceil(M / 128), Fp / 128]
    input_scale: Tensor | None = None  # float32 [1]: that of all rows of x; None = computed
    hidden_scale: Tensor | None = None  # float32 [E]: that of the rows of h; given if input_scale is

    @property
    def has_blocks(self) -> bool:
        """Scales are for blocks, and those of rows for 128 columns."""
        return self.gate_up_scale.dim() == 4


class MoeFp8Config(NamedTuple):
    """A launch configuration of fused_moe_fp8."""

    gate_up: Fp8GemmConfig
    down: Fp8GemmConfig


_TABLE = (  # most pairs per expert for each configuration; not measured yet
    (8, MoeFp8Config(Fp8GemmConfig(16, 64, 128, 4, 5, 1), Fp8GemmConfig(16, 64, 128, 4, 6, 1))),
    (16, MoeFp8Config(Fp8GemmConfig(32, 64, 128, 4, 5, 1), Fp8GemmConfig(32, 64, 128, 4, 6, 1))),
    (48, MoeFp8Config(Fp8GemmConfig(64, 64, 128, 4, 4, 4), Fp8GemmConfig(64, 128, 128, 4, 4, 4))),
    (
        1 << 62,
        MoeFp8Config(
            Fp8GemmConfig(128, 64, 128, 8, 4, 8, rows_tall=True),
            Fp8GemmConfig(128, 128, 128, 8, 4, 8, rows_tall=True),
        ),
    ),
)


def default_moe_fp8_config(num_tokens: int, num_experts: int, top_k: int, gpu: Gpu) -> MoeFp8Config:
    """The configuration if none is given or tuned."""
    per_expert = num_tokens * top_k / num_experts
    config = next(config for most, config in _TABLE if per_expert <= most)
    return MoeFp8Config(
        fp8_gemm_that_fits(config.gate_up, gpu, gated=True), fp8_gemm_that_fits(config.down, gpu, gated=False)
    )


def fused_moe_fp8_reference(
    x: Tensor,
    router_logits: Tensor,
    weights: Fp8ExpertWeights,
    top_k: int,
    renormalize: bool = True,
) -> Tensor:
    """The same as fused_moe_fp8, in plain torch, one expert at a time; sums in float64 if x is."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    experts, pair_weights = top_k_reference(router_logits.to(wide), top_k, renormalize)
    num_experts, width = weights.down.shape[:2]
    half = weights.gate_up.shape[1] // 2
    rows = _rounded_rows(x, weights.gate_up.shape[2], weights, weights.input_scale).to(wide)
    slots = torch.zeros((*experts.shape, width), dtype=wide, device=x.device)
    for expert in experts.unique().tolist():
        if expert == num_experts:
            continue
        token, slot = (experts == expert).nonzero(as_tuple=True)
        parts = zip(weights.gate_up[expert].split(half), weights.gate_up_scale[expert].chunk(2), strict=True)
        gate, up = (rows[token] @ dequantized_weight(part, scale.squeeze(0), wide).T for part, scale in parts)
        hidden = (F.silu(gate) * up).to(x.dtype)
        given = None if weights.hidden_scale is None else weights.hidden_scale[expert]
        hidden = _rounded_rows(hidden, weights.down.shape[2], weights, given).to(wide)
        y = hidden @ dequantized_weight(weights.down[expert], weights.down_scale[expert], wide).T
        slots[token, slot] = y * pair_weights[token, slot, None]
    return slots.sum(1).to(x.dtype)


def _rounded_rows(x: Tensor, width: int, weights: Fp8ExpertWeights, given: Tensor | None) -> Tensor:
    """Rows [N, K] rounded to FP8 and back, [N, width], with zeros behind the K columns."""
    x = F.pad(x, (0, width - x.shape[1]))
    if given is not None:
        return (x.float() / given).clamp(-LARGEST, LARGEST).to(FP8).double() * given.double()
    return dequantize_fp8(*quantize_fp8_reference(x, GROUP if weights.has_blocks else None), torch.float64)


def fused_moe_fp8_triton(
    x: Tensor,
    router_logits: Tensor,
    weights: Fp8ExpertWeights,
    top_k: int,
    renormalize: bool = True,
    config: MoeFp8Config | None = None,
) -> Tensor:
    """Launch the kernels on any device; with a `config`, those of moe_fp8_gemm.py for few tokens, too."""
    num_tokens, width = x.shape
    num_experts, _, padded_width = weights.down.shape
    if num_tokens == 0:
        return torch.empty_like(x)
    rows = _quantized(x, weights.gate_up.shape[2], weights, weights.input_scale)
    if config is None:
        if num_tokens <= MOST_TOKENS and gpu_of(x.device).has_fp8:
            return moe_fp8_pairs_triton(
                rows, router_logits, *weights[:4], weights.hidden_scale, top_k, renormalize, x.dtype
            )
        config = _tuned_config(x, weights, top_k)
    routing = route_triton(router_logits, top_k, renormalize)
    hidden_dtype = x.dtype if weights.hidden_scale is None else FP8
    hidden = torch.empty((num_tokens * top_k, padded_width), dtype=hidden_dtype, device=x.device)
    multiply_experts_fp8(
        rows,
        weights.gate_up,
        weights.gate_up_scale,
        routing,
        hidden,
        config.gate_up,
        gated=True,
        rounded_as=x.dtype,
        given_scale=weights.hidden_scale,
    )
    if weights.hidden_scale is None:
        hidden_rows = _quantized(hidden, padded_width, weights, None)
    else:
        hidden_rows = Fp8Rows(hidden, weights.hidden_scale)
    partial = torch.empty((num_tokens * top_k, width), dtype=x.dtype, device=x.device)
    multiply_experts_fp8(
        hidden_rows,
        weights.down,
        weights.down_scale,
        routing,
        partial,
        config.down,
        gated=False,
        rounded_as=x.dtype,
    )
    return sum_slots_triton(partial, routing, num_experts)


def _quantized(x: Tensor, width: int, weights: Fp8ExpertWeights, given: Tensor | None) -> Fp8Rows:
    """Rows [N, K] as FP8 rows [N, width]."""
    if width > x.shape[1]:
        x = F.pad(x, (0, width - x.shape[1]))
    if given is not None:
        return Fp8Rows((x.float() / given).clamp(-LARGEST, LARGEST).to(FP8), given)
    group = GROUP if weights.has_blocks else None
    quantize = quantize_fp8_triton if gpu_of(x.device).has_fp8 else quantize_fp8_reference
    return Fp8Rows(*quantize(x, group))


def _tuned_config(x: Tensor, weights: Fp8ExpertWeights, top_k: int) -> MoeFp8Config:
    """The measured configuration for this shape on this GPU, or the default."""
    num_tokens, width = x.shape
    num_experts, double_width, _ = weights.gate_up.shape
    default = default_moe_fp8_config(num_tokens, num_experts, top_k, gpu_of(x.device))
    near = (num_experts, width, double_width // 2)
    op = "fused_moe_fp8_blocks" if weights.has_blocks else "fused_moe_fp8"
    gate_up, down = tuned(default, op, x.device, x.dtype, (top_k,), near, num_tokens)
    return MoeFp8Config(Fp8GemmConfig(*gate_up), Fp8GemmConfig(*down))


@torch.library.custom_op("triton_kernels::fused_moe_fp8", mutates_args=())
def _fused_moe_fp8(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    input_scale: Tensor | None,
    hidden_scale: Tensor | None,
    top_k: int,
    renormalize: bool,
) -> Tensor:
    weights = Fp8ExpertWeights(gate_up, gate_up_scale, down, down_scale, input_scale, hidden_scale)
    function = fused_moe_fp8_reference if x.device.type == "cpu" else fused_moe_fp8_triton
    return function(x, router_logits, weights, top_k, renormalize)


@_fused_moe_fp8.register_fake
def _(
    x: Tensor,
    router_logits: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    input_scale: Tensor | None,
    hidden_scale: Tensor | None,
    top_k: int,
    renormalize: bool,
) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def fused_moe_fp8(
    x: Tensor, router_logits: Tensor, weights: Fp8ExpertWeights, top_k: int, renormalize: bool = True
) -> Tensor:
    """The mixture's output, a contiguous [T, M] of x's dtype.

    Args:
        x: [T, M], 16-bit or float32.
        router_logits: [T, E], any float dtype; a row of -inf (padding) goes to no expert and yields zeros.
        renormalize: the chosen experts' weights sum to 1.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    _check(x, router_logits, weights)
    return _fused_moe_fp8(x, router_logits, *weights, top_k, renormalize)


def _check(x: Tensor, router_logits: Tensor, weights: Fp8ExpertWeights) -> None:
    experts, double_width, padded_width = weights.gate_up.shape
    width, padded_half = weights.down.shape[1:]
    half = double_width // 2
    wanted: tuple[tuple[int, ...], ...] = ((experts, double_width), (experts, width))
    if weights.has_blocks:
        wanted = (
            (experts, 2, ceil_div(half, GROUP), padded_width // GROUP),
            (experts, ceil_div(width, GROUP), padded_half // GROUP),
        )
    got = (tuple(weights.gate_up_scale.shape), tuple(weights.down_scale.shape))
    uneven = weights.has_blocks and (padded_width % GROUP or padded_half % GROUP)
    rows_fit = x.shape[1] == width <= padded_width and half <= padded_half
    given = (weights.input_scale is None) == (weights.hidden_scale is None)
    if got != wanted or uneven or not rows_fit or not given or router_logits.shape[1] != experts:
        raise ValueError(
            f"experts gate_up {tuple(weights.gate_up.shape)} and down {tuple(weights.down.shape)} need "
            f"scales {wanted}, both scales of activations or none, rows of {width} and logits of {experts}; "
            f"got {got}, rows of {x.shape[1]}, logits of {router_logits.shape[1]}"
        )
