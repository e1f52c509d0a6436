"""The parts of a block that are compiled for a CPU: before its attention, attention of one row, and after it.

Promise: each token is computed by itself, so its result is the same beside any number of others. Values are
rounded to bfloat16 where the uncompiled ops round them; what differs is the last bits of float32 inside.

T tokens, M model width, F MLP width, H query heads, K KV heads, G = H / K, D head dim, N slots of a pool,
L keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minisgl.engine.cpu_blocks.sizes import BlockSizes

LIBRARY = torch.library.Library("minisgl_cpu", "DEF")
LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


@torch.library.register_fake("minisgl_cpu::packed_linear")
def _packed_linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The op `linear` of a packed weight. It has no implementation: only compiled code has it."""
    return torch.ops.minisgl_cpu.packed_linear(x, weight, bias)


class Part(NamedTuple):
    """A part to compile, and an example of its inputs with T = 2."""

    module: nn.Module
    inputs: tuple[Tensor | None, ...]
    lines: dict[int, str]
    """Inputs with any number of lines, by their place; of the same name, as many."""


class BeforeAttention(nn.Module):
    """Norm, q, k and v, norms of heads, rotation."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        norm: Tensor,
        qkv: Tensor,
        bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [T, H, D], k and v [T, K, D], residual [T, M]."""
        sizes, residual = self.sizes, x + residual
        heads = packed_linear(_norm(residual, norm, sizes.eps), qkv, bias).unflatten(1, (-1, sizes.head_dim))
        q, k, v = heads.split((sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads), 1)
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
        return (
            _rotate(q, q_norm, sizes.eps, cos, sin),
            _rotate(k, k_norm, sizes.eps, cos, sin),
            v.contiguous(),
            residual,
        )


class StoreAndAttend(nn.Module):
    """One row's new key and value stored, and its attention over few keys."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor
    ) -> Tensor:
        """q [1, H, D], k and v [1, K, D], pools [N, K, D], slots int64 [L], the last is new -> [1, H * D]."""
        k_pool.index_copy_(0, slots[-1:], k)
        v_pool.index_copy_(0, slots[-1:], v)
        queries = q.float().view(self.sizes.num_kv_heads, -1, self.sizes.head_dim)
        # As sums of products, which the compiler fuses with the reading of the pool.
        keys = k_pool.index_select(0, slots).unsqueeze(2).float()  # [L, K, 1, D]
        weights = ((queries * keys).sum(-1) * self.sizes.scale).softmax(0)  # [L, K, G]
        values = v_pool.index_select(0, slots).unsqueeze(2).float()
        return (weights.unsqueeze(-1) * values).sum(0).view(1, -1).to(q.dtype)


class AfterAttention(nn.Module):
    """Output projection, norm, MLP."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(
        self,
        heads: Tensor,
        residual: Tensor,
        out: Tensor,
        bias: Tensor | None,
        norm: Tensor,
        gate_up: Tensor,
        down: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """heads [T, H * D] -> x and residual [T, M]."""
        residual = packed_linear(heads, out, bias) + residual
        gate, up = packed_linear(_norm(residual, norm, self.sizes.eps), gate_up, None).float().chunk(2, -1)
        return packed_linear((F.silu(gate) * up).to(heads.dtype), down, None), residual


def parts_of(sizes: BlockSizes) -> dict[str, Part]:
    """The parts by name."""
    query_width, heads = sizes.num_heads * sizes.head_dim, sizes.num_heads + 2 * sizes.num_kv_heads

    def example(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def if_any(wanted: bool, size: int) -> Tensor | None:
        return example(size) if wanted else None

    norm, rows = example(sizes.width), [example(2, sizes.width) for _ in range(2)]
    before = (
        *rows,
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(64, sizes.head_dim),
        norm,
        example(heads * sizes.head_dim, sizes.width),
        if_any(sizes.has_qkv_bias, heads * sizes.head_dim),
        if_any(sizes.has_head_norms, sizes.head_dim),
        if_any(sizes.has_head_norms, sizes.head_dim),
    )
    pool = example(64, sizes.num_kv_heads, sizes.head_dim)
    attend = (
        example(1, sizes.num_heads, sizes.head_dim),
        *(example(1, sizes.num_kv_heads, sizes.head_dim) for _ in range(2)),
        pool,
        pool.clone(),
        torch.arange(8),
    )
    after = (
        example(2, query_width),
        rows[0],
        example(sizes.width, query_width),
        if_any(sizes.has_o_bias, sizes.width),
        norm,
        example(2 * sizes.mlp_width, sizes.width),
        example(sizes.width, sizes.mlp_width),
    )
    return {
        "before": Part(
            BeforeAttention(sizes), before, dict(enumerate(("rows", "rows", "rows", "positions")))
        ),
        "attend": Part(StoreAndAttend(sizes), attend, {3: "pool", 4: "pool", 5: "keys"}),
        "after": Part(AfterAttention(sizes), after, dict(enumerate(("rows", "rows")))),
    }


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normalised(x.float(), weight, eps).to(x.dtype)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float() if norm is None else _normalised(x.float(), norm, eps)
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
