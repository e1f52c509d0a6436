"""Which blocks can be compiled for a CPU, and the sizes that their code depends on."""

from dataclasses import dataclass

import torch
from torch import nn

from minisgl.layers.linear import FusedLinear, Linear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.weight import PlainWeight
from minisgl.models.decoder import Block, Decoder
from minisgl.models.self_attention import SelfAttention
from triton_kernels.registry import KERNELS

DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """What the compiled code of a block depends on, besides the machine."""

    dtype: str  # of activations and pools, as torch names it: "bfloat16"
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of attention
    eps: float
    has_head_norms: bool


def sizes_of_blocks(model: Decoder) -> BlockSizes | None:
    """The sizes that all blocks of a model have; None = they differ, or one can't be compiled for a CPU."""
    sizes = {sizes_of(layer) for layer in model.layers}
    return sizes.pop() if len(sizes) == 1 else None


def sizes_of(block: nn.Module) -> BlockSizes | None:
    """The sizes of a block with unquantized weights and ops of ours; None = it can't be compiled."""
    if type(block) is not Block or block.self_attn is None or not isinstance(block.mlp, GatedMLP):
        return None
    attention, mlp = block.self_attn, block.mlp
    dtype = block.input_layernorm.weight.dtype
    if dtype not in DTYPES or block.residual_scale is not None or not _is_plain(attention, dtype):
        return None
    norms = [block.input_layernorm, block.post_attention_layernorm]
    norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if not all(_is_ours(norm, dtype) for norm in norms) or len({norm.eps for norm in norms}) > 1:
        return None
    products = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj)
    down = _unquantized(mlp.down_proj, dtype)
    if down is None or any(_unquantized(product, dtype) is None for product in products):
        return None
    return BlockSizes(
        dtype=str(dtype).removeprefix("torch."),
        width=down.values.shape[0],
        mlp_width=down.values.shape[1],
        num_heads=attention.attention.num_heads,
        num_kv_heads=attention.attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.attention.scale,
        eps=norms[0].eps,
        has_head_norms=attention.q_norm is not None,
    )


def _is_plain(attention: SelfAttention, dtype: torch.dtype) -> bool:
    """Whether the projections do nothing to q and k but normalise and rotate each head."""
    return (
        not attention.has_gate
        and not attention.norms_all_heads
        and attention.order is None
        and attention.query_scaling is None
        and attention.attention.kernels is KERNELS
        and attention.attention.k_cache.dtype == dtype
    )


def _is_ours(norm: RMSNorm, dtype: torch.dtype) -> bool:
    return norm.kernels is KERNELS and norm.weight.dtype == dtype


def _unquantized(layer: Linear | FusedLinear, dtype: torch.dtype) -> PlainWeight | None:
    weight = layer.weight
    if isinstance(weight, PlainWeight) and weight.kernels is KERNELS and weight.values.dtype == dtype:
        return weight
    return None
