"""Where the rows of a step live in the pool, for the layers of each group.

Promise: with one group of layers, a step does nothing here but name its tables.
"""

import torch
from torch import Tensor

from minisgl.attention.interface import AttentionInputs, JoinedDecodes, StateSaves, in_groups
from minisgl.attention.torch import with_rows_of_a_cpu
from minisgl.engine.step.inputs import PrefillBatch
from minisgl.engine.step.rows import Rows
from minisgl.models.decoder import Decoder
from triton_kernels.decode_config import DecodeShape, num_arrivals
from triton_kernels.e4m3 import FP8


def decode_inputs(
    rows: Rows, row_ids: Tensor, context_len: Tensor, slot_mapping: Tensor, arrivals: Tensor
) -> AttentionInputs:
    """Where decoding rows live in the pool; arguments as in `AttentionInputs`, the slots those of group 0."""
    slots = [slot_mapping, *(rows.slots(row_ids, group) for group in range(1, len(rows.page_tables)))]
    return in_groups(
        [_decode_inputs(rows, row_ids, context_len, own, arrivals, group) for group, own in enumerate(slots)]
    )


def prefill_inputs(model: Decoder, rows: Rows, batch: PrefillBatch) -> AttentionInputs:
    """Where the batch's rows live in the pool."""
    return in_groups([_prefill_inputs(model, rows, batch, group) for group in range(len(rows.page_tables))])


def _prefill_inputs(model: Decoder, rows: Rows, batch: PrefillBatch, group: int) -> AttentionInputs:
    num_decodes, slot_mapping = batch.num_decodes, batch.slots_of(group)
    decodes = None
    if num_decodes:
        lengths = batch.context_len[:num_decodes]
        num_counters = num_arrivals(num_decodes, most_kv_heads(model))
        arrivals = torch.zeros(num_counters, dtype=torch.int32, device=lengths.device)
        row_ids, slots = batch.row_ids[:num_decodes], slot_mapping[:num_decodes]
        decodes = JoinedDecodes(_decode_inputs(rows, row_ids, lengths, slots, arrivals, group), lengths > 0)
    inputs = AttentionInputs(
        page_table=rows.page_tables[group],
        row_ids=batch.row_ids[num_decodes:],
        context_len=batch.context_len[num_decodes:],
        slot_mapping=slot_mapping,
        row_start=batch.row_start,
        max_query_len=batch.max_query_len,
        decodes=decodes,
        num_keys=batch.num_keys,
        state_saves=StateSaves(batch.part_start, batch.state_slots),
    )
    return with_rows_of_a_cpu(inputs, rows.page_size)


def _decode_inputs(
    rows: Rows, row_ids: Tensor, context_len: Tensor, slot_mapping: Tensor, arrivals: Tensor, group: int
) -> AttentionInputs:
    inputs = AttentionInputs(
        page_table=rows.page_tables[group],
        row_ids=row_ids,
        context_len=context_len,
        slot_mapping=slot_mapping,
        row_start=rows.decode_row_start[: row_ids.shape[0] + 1],
        max_query_len=1,
        is_decode=True,
        arrivals=arrivals,
    )
    return with_rows_of_a_cpu(inputs, rows.page_size)


def decode_shapes(model: Decoder) -> set[DecodeShape]:
    """The shapes of all layers' decode attention on this rank, with the pools that they have now."""
    element_size = next(model.parameters()).element_size()
    return {
        DecodeShape(
            layer.head_dim,
            element_size,
            layer.num_heads // layer.num_kv_heads,
            layer.num_kv_heads,
            layer.k_cache.dtype == FP8,
        )
        for layer in model.attention_layers()
    }


def most_kv_heads(model: Decoder) -> int:
    """The largest number of KV heads of any layer on this rank."""
    return max(layer.num_kv_heads for layer in model.attention_layers())
