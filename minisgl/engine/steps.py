"""The two things an engine runs on the device: a decode step and a prefill step.

Promise: both read the persistent rows, compute, sample, and write the new token and length back, so the
next step can be launched before the host has seen this one's tokens.

R rows of the batch, T new tokens.
"""

import torch
from torch import Tensor, nn

from minisgl.attention.interface import AttentionInputs
from minisgl.engine.inputs import PrefillBatch
from minisgl.engine.rows import Rows
from minisgl.engine.sampler import sample_rows
from minisgl.models.decoder import Decoder
from triton_kernels.advance_rows import advance_rows


class DecodeStep(nn.Module):
    """One more token for each row of a batch; traced by torch.compile as a whole."""

    def __init__(self, model: Decoder, rows: Rows, page_size: int) -> None:
        super().__init__()
        self.model = model
        self.rows = rows
        self.page_size = page_size

    def forward(self, row_ids: Tensor) -> Tensor:
        """int32 [R] -> the new tokens, int32 [R]. Padding is row id `max_rows`, as often as needed."""
        rows, page_size = self.rows, self.page_size
        index = row_ids.long()
        positions = rows.context_len[index]
        context_len = positions + 1
        pages = rows.page_table[index, (positions // page_size).long()]
        inputs = AttentionInputs(
            page_table=rows.page_table,
            row_ids=row_ids,
            context_len=context_len,
            slot_mapping=pages * page_size + positions % page_size,
            row_start=torch.arange(row_ids.shape[0] + 1, dtype=torch.int32, device=row_ids.device),
            max_query_len=1,
        )
        logits = self.model(rows.last_token[index], positions, inputs)
        token_ids = sample_rows(logits, rows, index, context_len)
        advance_rows(row_ids, token_ids, context_len, rows.last_token, rows.context_len, rows.max_rows)
        return token_ids


def prefill_step(model: Decoder, rows: Rows, batch: PrefillBatch) -> Tensor:
    """Feed chunks of prompts; the tokens of the rows that sample, int32, in batch order."""
    inputs = AttentionInputs(
        page_table=rows.page_table,
        row_ids=batch.row_ids,
        context_len=batch.context_len,
        slot_mapping=batch.slot_mapping,
        row_start=batch.row_start,
        max_query_len=batch.max_query_len,
    )
    logits = model(batch.token_ids, batch.positions, inputs, batch.logit_index)
    token_ids = sample_rows(logits, rows, batch.row_ids.long(), batch.context_len)
    advance_rows(
        batch.row_ids, token_ids, batch.context_len, rows.last_token, rows.context_len, rows.max_rows
    )
    return token_ids[batch.sampling]
