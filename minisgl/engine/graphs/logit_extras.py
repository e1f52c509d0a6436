"""Steps with extras: rules on logits (penalties, biases, bans) and log probabilities.

Promise: a row without rules gets the same token as in a plain step. All results of a step are in one tensor,
so that the step can be recorded like a plain one.

A result is int32 [R, 1] (the tokens), or with log probabilities int32 [R, 1 + 2 + 2 * k] (the token, then
`pack_logprobs`). R rows of the batch, T new tokens, N targets, k top tokens.
"""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.engine.graphs.buckets import bucket_for
from minisgl.engine.graphs.decode_graphs import PlanDecode, Record, no_plan
from minisgl.engine.inputs import PrefillBatch, row_ids_to_device
from minisgl.engine.logits import SLICE_ROWS, LogitTables, pack_logprobs
from minisgl.engine.rows import Rows
from minisgl.engine.steps import DecodeStep, prefill_inputs, sample_and_advance
from minisgl.models.decoder import Decoder
from minisgl.scheduler.plan import NONE_ALLOWED, LogitExtras
from triton_kernels.read_rows import RowState

logger = logging.getLogger(__name__)


def decode_with_extras(
    step: DecodeStep, row_ids: Tensor, extras: LogitExtras, tables: LogitTables | None
) -> Tensor:
    """Run a `DecodeStep` with extras; row_ids: int32 [R]."""
    state, logits = step.logits(row_ids)
    counted = row_ids < step.rows.max_rows
    return _sample(step.rows, row_ids, state, logits, state.context_len, extras, tables, counted)


