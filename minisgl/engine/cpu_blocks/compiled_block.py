"""Runs blocks by code that was compiled for this CPU.

Uncompiled stay the matrix products, which are one call each, and attention over many keys.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._aoti import AOTIModelPackageLoader

from minisgl.attention.interface import AttentionInputs, RowKeys
from minisgl.attention.torch import find_rows
from minisgl.layers.attention import Attention
from minisgl.layers.mlp import GatedMLP
from minisgl.models.decoder import Block, Decoder, RunBlock
from triton_kernels.on_cpu import store_cpu

PARTS = ("add_norm", "rotate", "attend", "silu_mul")
"""The names of `parts_of`, whose module an engine does not load."""
MOST_KEYS = 1024
"""Of all rows of a step, for compiled attention. It takes the rows one after the other on one thread; with
more keys torch's, on all threads, is faster."""

Product = Callable[[Tensor], Tensor]


def part_file(folder: Path, name: str) -> Path:
    """Where a compiled part lies."""
    return folder / f"{name}.pt2"


class _Layer(NamedTuple):
    """What a block's steps read. Products may be packed at any time, so they are called, not compiled."""

    attention: Attention
    norm: Tensor
    qkv: Product
    head_norms: list[Tensor]
    pools: list[Tensor]  # [slots, K, D]
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    most_keys: int
    """Of one row, for compiled attention."""


def load_block(folder: Path, model: Decoder) -> RunBlock:
    """A `RunBlock` for decode steps without padding. Pools must not be replaced afterwards.

    Args:
        folder: has the compiled parts for the model's `sizes_of_blocks`.

    Raises:
        RuntimeError: torch can't load the code.
    """
    add_norm, rotate, attend, silu_mul = (_load(part_file(folder, name)) for name in PARTS)
    layers = {block: _read(block) for block in model.layers if isinstance(block, Block)}

    def attend_row(layer: _Layer, qkv: Tensor, position: Tensor, cos_sin: Tensor, row: RowKeys) -> Tensor:
        (heads,) = attend([qkv, position, cos_sin, *layer.pools, row.slots, *layer.head_norms])
        return heads

    def run(
        block: Block,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        layer = layers[block]
        normed, residual = add_norm([x, residual, layer.norm])
        qkv, rows = layer.qkv(normed), _rows_to_compile(layer, inputs)
        if rows is None:
            q, k, v = rotate([qkv, positions, cos_sin, *layer.head_norms])
            slots = inputs.slot_mapping.long()
            store_cpu(layer.attention.k_cache, slots, k)
            store_cpu(layer.attention.v_cache, slots, v)
            heads = layer.attention.attend_pool(q, inputs).reshape(len(q), -1)
        elif len(rows) == 1:
            heads = attend_row(layer, qkv, positions, cos_sin, rows[0])
        else:
            each = zip(qkv.split(1), positions.split(1), rows, strict=True)
            heads = torch.cat([attend_row(layer, x, position, cos_sin, row) for x, position, row in each])
        normed, residual = add_norm([layer.out(heads), residual, layer.mlp_norm])
        (gated,) = silu_mul([layer.gate_up(normed)])
        return layer.down(gated), residual

    return run


def _rows_to_compile(layer: _Layer, inputs: AttentionInputs) -> tuple[RowKeys, ...] | None:
    """The rows of a step that compiled attention serves; None = it does not."""
    if not layer.most_keys:
        return None
    rows = inputs.rows if inputs.rows is not None else find_rows(inputs, layer.attention.k_cache.shape[1])
    lengths = [row.length for row in rows]
    if len(rows) < len(inputs.row_ids) or sum(lengths) > MOST_KEYS or max(lengths) > layer.most_keys:
        return None
    return rows


def _load(file: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    # As torch._inductor.aoti_load_package, whose imports take seconds. The last arguments: one caller at a
    # time, one copy, no device.
    return AOTIModelPackageLoader(str(file), "model", True, 1, -1).run


def _read(block: Block) -> _Layer:
    projections, mlp = block.self_attn, block.mlp
    assert projections is not None
    assert isinstance(mlp, GatedMLP)
    attention = projections.attention
    norms = (projections.q_norm, projections.k_norm)
    return _Layer(
        attention,
        block.input_layernorm.weight,
        projections.qkv_proj.weight.multiply,
        [norm.weight for norm in norms if norm is not None],
        [pool.flatten(0, 1) for pool in (attention.k_cache, attention.v_cache)],
        projections.o_proj.weight.multiply,
        block.post_attention_layernorm.weight,
        mlp.gate_up_proj.weight.multiply,
        mlp.down_proj.weight.multiply,
        most_keys_compiled(attention),
    )


def most_keys_compiled(attention: Attention) -> int:
    """Up to how many keys of a row compiled attention serves; 0 = none."""
    if attention.softcap or attention.sinks is not None or not attention.k_cache.is_contiguous():
        return 0
    return attention.window or MOST_KEYS
