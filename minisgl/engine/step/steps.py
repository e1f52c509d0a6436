"""The two kinds of steps that an engine runs on the device, decode and prefill, and how both end: sampling.

Promise: both read the row tables, compute, sample, and write the new tokens and lengths back. So the host can
launch the next step before it has seen this step's tokens. A step with extras (rules, log probabilities,
masks) is a plain step whose rows are sampled once more, by `sample_extras`.

R rows of the batch, T new tokens, N targets, V vocabulary, k top tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from minisgl.attention.interface import AttentionInputs
from minisgl.engine.step.inputs import PrefillBatch
from minisgl.engine.step.logits import SLICE_ROWS, pack_logprobs
from minisgl.engine.step.rows import Rows
from minisgl.engine.step.step_inputs import decode_inputs, most_kv_heads, prefill_inputs
from minisgl.models.decoder import Decoder, RunBlock, call_block
from triton_kernels.advance_rows import advance_rows
from triton_kernels.decode_config import num_arrivals
from triton_kernels.read_rows import RowState


class RowLogits(NamedTuple):
    """What the next tokens of a batch's rows are sampled from."""

    row_ids: Tensor  # int32 [R]
    context_len: Tensor  # int32 [R], the number of tokens of each row so far
    logits: Tensor  # [R, V]

    def clone(self) -> "RowLogits":
        """Copies, which later steps leave as they are."""
        return RowLogits(*(tensor.clone() for tensor in self))


class StepOutput(NamedTuple):
    """Tensors of a step on the device. Of a recorded step, the next replay of any graph overwrites them."""

    token_ids: Tensor  # int32 [R], sampled without extras
    logits: RowLogits | None  # None = the recording has none


class DecodeStep(nn.Module):
    """Computes one more token for each row of a batch.

    Args:
        run_block: runs one block of the model; see `call_block`.
    """

    arrivals: Tensor  # `AttentionInputs.arrivals`, one per row and KV head or more

    def __init__(self, model: Decoder, rows: Rows, run_block: RunBlock = call_block) -> None:
        super().__init__()
        self.model = model
        self.rows = rows
        self.run_block = run_block
        device = rows.page_table.device
        size = num_arrivals(rows.max_rows + 1, most_kv_heads(model))
        arrivals = torch.zeros(size, dtype=torch.int32, device=device)
        self.register_buffer("arrivals", arrivals, persistent=False)

    def forward(self, row_ids: Tensor) -> Tensor:
        """Row ids, int32 [R] -> new tokens, int32 [R]. The row id of padding is `max_rows`."""
        return self.run(row_ids).token_ids

    def run(self, row_ids: Tensor) -> StepOutput:
        """As `forward`, with what the tokens are sampled from."""
        state, found = self._logits(row_ids)
        return StepOutput(sample_plain(self.rows, state, found), found)

    def logits(self, row_ids: Tensor) -> RowLogits:
        """The step without its sampling."""
        return self._logits(row_ids)[1]

    def _logits(self, row_ids: Tensor) -> tuple[RowState, RowLogits]:
        state = self.rows.read(row_ids)
        inputs = self.inputs(row_ids, state)
        logits = self.model(state.token_ids, state.positions, inputs, run_block=self.run_block)
        return state, RowLogits(row_ids, state.context_len, logits)

    def inputs(self, row_ids: Tensor, state: RowState) -> AttentionInputs:
        """Where the batch's rows live in the pool."""
        return decode_inputs(self.rows, row_ids, state.context_len, state.slot_mapping, self.arrivals)


def prefill_step(
    model: Decoder, rows: Rows, batch: PrefillBatch, run_block: RunBlock = call_block
) -> StepOutput:
    """Run chunks of prompts and the decodes that join them.

    Ignore the token of a chunk that does not end its prompt.
    """
    found, _ = prefill_logits(model, rows, batch, run_block=run_block)
    return StepOutput(sample_plain(rows, rows.read(batch.row_ids), found), found)


def prefill_logits(
    model: Decoder,
    rows: Rows,
    batch: PrefillBatch,
    targets: tuple[Tensor, Tensor] | None = None,
    run_block: RunBlock = call_block,
) -> tuple[RowLogits, Tensor | None]:
    """Run a `prefill_step` without its sampling, with log probabilities of prompt tokens.

    Args:
        targets: int32 [N] twice: places in 0..T-1, and the token after each, whose log probability is wanted.

    Returns:
        What the rows' tokens are sampled from, and the targets' log probabilities, int32 [N, 2 + 2 * k].
    """
    inputs = prefill_inputs(model, rows, batch)
    if inputs.decodes is not None:
        decodes, is_real = inputs.decodes
        first = batch.token_ids[: batch.num_decodes]
        torch.where(is_real, rows.last_token.index_select(0, decodes.row_ids), first, out=first)
    num_rows = len(batch.row_ids)
    output_index = batch.logit_index if targets is None else torch.cat([batch.logit_index, targets[0]])
    x, residual = model.run_blocks(batch.token_ids, batch.positions, inputs, output_index, run_block)
    logits = model.head(x[:num_rows], residual[:num_rows])
    found = RowLogits(batch.row_ids, batch.context_len, logits)
    if targets is None:
        return found, None
    slices = [part[num_rows:].split(SLICE_ROWS) for part in (x, residual)]
    lines = [
        pack_logprobs(model.head(*some), ids)
        for *some, ids in zip(*slices, targets[1].split(SLICE_ROWS), strict=True)
    ]
    return found, torch.cat(lines)


def sample_plain(rows: Rows, state: RowState, found: RowLogits) -> Tensor:
    """`sample_and_advance` from the logits of a step."""
    return sample_and_advance(rows, found.row_ids, state, found.logits, found.context_len)


def sample_and_advance(
    rows: Rows, row_ids: Tensor, state: RowState, logits: Tensor, context_len: Tensor
) -> Tensor:
    """Sample a token for each row, int32 [R], and store it as the row's last token.

    A row without any finite logit gets NO_LOGITS (`sample_reference.NO_TOKEN`), and its last token becomes 0.

    Args:
        context_len: int32 [R], the number of tokens of each row so far.
    """
    token_ids = rows.sample(
        logits, state.temperature, state.top_k, state.top_p, state.min_p, state.seed, context_len
    )
    advance_rows(row_ids, token_ids, context_len, rows.last_token, rows.context_len, rows.max_rows)
    return token_ids
