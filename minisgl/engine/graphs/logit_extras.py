"""Steps with extras: rules on logits (penalties, biases, bans), log probabilities, and masks.

Promise: a row without rules and mask gets the same token as in a plain step. All results of a step are in one
tensor, so that the step can be recorded like a plain one: those of `steps.sample_with_extras`. A step with
masks is recorded up to its logits, since its masks are not known yet when it is launched.

R rows of the batch, T new tokens, N targets, k top tokens.
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
from minisgl.engine.steps import DecodeStep, prefill_inputs, sample_with_extras
from minisgl.models.decoder import Decoder
from minisgl.scheduler.plan import LogitExtras

logger = logging.getLogger(__name__)

ONLY_LOGITS = LogitExtras(masks=True)
"""The key of all steps with masks: rules and log probabilities come after their logits."""


def decode_with_extras(
    step: DecodeStep, row_ids: Tensor, extras: LogitExtras, tables: LogitTables | None
) -> Tensor:
    """Run a `DecodeStep` with extras; row_ids: int32 [R]. With masks, only its logits [R, V] are computed."""
    state, logits = step.logits(row_ids)
    if extras.masks:
        return logits
    counted = row_ids < step.rows.max_rows
    return sample_with_extras(step.rows, row_ids, state, logits, state.context_len, counted, extras, tables)


def prefill_logits(
    model: Decoder, rows: Rows, batch: PrefillBatch, targets: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """Run a `prefill_step` up to its logits, with log probabilities of prompt tokens.

    Args:
        targets: int32 [N] twice: places in 0..T-1, and the token after each, whose log probability is wanted.

    Returns:
        The rows' logits [R, V], and the targets' log probabilities, int32 [N, 2 + 2 * k].
    """
    num_rows = len(batch.row_ids)
    output_index = batch.logit_index if targets is None else torch.cat([batch.logit_index, targets[0]])
    inputs = prefill_inputs(model, rows, batch)
    x, residual = model.run_blocks(batch.token_ids, batch.positions, inputs, output_index)
    logits = model.head(x[:num_rows], residual[:num_rows])
    if targets is None:
        return logits, None
    slices = [part[num_rows:].split(SLICE_ROWS) for part in (x, residual)]
    lines = [
        pack_logprobs(model.head(*some), ids)
        for *some, ids in zip(*slices, targets[1].split(SLICE_ROWS), strict=True)
    ]
    return logits, torch.cat(lines)


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
        return self._run(rows, extras, tables)[1]

    def logits(self, rows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Compute the logits of these rows' next tokens.

        Returns:
            Row ids, int32 [>= len(rows)], behind `rows` those of padding; and logits, one line for each.
        """
        row_ids, logits = self._run(rows, ONLY_LOGITS, None)
        # Later graphs share the memory of the recorded ones, and this step samples after they have run.
        return row_ids, logits.clone()

    def _run(
        self, rows: tuple[int, ...], extras: LogitExtras, tables: LogitTables | None
    ) -> tuple[Tensor, Tensor]:
        """Run a batch, padded if there is a bucket for it. Returns its row ids and its result."""
        bucket = bucket_for(len(rows), self._buckets)
        if bucket is None:
            self._plan(rows, len(rows))
            row_ids = row_ids_to_device(self._device, rows)
            return row_ids, decode_with_extras(self._step, row_ids, extras, tables)
        if (bucket, extras) not in self._recorded and self._record is not None:
            self._wanted.setdefault((bucket, extras), tables)
        recorded = sorted(size for size, others in self._recorded if others == extras)
        larger = bucket_for(len(rows), tuple(recorded))
        size = larger or bucket
        padded = (*rows, *[self._padding_row] * (size - len(rows)))
        self._plan(rows, size)
        if larger is None:
            self._ran_uncaptured = True
            row_ids = row_ids_to_device(self._device, padded)
            return row_ids, decode_with_extras(self._own_step, row_ids, extras, tables)
        row_ids, replay = self._recorded[larger, extras]
        if self._batches.get((larger, extras)) != rows:
            staged = torch.tensor(padded, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            row_ids.copy_(staged, non_blocking=True)
            self._batches[larger, extras] = rows
        return row_ids, replay()

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
        if extras.masks:
            return
        model, rows = self._step.model, self._step.rows
        row_ids = row_ids_to_device(self._device, (self._padding_row,) * bucket)
        logits = torch.zeros(bucket, model.vocab_size, dtype=model.logits_dtype, device=self._device)
        state = rows.read(row_ids)
        counted = row_ids < self._padding_row
        sample_with_extras(rows, row_ids, state, logits, state.context_len, counted, extras, tables)

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
    words = [("rules", extras.rules), ("log probabilities", extras.logprobs), ("masks", extras.masks)]
    return " and ".join(word for word, there in words if there)