def prefill_with_extras(
    model: Decoder,
    rows: Rows,
    batch: PrefillBatch,
    extras: LogitExtras,
    tables: LogitTables | None,
    sampling: Tensor,
    targets: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Run a `prefill_step` with extras and log probabilities of prompt tokens.

    Args:
        sampling: int32 [R], 1 for rows whose prompt ends in this batch.
        targets: int32 [N] twice: places in 0..T-1, and the token after each, whose log probability is wanted.

    Returns:
        The rows' result, and the targets' log probabilities, int32 [N, 2 + 2 * k].
    """
    num_rows = len(batch.row_ids)
    output_index = batch.logit_index if targets is None else torch.cat([batch.logit_index, targets[0]])
    inputs = prefill_inputs(model, rows, batch)
    x, residual = model.run_blocks(batch.token_ids, batch.positions, inputs, output_index)
    logits = model.head(x[:num_rows], residual[:num_rows])
    state = rows.read(batch.row_ids)
    counted = sampling > 0
    result = _sample(rows, batch.row_ids, state, logits, batch.context_len, extras, tables, counted)
    if targets is None:
        return result, None
    slices = [part[num_rows:].split(SLICE_ROWS) for part in (x, residual)]
    lines = [
        pack_logprobs(model.head(*some), ids)
        for *some, ids in zip(*slices, targets[1].split(SLICE_ROWS), strict=True)
    ]
    return result, torch.cat(lines)


def _sample(
    rows: Rows,
    row_ids: Tensor,
    state: RowState,
    logits: Tensor,
    context_len: Tensor,
    extras: LogitExtras,
    tables: LogitTables | None,
    counted: Tensor,
) -> Tensor:
    """Apply rules and sample; counted: bool [R], the rows whose token belongs to their output."""
    ruled = logits
    if extras.rules:
        assert tables is not None
        ruled = tables.apply_rules(logits, row_ids, context_len)
    token_ids = sample_and_advance(rows, row_ids, state, ruled, context_len)
    if extras.rules:
        assert tables is not None
        tables.add_tokens(row_ids, token_ids, counted)
        # If a logit is NaN, the model is at fault, not the rules: the maximum is NaN, which compares False.
        by_rules = (token_ids < 0) & (logits.amax(1) > float("-inf"))
        token_ids = token_ids.masked_fill(by_rules, NONE_ALLOWED)
    result = token_ids[:, None]
    return torch.cat([result, pack_logprobs(logits, token_ids)], 1) if extras.logprobs else result


class ExtrasDecodeGraphs:
    """Decode steps with extras. A bucket is recorded after its first batch has run.

    Args:
        step: the uncompiled step, which runs batches larger than all buckets.
        record: records a function without running it first; None = nothing is recorded.
        buckets: ascending batch sizes to record. Plain steps of these sizes must be recorded already.
        own_step: the step to record, with compiled blocks if there are any; None = `step`.
    """

    def __init__(
        self,
        step: DecodeStep,
        record: Record | None,
        buckets: tuple[int, ...],
        device: torch.device,
        own_step: DecodeStep | None = None,
        plan: PlanDecode = no_plan,
    ) -> None:
        self._step = step
        self._own_step = own_step or step
        self._record = record
        self._buckets = buckets
        self._device = device
        self._plan = plan
        self._recorded: dict[tuple[int, LogitExtras], tuple[Tensor, Callable[[], Tensor]]] = {}
        # The rows that each graph's row_ids hold.
        self._batches: dict[tuple[int, LogitExtras], tuple[int, ...]] = {}
        # Graphs to record, oldest request first.
        self._wanted: dict[tuple[int, LogitExtras], LogitTables | None] = {}
        self._newest: tuple[int, LogitExtras] | None = None  # the last graph that was recorded or failed
        self._ran_uncaptured = False  # since the last recording

    def __call__(self, rows: tuple[int, ...], extras: LogitExtras, tables: LogitTables | None) -> Tensor:
        """Decode these rows. The result has at least len(rows) lines, and the next call overwrites it."""
        bucket = bucket_for(len(rows), self._buckets)
        if bucket is None:
            self._plan(rows, len(rows))
            return decode_with_extras(self._step, row_ids_to_device(self._device, rows), extras, tables)
        if (bucket, extras) not in self._recorded and self._record is not None:
            self._wanted.setdefault((bucket, extras), tables)
        recorded = sorted(size for size, others in self._recorded if others == extras)
        larger = bucket_for(len(rows), tuple(recorded))
        size = larger or bucket
        padded = (*rows, *[self._padding_row] * (size - len(rows)))
        self._plan(rows, size)
        if larger is None:
            self._ran_uncaptured = True
            return decode_with_extras(self._own_step, row_ids_to_device(self._device, padded), extras, tables)
        row_ids, replay = self._recorded[larger, extras]
        if self._batches.get((larger, extras)) != rows:
            staged = torch.tensor(padded, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            row_ids.copy_(staged, non_blocking=True)
            self._batches[larger, extras] = rows
        return replay()

    @property
    def num_missing(self) -> int:
        """Number of graphs that steps needed and that are not recorded yet."""
        return len(self._wanted)

    @property
    def is_urgent(self) -> bool:
        """Whether steps run uncaptured because a graph is missing."""
        return self._ran_uncaptured and bool(self._wanted)

    @property
    def _padding_row(self) -> int:
        return self._step.rows.max_rows

    def prepare_next(self) -> None:
        """Run the part of the step after the logits, on padding rows and logits of zero.

        The part before has already run for the plain graph. It has all collectives, so a failure here leaves
        no rank waiting.
        """
        self._newest = None
        (bucket, extras), tables = next(iter(self._wanted.items()))
        model, rows = self._step.model, self._step.rows
        row_ids = row_ids_to_device(self._device, (self._padding_row,) * bucket)
        logits = torch.zeros(bucket, model.vocab_size, dtype=model.logits_dtype, device=self._device)
        state = rows.read(row_ids)
        _sample(rows, row_ids, state, logits, state.context_len, extras, tables, row_ids < self._padding_row)

    def record_next(self) -> None:
        """Record the graph that was needed first, on padding rows."""
        assert self._record is not None
        started = time.perf_counter()
        (bucket, extras), tables = next(iter(self._wanted.items()))
        self._newest = bucket, extras
        row_ids = row_ids_to_device(self._device, (self._padding_row,) * bucket)
        self._plan((), bucket)
        replay = self._record(lambda: decode_with_extras(self._own_step, row_ids, extras, tables))
        self._recorded[bucket, extras] = (row_ids, replay)
        del self._wanted[bucket, extras]
        self._ran_uncaptured = False
        duration_ms = (time.perf_counter() - started) * 1e3
        logger.info("decode graph of %d rows with %s: %.0f ms", bucket, _describe(extras), duration_ms)

    def stop_recording(self) -> None:
        """Drop the last recorded graph, which another rank may have failed to record, and record no more.

        Batches without a graph run uncaptured from now on.
        """
        self._record = None
        self._wanted.clear()
        if self._newest is not None:
            self._recorded.pop(self._newest, None)


def _describe(extras: LogitExtras) -> str:
    words = [("rules", extras.rules), ("log probabilities", extras.logprobs)]
    return " and ".join(word for word, there in words if there)
