"""Launches step plans on the device and collects their tokens.

Promise: `launch` never waits for the device, and `collect` waits only for its own step. Steps run in the
order of their launch, on one stream, so a step sees everything that earlier steps wrote.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.cpu_blocks.cpu_block import CpuBlock
from minisgl.engine.graphs.prefill_graphs import UNCAPTURED, PrefillChoice
from minisgl.engine.graphs.recording import RecordedSteps
from minisgl.engine.step.attention_planner import AttentionPlanner
from minisgl.engine.step.host_tokens import HostTokens, join_logprobs
from minisgl.engine.step.inputs import (
    NO_DECODES,
    HostPageTable,
    Stager,
    build_prefill,
    decodes_of,
    pack_row_inits,
    row_ids_to_device,
)
from minisgl.engine.step.logits import LogitTables, pack_rules
from minisgl.engine.step.rows import Rows
from minisgl.engine.step.sample_extras import RowMasks, sample_with_extras
from minisgl.engine.step.steps import DecodeStep, RowLogits, prefill_logits, prefill_step
from minisgl.engine.watch.step_timeline import UsedGraphs
from minisgl.layers.state_pool import StatePool
from minisgl.models.decoder import Decoder, call_block
from minisgl.scheduler.plan import PLAIN, Chunk, LogitExtras, StepPlan, StepResult, TokenMasks

MASK_BUFFERS = 1
"""Pinned host buffers for masks: a step's masks are made when the step before is over, and so is its copy.
The buffer has at most 2 * rows * ceil(vocabulary / 32) int32: 9.7 MB for 256 rows of 151,936 tokens."""


class UnsampledRows(NamedTuple):
    """A batch that is still to be sampled with extras, perhaps after masks that are not known yet."""

    logits: RowLogits
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
        states: StatePool | None = None,
        cpu_block: CpuBlock | None = None,
    ) -> None:
        self.model = model
        self.states = states
        self.rows = rows
        self._device = device
        self.pages = pages
        self.planner = planner
        self.stager = stager
        self._mask_stager = Stager(device, MASK_BUFFERS)
        self.cpu_block = cpu_block
        self._decode = DecodeStep(model, rows, cpu_block or call_block)
        self.decode_graphs = recorded.decode
        self.prefill_graphs = recorded.prefill
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
            self.rows.page_entries.index_copy_(0, index.long(), page_ids)
        if self.states is not None:
            self.states.save(plan.state_copies.saves)
            self.states.load(plan.state_copies.loads)
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
        return LaunchedStep(plan, graphs, batches, self._event(), prompt_logprobs)

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
                mask_of_row = np.full(len(batch.counted), -1, dtype=np.int32)
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
        return StepResult(token_ids, join_logprobs(batches), prompt_logprobs)

    def _choose_prefill(self, plan: StepPlan) -> PrefillChoice:
        """Choose how the plan's chunks run, and whether its decodes join their batch."""
        if self.prefill_graphs is None or not plan.chunks or _has_targets(plan):
            return UNCAPTURED
        num_decodes = len(plan.decode_rows)
        if not num_decodes or self.decode_graphs is None:
            return self.prefill_graphs.choose(plan.chunks)
        return self.prefill_graphs.choose(
            plan.chunks, num_decodes, self.decode_graphs.duration_us(num_decodes)
        )

    def _launch_decodes(self, plan: StepPlan) -> HostTokens | UnsampledRows:
        """Run the decodes. With masks, only up to their logits."""
        rows, extras, places = plan.decode_rows, plan.decode_extras, list(range(len(plan.decode_rows)))
        if extras == PLAIN:
            if self.decode_graphs is not None:
                token_ids = self.decode_graphs(rows)
            else:
                token_ids = self._decode(self._uncaptured_rows(rows))
            return HostTokens(self._to_host(token_ids[: len(rows)]), places)
        if self.decode_graphs is not None:
            logits = self.decode_graphs.logits(rows)
        else:
            logits = self._decode.logits(self._uncaptured_rows(rows))
        if extras.masks and plan.chunks:
            logits = logits.clone()  # the chunks' graph overwrites the decodes' before they are sampled
        counted = logits.row_ids < self.rows.max_rows
        return self._sample_unless_masked(UnsampledRows(logits, counted, extras, places))

    def _uncaptured_rows(self, rows: tuple[int, ...]) -> Tensor:
        """Prepare an uncaptured decode step. Returns the rows' ids on the device, int32 [R]."""
        self.planner.plan_decode(rows, len(rows))
        return row_ids_to_device(self._device, rows)

    def _launch_chunks(
        self, plan: StepPlan, choice: PrefillChoice
    ) -> tuple[HostTokens | UnsampledRows, Tensor | None]:
        """Run the chunks and the decodes that join them.

        Returns:
            Their rows, and the log probabilities of the targets or None.
        """
        self.planner.plan_prefill(plan.chunks)
        extras = _extras_of_chunks(plan, choice.joined)
        num_decodes = len(plan.decode_rows) if choice.joined else 0
        decodes = decodes_of(plan) if choice.joined else NO_DECODES
        token_ids = lines = None
        if self.prefill_graphs is not None and choice.bucket is not None:
            token_ids, logits = self.prefill_graphs.run(plan.chunks, decodes, choice.bucket, self.pages)
            first_chunk = choice.bucket.decodes
        else:
            batch = build_prefill(plan.chunks, self.pages, self.stager, decodes)
            first_chunk = batch.num_decodes
            if _has_targets(plan):
                targets = self.stager.to_device(_pack_targets(plan.chunks))
                logits, lines = prefill_logits(self.model, self.rows, batch, (targets[0], targets[1]))
            elif extras != PLAIN:
                logits, _ = prefill_logits(self.model, self.rows, batch)
            else:
                token_ids, logits = prefill_step(self.model, self.rows, batch)
        sampling = [first_chunk + place for place, chunk in enumerate(plan.chunks) if chunk.samples]
        places = [*range(num_decodes), *sampling]
        if token_ids is not None and extras == PLAIN:
            return HostTokens(self._to_host(token_ids) if places else token_ids, places), lines
        assert logits is not None, "prefill is recorded with its logits"
        is_sampled = np.zeros(len(logits.row_ids), dtype=np.int32)
        is_sampled[places] = 1
        (counted,) = self.stager.to_device([is_sampled])
        return self._sample_unless_masked(UnsampledRows(logits, counted > 0, extras, places)), lines

    def _sample_unless_masked(self, batch: UnsampledRows) -> HostTokens | UnsampledRows:
        return batch if batch.extras.masks else self._sample(batch, None)

    def _sample(self, batch: UnsampledRows, masks: RowMasks | None) -> HostTokens:
        results = sample_with_extras(
            self.rows, batch.logits, batch.counted, batch.extras, self._logit_tables, masks
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


def _has_targets(plan: StepPlan) -> bool:
    """Whether log probabilities of prompt tokens are wanted, whose number no recorded step knows."""
    return any(chunk.targets for chunk in plan.chunks)


def _extras_of_chunks(plan: StepPlan, joined: bool) -> LogitExtras:
    """The extras of the chunks and of the decodes that join them."""
    if not joined:
        return plan.chunk_extras
    return LogitExtras(*(a or b for a, b in zip(plan.decode_extras, plan.chunk_extras, strict=True)))


def _pack_targets(chunks: tuple[Chunk, ...]) -> list[np.ndarray]:
    """Two int32 arrays [N]: the targets' places in the batch, and their tokens."""
    places: list[np.ndarray] = []
    begin = 0
    for chunk in chunks:
        places.append(np.arange(begin, begin + len(chunk.targets) // 4, dtype=np.int32))
        begin += chunk.num_new_tokens
    target_ids = np.frombuffer(b"".join(chunk.targets for chunk in chunks), dtype="<i4")
    return [np.concatenate(places), target_ids]
