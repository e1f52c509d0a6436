"""Runs blocks by code that was compiled for this CPU; attention over many keys stays uncompiled."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch._C._aoti import AOTIModelPackageLoader

from minisgl.attention.interface import AttentionInputs, RowKeys
from minisgl.attention.torch import find_rows
from minisgl.layers.attention import Attention
from minisgl.layers.linear import FusedLinear, Linear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.weight import PlainWeight
from minisgl.models.decoder import Block, Decoder, RunBlock
from triton_kernels.on_cpu import store_cpu

PARTS = ("before", "attend", "after")
"""The names of `parts_of`, whose module an engine does not load."""
MOST_KEYS = 1024
"""Of all rows of a step, for compiled attention. It takes the rows one after the other on one thread; with
more keys torch's, on all threads, is faster."""


def part_file(folder: Path, name: str) -> Path:
    """Where a compiled part lies."""
    return folder / f"{name}.pt2"


def load_block(folder: Path, model: Decoder) -> RunBlock:
    """A `RunBlock` for decode steps without padding. Weights and pools must not be replaced afterwards.

    Args:
        folder: has the compiled parts for the model's `sizes_of_blocks`.

    Raises:
        RuntimeError: torch can't load the code.
    """
    before, attend, after = (_load(part_file(folder, name)) for name in PARTS)
    tensors = {layer: _tensors(layer) for layer in model.layers if isinstance(layer, Block)}

    def run(
        block: Block,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        ours_before, pools, ours_after = tensors[block]
        q, k, v, residual = before([x, residual, positions, cos_sin, *ours_before])
        assert block.self_attn is not None
        attention = block.self_attn.attention
        rows = _rows_to_compile(attention, inputs)
        # Compiled code reads its inputs as contiguous, without a check.
        if rows is None:
            slots = inputs.slot_mapping.long()
            store_cpu(attention.k_cache, slots, k)
            store_cpu(attention.v_cache, slots, v)
            heads = attention.attend_pool(q, inputs).reshape(len(q), -1).contiguous()
        elif len(rows) == 1:
            (heads,) = attend([q, k, v, *pools, rows[0].slots])
        else:
            parts = zip(q.split(1), k.split(1), v.split(1), rows, strict=True)
            heads = torch.cat([attend([*new, *pools, row.slots])[0] for *new, row in parts])
        x, residual = after([heads, residual, *ours_after])
        return x, residual

    return run


def _rows_to_compile(attention: Attention, inputs: AttentionInputs) -> tuple[RowKeys, ...] | None:
    """The rows of a step that compiled attention serves; None = it does not."""
    if attention.softcap or attention.sinks is not None or not attention.k_cache.is_contiguous():
        return None
    rows = inputs.rows if inputs.rows is not None else find_rows(inputs, attention.k_cache.shape[1])
    lengths = [row.length for row in rows]
    if len(rows) < len(inputs.row_ids) or sum(lengths) > MOST_KEYS:
        return None
    return None if 0 < attention.window < max(lengths) else rows


def _load(file: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    # As torch._inductor.aoti_load_package, whose imports take seconds. The last arguments: one caller at a
    # time, one copy, no device.
    return AOTIModelPackageLoader(str(file), "model", True, 1, -1).run


def _tensors(block: Block) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What the parts take of a block, in the order of their arguments; they have no absent ones."""
    attention, mlp = block.self_attn, block.mlp
    assert attention is not None
    assert isinstance(mlp, GatedMLP)
    q_norm, k_norm = attention.q_norm, attention.k_norm
    norms = [norm.weight for norm in (q_norm, k_norm) if norm is not None]
    before = [block.input_layernorm.weight, *_weight(attention.qkv_proj), *norms]
    norm = block.post_attention_layernorm.weight
    pools = [pool.flatten(0, 1) for pool in (attention.attention.k_cache, attention.attention.v_cache)]
    return (
        before,
        pools,
        [*_weight(attention.o_proj), norm, *_weight(mlp.gate_up_proj), *_weight(mlp.down_proj)],
    )


def _weight(layer: Linear | FusedLinear) -> list[Tensor]:
    assert isinstance(layer.weight, PlainWeight)
    values, bias = layer.weight.values, layer.weight.bias
    return [values] if bias is None else [values, bias]
