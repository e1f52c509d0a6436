"""The parts of a block that are compiled for a CPU: what lies between its matrix products.

Promise: each token is computed by itself, so its result is the same beside any number of others. What a part
returns or stores is rounded to the model's dtype, as by the uncompiled ops. Inside of a part the compiler may
leave a rounding out, that of attention's queries for example.

T tokens, M model width, F MLP width, H query heads, K KV heads, G = H / K, D head dim, N slots of a pool,
L keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minisgl.engine.cpu_blocks.sizes import BlockSizes


class Part(NamedTuple):
    """A part to compile, and an example of its inputs."""

    module: nn.Module
    inputs: tuple[Tensor | None, ...]
    lines: dict[int, str]
    """Inputs with any number of lines, by their place; of the same name, as many."""


class AddNorm(nn.Module):
    """A norm of the residual stream."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.eps = sizes.eps

    def forward(self, x: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum and the sum, [T, M]."""
        residual = x + residual
        return _normalised(residual.float(), norm, self.eps).to(x.dtype), residual


class Rotate(nn.Module):
    """Heads normalised and rotated, where attention itself is not compiled."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (H + 2K) * D] -> q [T, H, D], k and v [T, K, D]."""
        eps = self.sizes.eps
        q, k, v, *angles = _split(self.sizes, qkv, positions, cos_sin)
        return _rotate(q, q_norm, eps, *angles), _rotate(k, k_norm, eps, *angles), v.contiguous()


class Attend(nn.Module):
    """One row's heads normalised and rotated, its key and value stored, its attention over few keys."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(
        self,
        qkv: Tensor,
        position: Tensor,
        cos_sin: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        slots: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Tensor:
        """qkv [1, (H + 2K) * D], pools [N, K, D], slots int64 [L], the last is the new one -> [1, H * D]."""
        sizes = self.sizes
        # The compiled code depends on this order: with queries rotated first it takes a tenth longer.
        q, k, v, *angles = _split(sizes, qkv, position, cos_sin)
        k_pool.index_copy_(0, slots[-1:], _rotate(k, k_norm, sizes.eps, *angles))
        v_pool.index_copy_(0, slots[-1:], v)
        queries = _rotate(q, q_norm, sizes.eps, *angles).float() * sizes.scale
        queries = queries.view(sizes.num_kv_heads, -1, sizes.head_dim)
        # As sums of products, which the compiler fuses with the reading of the pool.
        keys = k_pool.index_select(0, slots).unsqueeze(2).float()  # [L, K, 1, D]
        weights = (queries * keys).sum(-1).softmax(0)  # [L, K, G]
        values = v_pool.index_select(0, slots).unsqueeze(2).float()
        return (weights.unsqueeze(-1) * values).sum(0).view(1, -1).to(qkv.dtype)


class SiluMul(nn.Module):
    """The activation of a gated MLP."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """[T, 2F] -> [T, F]."""
        gate, up = gate_up.float().chunk(2, -1)
        return (F.silu(gate) * up).to(gate_up.dtype)


def parts_of(sizes: BlockSizes) -> dict[str, Part]:
    """The parts by name."""

    def example(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, sizes.dtype))

    heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    row, pool = example(2, sizes.width), example(64, kv_heads, head_dim)
    cos_sin = torch.zeros(64, head_dim)
    one = (example(1, (heads + 2 * kv_heads) * head_dim), torch.zeros(1, dtype=torch.int32))
    head_norms = [example(head_dim) if sizes.has_head_norms else None for _ in range(2)]
    return {
        "add_norm": Part(AddNorm(sizes), (row, row.clone(), example(sizes.width)), {0: "rows", 1: "rows"}),
        "rotate": Part(
            Rotate(sizes),
            (
                example(2, (heads + 2 * kv_heads) * head_dim),
                torch.zeros(2, dtype=torch.int32),
                cos_sin,
                *head_norms,
            ),
            {0: "rows", 1: "rows", 2: "positions"},
        ),
        "attend": Part(
            Attend(sizes),
            (*one, cos_sin, pool, pool.clone(), torch.arange(8), *head_norms),
            {2: "positions", 3: "pool", 4: "pool", 5: "keys"},
        ),
        "silu_mul": Part(SiluMul(), (example(2, 2 * sizes.mlp_width),), {0: "rows"}),
    }


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _split(sizes: BlockSizes, qkv: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, ...]:
    """q [T, H, D], k and v [T, K, D], cosines and sines [T, 1, D / 2]."""
    heads = qkv.unflatten(1, (-1, sizes.head_dim))
    parts = heads.split((sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads), 1)
    return (*parts, *cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1))


def _rotate(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float() if norm is None else _normalised(x.float(), norm, eps)
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
