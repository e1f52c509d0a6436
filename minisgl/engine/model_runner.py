"""Launches step plans on the device and collects their tokens.

Promise: `launch` never waits for the device, and `collect` waits only for its own step. Steps run in the
order of their launch, on one stream, so a step sees everything that earlier steps wrote.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.attention_planner import AttentionPlanner
from minisgl.engine.graphs.logit_extras import prefill_logits
from minisgl.engine.graphs.prefill_graphs import UNCAPTURED, PrefillChoice
from minisgl.engine.graphs.recording import RecordedSteps
from minisgl.engine.inputs import (
    NO_DECODES,
    HostPageTable,
    Stager,
    build_prefill,
    decodes_of,
    pack_row_inits,
    row_ids_to_device,
)
from minisgl.engine.logits import LogitTables, pack_rules
from minisgl.engine.rows import Rows
from minisgl.engine.step_timeline import UsedGraphs
from minisgl.engine.steps import DecodeStep, RowMasks, prefill_step, sample_with_extras
from minisgl.models.decoder import Decoder
from minisgl.scheduler.plan import PLAIN, Chunk, LogitExtras, StepPlan, StepResult, TokenMasks

MASK_BUFFERS = 1
"""Pinned host buffers for masks: a step's masks are made when the step before is over, and so is its copy.
The buffer has at most 2 * rows * ceil(vocabulary / 32) int32: 9.7 MB for 256 rows of 151,936 tokens."""


class HostTokens(NamedTuple):
    """Results of rows, copied to the host, and the places of those that count."""

    results: Tensor  # int32 [R] tokens, or [R, columns] with log probabilities (see `logit_extras`)
    places: list[int]

    def read(self) -> list[int]:
        """The tokens. Call it only after the copy has ended."""
        token_ids = (self.results if self.results.dim() == 1 else self.results[:, 0]).tolist()
        return [token_ids[place] for place in self.places]

    def logprobs(self) -> np.ndarray | None:
        """Log probabilities, int32 [places, 2 + 2 * k], or None. Call it only after the copy has ended."""
        if self.results.dim() == 1 or self.results.shape[1] == 1:
            return None
        return self.results[:, 1:].numpy()[self.places]


class UnsampledRows(NamedTuple):
    """A batch whose logits wait for the masks of some of its rows."""

    row_ids: Tensor  # int32 [R]
    logits: Tensor  # [R, V]
    context_len: Tensor | None  # int32 [R]; None = as in the tables
    counted: Tensor  # bool [R]; see `sample_with_extras`
    extras: LogitExtras
    places: list[int]  # of the rows that count


@dataclass
class LaunchedStep:
    """A step in flight: the host tensors that receive its tokens, and the event after their copy."""

    plan: StepPlan
    graphs: UsedGraphs
    batches: list[HostTokens | UnsampledRows]  # together, in the order of plan.sampled_rows
    done: torch.cuda.Event | None
    prompt_logprobs: Tensor | None = None  # int32 [all chunks' targets, 2 + 2 * k]

    def wait(self) -> None:
        """Wait until the device has finished the step."""
        if self.done is not None:
            self.done.synchronize()


class ModelRunner:
    """Executes plans. Owns the device tables and their host copy."""

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        pages: HostPageTable,
        planner: AttentionPlanner,
        stager: Stager,
        device: torch.device,
        recorded: RecordedSteps,
    ) -> None:
        self.model = model
        self.rows = rows
        self._device = device
        self.pages = pages
        self.planner = planner
        self.stager = stager
        self._mask_stager = Stager(device, MASK_BUFFERS)
        self._decode = DecodeStep(model, rows)
        self.decode_graphs = recorded.decode
        self.prefill_graphs = recorded.prefill
        self._extras_decode = recorded.extras_decode
        self._logit_tables: LogitTables | None = None
        self._rules_seen = False  # until then, no row of the tables has rules

    def allocate_logit_tables(self) -> None:
        """Allocate the tables for rows with `LogitRules`, before the first plan with such a row.

        Further calls do nothing.

        Raises:
            torch.OutOfMemoryError: too little memory is free. Nothing has changed.
        """
        if self._logit_tables is None:
            self._logit_tables = LogitTables(self.rows.max_rows, self.model.vocab_size, self._device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step: first the updates of rows, then decodes and chunks, one after the other or joined.

        If the plan has `masked` rows, `sample` must follow before the next launch.
        """
        if plan.row_inits:
            self.rows.init_rows(self.stager.to_device(pack_row_inits(plan.row_inits)))
            self._rules_seen = self._rules_seen or bool(plan.row_rules)
            if self._rules_seen:
                assert self._logit_tables is not None, "allocated before the first plan with rules"
                rules = pack_rules(plan.row_inits, plan.row_rules, self._logit_tables.vocab_size)
                self._logit_tables.init_rows(rules, self.stager.to_device(list(rules)))
        change = self.pages.update(plan)
        if change is not None:
            index, page_ids = self.stager.to_device([change.flat_index, change.page_ids])
            self.rows.page_table.view(-1).index_copy_(0, index.long(), page_ids)
        choice = self._choose_prefill(plan)
        batches: list[HostTokens | UnsampledRows] = []
        prompt_logprobs = None
        decode_bucket = 0
        if plan.decode_rows and not choice.joined:
            batches.append(self._launch_decodes(plan))
            if self.decode_graphs is not None:
                decode_bucket = self.decode_graphs.bucket_of(len(plan.decode_rows)) or 0
        if plan.chunks:
            batch, targets = self._launch_chunks(plan, choice)
            batches += [batch] if batch.places else []
            prompt_logprobs = None if targets is None else self._to_host(targets)
        graphs = UsedGraphs(
            decode_bucket, choice.bucket.tokens if choice.bucket is not None else 0, choice.joined
        )
        done = None if plan.masked else self._event()
        return LaunchedStep(plan, graphs, batches, done, prompt_logprobs)

    @torch.inference_mode()
    def sample(self, step: LaunchedStep, masks: TokenMasks) -> None:
        """Queue the second half of a step with masks: sample the rows whose logits wait."""
        plan = step.plan
        mask_of = np.full(len(plan.sampled_rows), -1, dtype=np.int32)
        mask_of[list(plan.masked)] = np.arange(len(plan.masked))
        waiting: list[int] = []
        mask_of_rows: list[np.ndarray] = []
        begin = 0
        for index, batch in enumerate(step.batches):
            end = begin + len(batch.places)
            if isinstance(batch, UnsampledRows):
                mask_of_row = np.full(len(batch.row_ids), -1, dtype=np.int32)
                mask_of_row[batch.places] = mask_of[begin:end]
                waiting.append(index)
                mask_of_rows.append(mask_of_row)
            begin = end
        # All batches share one copy of the masks.
        words = np.frombuffer(masks.words, "<i4")
        *staged, staged_words = self._mask_stager.to_device([*mask_of_rows, words])
        staged_masks = staged_words.view(-1, masks.num_words)
        for index, staged_mask_of in zip(waiting, staged, strict=True):
            batch = step.batches[index]
            assert isinstance(batch, UnsampledRows)
            step.batches[index] = self._sample(batch, RowMasks(staged_mask_of, staged_masks))
        step.done = self._event()

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a step and return its results."""
        step.wait()
        batches = [batch for batch in step.batches if isinstance(batch, HostTokens)]
        assert len(batches) == len(step.batches), "a step with masks was not sampled"
        token_ids = [token for batch in batches for token in batch.read()]
        prompt_logprobs: tuple[np.ndarray, ...] = ()
        if step.prompt_logprobs is not None:
            ends = np.cumsum([len(chunk.targets) // 4 for chunk in step.plan.chunks])
            prompt_logprobs = tuple(np.split(step.prompt_logprobs.numpy(), ends[:-1]))
        return StepResult(token_ids, _join_logprobs(batches), prompt_logprobs)

    def _choose_prefill(self, plan: StepPlan) -> PrefillChoice:
        """Choose how the plan's chunks run, and whether its decodes join their batch."""
        if self.prefill_graphs is None or not plan.chunks or _chunks_have_extras(plan):
            return UNCAPTURED
        num_decodes = len(plan.decode_rows)
        if not num_decodes or plan.decode_extras != PLAIN or self.decode_graphs is None:
            return self.prefill_graphs.choose(plan.chunks)
        return self.prefill_graphs.choose(
            plan.chunks, num_decodes, self.decode_graphs.duration_us(num_decodes)
        )

    def _launch_decodes(self, plan: StepPlan) -> HostTokens | UnsampledRows:
        """Run the decodes. With masks, only up to their logits."""
        rows, places = plan.decode_rows, list(range(len(plan.decode_rows)))
        if plan.decode_extras.masks:
            row_ids, logits = self._extras_decode.logits(rows)
            counted = row_ids < self.rows.max_rows
            return UnsampledRows(row_ids, logits, None, counted, plan.decode_extras, places)
        if plan.decode_extras != PLAIN:
            results = self._extras_decode(rows, plan.decode_extras, self._logit_tables)
        elif self.decode_graphs is not None:
            results = self.decode_graphs(rows)
        else:
            row_ids = row_ids_to_device(self._device, rows)
            self.planner.plan_decode(rows, len(rows))
            results = self._decode(row_ids)
        return HostTokens(self._to_host(results[: len(rows)]), places)

    def _launch_chunks(
        self, plan: StepPlan, choice: PrefillChoice
    ) -> tuple[HostTokens | UnsampledRows, Tensor | None]:
        """Run the chunks and the decodes that join them.

        Returns:
            Their rows, and the log probabilities of the targets or None.
        """
        chunks = plan.chunks
        self.planner.plan_prefill(chunks)
        sampling = [place for place, chunk in enumerate(chunks) if chunk.samples]
        if _chunks_have_extras(plan):
            batch = build_prefill(chunks, self.pages, self.stager)
            target_places, target_ids, is_sampled = self.stager.to_device(_pack_targets(chunks))
            targets = (target_places, target_ids) if len(target_places) else None
            logits, lines = prefill_logits(self.model, self.rows, batch, targets)
            rows = UnsampledRows(
                batch.row_ids, logits, batch.context_len, is_sampled > 0, plan.chunk_extras, sampling
            )
            return (rows if plan.chunk_extras.masks else self._sample(rows, None)), lines
        num_decodes = len(plan.decode_rows) if choice.joined else 0
        decodes = decodes_of(plan) if choice.joined else NO_DECODES
        if self.prefill_graphs is not None and choice.bucket is not None:
            results = self.prefill_graphs.run(chunks, decodes, choice.bucket, self.pages)
            first_chunk = choice.bucket.decodes
        else:
            batch = build_prefill(chunks, self.pages, self.stager, decodes)
            results, first_chunk = prefill_step(self.model, self.rows, batch), batch.num_decodes
        places = [*range(num_decodes), *(first_chunk + place for place in sampling)]
        return HostTokens(self._to_host(results) if places else results, places), None

    def _sample(self, batch: UnsampledRows, masks: RowMasks | None) -> HostTokens:
        state = self.rows.read(batch.row_ids)
        context_len = state.context_len if batch.context_len is None else batch.context_len
        results = sample_with_extras(
            self.rows,
            batch.row_ids,
            state,
            batch.logits,
            context_len,
            batch.counted,
            batch.extras,
            self._logit_tables,
            masks,
        )
        return HostTokens(self._to_host(results), batch.places)

    def _event(self) -> torch.cuda.Event | None:
        """An event behind the work queued so far; None on CPU, where nothing is queued."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _to_host(self, results: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return results
        host = torch.empty(results.shape, dtype=torch.int32, pin_memory=True)
        return host.copy_(results, non_blocking=True)


def _chunks_have_extras(plan: StepPlan) -> bool:
    return plan.chunk_extras != PLAIN or any(chunk.targets for chunk in plan.chunks)


def _pack_targets(chunks: tuple[Chunk, ...]) -> list[np.ndarray]:
    """Three int32 arrays: the targets' places in the batch [N], their tokens [N], 1 for sampling rows [R]."""
    places: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    begin = 0
    for chunk in chunks:
        places.append(np.arange(begin, begin + len(chunk.targets) // 4, dtype=np.int32))
        begin += chunk.num_new_tokens
    target_ids = np.frombuffer(b"".join(chunk.targets for chunk in chunks), dtype="<i4")
    sampling = np.array([chunk.samples for chunk in chunks], dtype=np.int32)
    return [np.concatenate(places), target_ids, sampling]


def _join_logprobs(parts: list[HostTokens]) -> np.ndarray | None:
    """Join the log probabilities of all parts. Parts without any get zeros. None if no part has any."""
    lines = [part.logprobs() for part in parts]
    width = max((part.shape[1] for part in lines if part is not None), default=0)
    if not width:
        return None
    return np.concatenate(
        [
            np.zeros((len(part.places), width), dtype=np.int32) if found is None else found
            for part, found in zip(parts, lines, strict=True)
        ]
    )
