"""What some families do to q and k between their projection and the rotation; plain torch.

T tokens, H query heads, K KV heads, D head dim.
"""

from typing import Protocol

import torch
from torch import Tensor

from minisgl.model_config.config import ModelConfig, QueryScaling


class HeadsNorm(Protocol):
    """An `RMSNorm`, or one whose elements are split among the ranks."""

    @property
    def weight(self) -> Tensor:
        """One for each element here."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[T, elements] -> the same shape."""
        ...


def norm_all_heads(qkv: Tensor, q_norm: HeadsNorm, k_norm: HeadsNorm) -> Tensor:
    """[T, (H + 2K) * D] with all heads of q normalised together, and all of k."""
    q_size, k_size = q_norm.weight.shape[0], k_norm.weight.shape[0]
    q, k, v = qkv.split((q_size, k_size, k_size), dim=1)
    return torch.cat((q_norm(q), k_norm(k), v), dim=1)


def scale_queries(qkv: Tensor, positions: Tensor, q_size: int, scaling: QueryScaling) -> Tensor:
    """[T, (H + 2K) * D] with queries that grow with the logarithm of their position, int32 [T]."""
    # A padding token's position may be anything, and must not become NaN.
    lengths = torch.div(positions.clamp(min=0), scaling.length, rounding_mode="floor")
    factors = (1 + scaling.beta * torch.log1p(lengths.float())).to(qkv.dtype)
    q, kv = qkv.split((q_size, qkv.shape[1] - q_size), dim=1)
    return torch.cat((q * factors.unsqueeze(1), kv), dim=1)


def order_for_rotation(config: ModelConfig, device: torch.device) -> Tensor | None:
    """int64 [(H + 2K) * D]: the features of qkv in the order that the rotation expects; None = it is this.

    The rotation pairs element i of a head with i + D/2. Families that pair others, or rotate the first
    `rotary_dim` elements only, get theirs moved to these places, in q as in k, which leaves all scores as
    they are. Elements that are not rotated form the last pairs, whose angles are 0. A gate behind each head's
    query is left out.
    """
    size, num_kv_heads = config.head_dim, config.num_kv_heads
    head = head_order_for_rotation(config, device)
    if head is None and not config.attention_gate:
        return None
    if head is None:
        head = torch.arange(size, device=device)
    query_size = 2 * size if config.attention_gate else size
    queries = torch.arange(config.num_heads, device=device) * query_size
    keys = torch.arange(num_kv_heads, device=device) * size + config.num_heads * query_size
    heads = torch.cat((queries, keys)).unsqueeze(1) + head
    values = torch.arange(num_kv_heads * size, device=device) + config.num_heads * query_size
    return torch.cat((heads.flatten(), values + num_kv_heads * size))


def head_order_for_rotation(config: ModelConfig, device: torch.device) -> Tensor | None:
    """int64 [D]: the elements of a head of q or k in that order; None = it is this."""
    size, rotated = config.head_dim, config.rotary_dim or config.head_dim
    if rotated == size and not config.rope_interleaved:
        return None
    if config.rope_interleaved:
        first, second = torch.arange(0, rotated, 2, device=device), torch.arange(1, rotated, 2, device=device)
    else:
        first, second = torch.arange(rotated, device=device).chunk(2)
    left, right = torch.arange(rotated, size, device=device).chunk(2) if rotated < size else (first[:0],) * 2
    return torch.cat((first, left, second, right))


def rotate_queries(q: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """q [T, H, D] rotated as the op rope_store does it; cos_sin float32 [max_position, D].

    For layers that read another layer's keys and values. A padding token's position may be anything.
    """
    angles = cos_sin.index_select(0, positions.clamp(0, cos_sin.shape[0] - 1)).unsqueeze(1)
    cos, sin = angles.chunk(2, dim=-1)
    first, second = q.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(q.dtype)
