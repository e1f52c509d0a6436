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


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """What the compiled code of a block depends on, besides the machine."""

    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of attention
    eps: float
    has_qkv_bias: bool
    has_o_bias: bool
    has_head_norms: bool


def sizes_of_blocks(model: Decoder) -> BlockSizes | None:
    """The sizes that all blocks of a model have; None = they differ, or one can't be compiled for a CPU."""
    sizes = {sizes_of(layer) for layer in model.layers}
    return sizes.pop() if len(sizes) == 1 else None


def sizes_of(block: nn.Module) -> BlockSizes | None:
    """The sizes of a block with packed weights and ops of ours; None = it can't be compiled for a CPU."""
    if type(block) is not Block or block.self_attn is None or not isinstance(block.mlp, GatedMLP):
        return None
    attention, mlp = block.self_attn, block.mlp
    if block.residual_scale is not None or not _is_plain(attention):
        return None
    norms = [block.input_layernorm, block.post_attention_layernorm]
    norms += [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if not all(_is_ours(norm) for norm in norms) or len({norm.eps for norm in norms}) > 1:
        return None
    weights = [
        _packed(layer) for layer in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    ]
    if None in weights:
        return None
    qkv, out, _, down = (weight for weight in weights if weight is not None)
    return BlockSizes(
        width=down.values.shape[0],
        mlp_width=down.values.shape[1],
        num_heads=attention.attention.num_heads,
        num_kv_heads=attention.attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.attention.scale,
        eps=norms[0].eps,
        has_qkv_bias=qkv.bias is not None,
        has_o_bias=out.bias is not None,
        has_head_norms=attention.q_norm is not None,
    )


def _is_plain(attention: SelfAttention) -> bool:
    """Whether the projections do nothing to q and k but normalise and rotate each head."""
    return (
        not attention.has_gate
        and not attention.norms_all_heads
        and attention.order is None
        and attention.query_scaling is None
        and attention.attention.kernels is KERNELS
        and attention.attention.k_cache.dtype == torch.bfloat16
    )


def _is_ours(norm: RMSNorm) -> bool:
    return norm.kernels is KERNELS and norm.weight.dtype == torch.bfloat16


def _packed(layer: Linear | FusedLinear) -> PlainWeight | None:
    weight = layer.weight
    if isinstance(weight, PlainWeight) and weight.kernels is KERNELS and weight.values.is_mkldnn:
        return weight
    return None
