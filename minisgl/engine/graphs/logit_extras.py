"""Steps for rows that ask for more than sampling: rules between logits and token, log probabilities.

Promise: a row's token is what the plain steps give it unless its own rules say otherwise. What such a step
gives comes back in one tensor, so that it can be recorded like a plain one.

A result is int32 [R, 1] (the tokens), with log probabilities int32 [R, 1 + 2 + 2 * k] (`pack_logprobs` behind
the token). R rows of the batch, T new tokens, N targets.
"""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.engine.buckets import bucket_for
from minisgl.engine.compiled import PlanDecode, Record, no_plan
from minisgl.engine.inputs import PrefillBatch, row_ids_on
from minisgl.engine.logits import SLICE_ROWS, LogitTables, pack_logprobs
from minisgl.engine.rows import Rows
from minisgl.engine.steps import DecodeStep, prefill_inputs, sample_and_advance
from minisgl.models.decoder import Decoder
from minisgl.scheduler.plan import Extras
from triton_kernels.read_rows import RowState

logger = logging.getLogger(__name__)


def special_decode(step: DecodeStep, row_ids: Tensor, extras: Extras, tables: LogitTables | None) -> Tensor:
    """`DecodeStep` with extras; row_ids: int32 [R]."""
    state, logits = step.logits(row_ids)
    counted = row_ids < step.rows.max_rows
    return _sample(step.rows, row_ids, state, logits, state.context_len, extras, tables, counted)


def special_prefill(
    model: Decoder,
    rows: Rows,
    batch: PrefillBatch,
    extras: Extras,
    tables: LogitTables | None,
    sampling: Tensor,
    targets: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """`prefill_step` with extras, and log probabilities of the prompts themselves.

    Args:
        sampling: int32 [R], 1 where the row's prompt ends in this batch.
        targets: int32 [N] each: places in 0..T-1, and the token behind each whose log probability is wanted.

    Returns:
        The rows' result, and of the targets int32 [N, 2 + 2 * k].
    """
    num_rows = len(batch.row_ids)
    kept = batch.logit_index if targets is None else torch.cat([batch.logit_index, targets[0]])
    inputs = prefill_inputs(model, rows, batch)
    x, residual = model.run_blocks(batch.token_ids, batch.positions, inputs, kept)
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
    extras: Extras,
    tables: LogitTables | None,
    counted: Tensor,
) -> Tensor:
    """Sample from what the rules leave; counted: bool [R], the rows whose token is part of their output."""
    ruled = logits
    if extras.rules:
        assert tables is not None
        ruled = tables.ruled(logits, row_ids, context_len)
    token_ids = sample_and_advance(rows, row_ids, state, ruled, context_len)
    if extras.rules:
        assert tables is not None
        tables.note(row_ids, token_ids, counted)
    result = token_ids[:, None]
    return torch.cat([result, pack_logprobs(logits, token_ids)], 1) if extras.logprobs else result


class SpecialDecode:
    """Decode steps with extras, recorded after the first batch of their size has asked for them.

    Args:
        step: uncompiled: what runs batches for which there is no bucket.
        record: None = nothing is recorded.
        buckets: ascending batch sizes to record.
        own_step: what is recorded, with compiled blocks where there are; None = `step`.
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
        self._recorded: dict[tuple[int, Extras], tuple[Tensor, Callable[[], Tensor]]] = {}
        self._batches: dict[tuple[int, Extras], tuple[int, ...]] = {}  # the rows that a graph's row_ids hold
        self._wanted: dict[tuple[int, Extras], LogitTables | None] = {}  # to be recorded, the oldest first
        self._ran_uncaptured = False  # since the last recording

    def __call__(self, rows: tuple[int, ...], extras: Extras, tables: LogitTables | None) -> Tensor:
        """Decode these rows; the result of at least len(rows), overwritten by the next call."""
        bucket = bucket_for(len(rows), self._buckets)
        if bucket is None:
            self._plan(rows, len(rows))
            return special_decode(self._step, row_ids_on(self._device, rows), extras, tables)
        if (bucket, extras) not in self._recorded and self._record is not None:
            self._wanted.setdefault((bucket, extras), tables)
        recorded = sorted(size for size, others in self._recorded if others == extras)
        larger = bucket_for(len(rows), tuple(recorded))
        size = larger or bucket
        padded = (*rows, *[self._step.rows.max_rows] * (size - len(rows)))
        self._plan(rows, size)
        if larger is None:
            self._ran_uncaptured = True
            return special_decode(self._own_step, row_ids_on(self._device, padded), extras, tables)
        row_ids, replay = self._recorded[larger, extras]
        if self._batches.get((larger, extras)) != rows:
            staged = torch.tensor(padded, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            row_ids.copy_(staged, non_blocking=True)
            self._batches[larger, extras] = rows
        return replay()

    @property
    def num_missing(self) -> int:
        """Graphs that steps have asked for and that are not recorded yet."""
        return len(self._wanted)

    @property
    def is_urgent(self) -> bool:
        """Whether steps run uncaptured for want of a graph."""
        return self._ran_uncaptured and bool(self._wanted)

    def record_next(self) -> None:
        """Record what was asked for first, on padding rows."""
        assert self._record is not None
        started = time.perf_counter()
        (bucket, extras), tables = next(iter(self._wanted.items()))
        row_ids = row_ids_on(self._device, (self._step.rows.max_rows,) * bucket)
        self._plan((), bucket)
        replay = self._record(lambda: special_decode(self._own_step, row_ids, extras, tables))
        self._recorded[bucket, extras] = (row_ids, replay)
        del self._wanted[bucket, extras]
        self._ran_uncaptured = False
        duration_ms = (time.perf_counter() - started) * 1e3
        logger.info("decode graph of %d rows with %s: %.0f ms", bucket, _describe(extras), duration_ms)

    def give_up(self) -> None:
        """Do with the graphs there are: other batches run uncaptured from now on."""
        self._record = None
        self._wanted.clear()


def _describe(extras: Extras) -> str:
    words = [("rules", extras.rules), ("log probabilities", extras.logprobs)]
    return " and ".join(word for word, there in words if there)
