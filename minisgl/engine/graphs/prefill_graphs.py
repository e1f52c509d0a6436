"""Prefill as CUDA graphs: one per bucket of tokens and rows, replayed on padded batches.

For small prefills, the host takes longer to launch the kernels than the GPU takes to run them. A batch uses a
graph only if the graph is hardly slower than the uncaptured batch, or than its launches. Both times are
measured at the start. They also decide whether a step's decodes join its chunks.

Promise: padding changes a row's result only by the rounding of other matrix products, and padding is never
stored. A batch without a suitable bucket runs uncaptured.
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.graphs.buckets import PrefillBucket, prefill_bucket_for
from minisgl.engine.graphs.durations import MeasuredDurations
from minisgl.engine.graphs.graph_recorder import Record
from minisgl.engine.graphs.graph_table import GraphTable
from minisgl.engine.step.inputs import (
    NO_DECODES,
    Decodes,
    HostPageTable,
    PrefillBatch,
    Stager,
    pack_prefill,
    prefill_size,
)
from minisgl.engine.step.steps import StepOutput
from minisgl.scheduler.plan import Chunk

MAX_RUN_PER_LAUNCH = 2.0
"""A bucket is recorded if its graph runs at most this many times as long as the host's launches.

It is above 1 because a server's host has other work, too.
"""
MAX_PADDED_PER_UNPADDED = 1.05
"""A batch uses a graph if it runs at most this many times as long as the uncaptured batch.

It is above 1 because a graph leaves the host free.
"""
MEASURED_PROMPT_TOKENS = 1024
"""Most tokens of a prompt in a measurement. Larger buckets are measured with several prompts."""


class PrefillChoice(NamedTuple):
    """How to run a step's chunks."""

    bucket: PrefillBucket | None  # the graph to replay; None = run uncaptured
    joined: bool  # the step's decodes join the chunks
    duration_us: float  # of the step, without the time that grows with the decodes' keys


UNCAPTURED = PrefillChoice(None, False, 0.0)
"""The choice if no times were measured."""


class RecordedPrefill(NamedTuple):
    """The graph of one bucket."""

    inputs: Tensor  # int32, packed: the arrays of the graph's batch
    replay: Callable[[], StepOutput]  # its result is overwritten by the next replay of any graph


class PrefillGraphs:
    """Recorded prefill steps.

    Args:
        step: a prefill step on the device: `steps.prefill_step` without model and rows.
        record: records a function as a graph.
        buckets: ascending. `warm_up` removes those whose recording does not pay off. If none has room for
            decodes, decodes never join chunks.
        pages: used only for the padding row.
        vocab_size: measurements use token ids below it.

    Attributes:
        table: the graphs by bucket.
    """

    def __init__(
        self,
        step: Callable[[PrefillBatch], StepOutput],
        record: Record,
        buckets: tuple[PrefillBucket, ...],
        pages: HostPageTable,
        stager: Stager,
        device: torch.device,
        vocab_size: int,
    ) -> None:
        self._step = step
        self._record = record
        self._buckets = buckets
        self.table: GraphTable[PrefillBucket, RecordedPrefill] = GraphTable(self._record_padding, buckets)
        self._join_decodes = any(bucket.decodes for bucket in buckets)
        self._pages = pages
        self._stager = stager
        self._device = device
        self._vocab_size = vocab_size
        self._launch_us = 0
        self._joined_launch_us = 0
        self._run_us = MeasuredDurations()  # by tokens
        self._room_us = MeasuredDurations()  # by decodes: the extra time of room for them
        self._room_us.add(0, 0)

    def warm_up(
        self,
        first: Iterable[PrefillBucket],
        clock: Callable[[], float] = time.perf_counter,
        minimum_over_ranks: Callable[[int], int] = int,
    ) -> None:
        """Record these buckets, smallest first, until the time of launches no longer matters.

        Other buckets stay to be recorded later if their interpolated time says that this pays off. These runs
        store only in the scratch page.

        Args:
            minimum_over_ranks: the smallest value of all ranks. Ranks must decide by equal durations.
        """
        for bucket in sorted(first):
            recorded, batch = self._record_prompts(bucket)
            if not self._run_us:  # the launch time is the same for all buckets
                self._launch_us = minimum_over_ranks(
                    min(self._measure_launch_us(batch, clock) for _ in range(3))
                )
            run_us = minimum_over_ranks(min(self._measure_run_us(recorded.replay, clock) for _ in range(2)))
            self._run_us.add(bucket.tokens, run_us)
            if not self._is_worth_recording(bucket):
                break
            self.table.add(bucket, recorded)
        self._measure_joined(clock, minimum_over_ranks)
        self.table.give_up(
            lambda bucket: bucket.tokens > self._run_us.largest or not self._is_worth_recording(bucket)
        )

    def choose(
        self, chunks: tuple[Chunk, ...], num_decodes: int = 0, decode_us: float = 0.0
    ) -> PrefillChoice:
        """Choose the fastest way to run these chunks, and whether the step's decodes join them.

        Args:
            num_decodes: number of decodes that may join.
            decode_us: time of the decodes if they run before the chunks, without what grows with their keys.
        """
        size = prefill_size(chunks)
        choice = self._choose_for(size, False, before_us=decode_us)
        if num_decodes and self._join_decodes and self.table.sizes:
            all_size = prefill_size(chunks, num_decodes)
            joined = self._choose_for(all_size, True)
            if joined.duration_us < choice.duration_us:
                size, choice = all_size, joined
        if self.table.num_missing:
            self.table.want(prefill_bucket_for(size, self._buckets))
        return choice

    def run(
        self, chunks: tuple[Chunk, ...], decodes: Decodes, bucket: PrefillBucket, pages: HostPageTable
    ) -> StepOutput:
        """Run the decodes and the chunks in the bucket's graph.

        The chunks' rows start at index `bucket.decodes`. The next replay overwrites the result.
        """
        recorded = self.table[bucket]
        self._stager.overwrite(recorded.inputs, pack_prefill(chunks, decodes, pages, bucket))
        return recorded.replay()

    def _choose_for(self, size: PrefillBucket, joined: bool, before_us: float = 0.0) -> PrefillChoice:
        """Choose between a graph and an uncaptured run.

        Args:
            before_us: time of the device's work in this step before the chunks.
        """
        run_us = self._estimate_run_us(size)
        launch_us = self._joined_launch_us if joined else self._launch_us
        bucket = prefill_bucket_for(size, self.table.sizes)
        if bucket is not None:
            graph_us = self._estimate_run_us(bucket)
            if graph_us <= MAX_PADDED_PER_UNPADDED * max(launch_us, run_us):
                return PrefillChoice(bucket, joined, before_us + graph_us)
        return PrefillChoice(None, joined, max(launch_us, before_us + run_us))

    def _measure_joined(self, clock: Callable[[], float], minimum_over_ranks: Callable[[int], int]) -> None:
        """Measure the time of room for decodes.

        It records the largest buckets with such room whose counterpart without room is recorded.
        """
        rooms = [
            bucket
            for bucket in self._buckets
            if bucket.decodes and bucket._replace(decodes=0) in self.table.sizes
        ]
        for bucket in [bucket for bucket in rooms if bucket.tokens == rooms[-1].tokens]:
            recorded, batch = self._record_prompts(bucket)
            self.table.add(bucket, recorded)
            self._joined_launch_us = minimum_over_ranks(
                min(self._measure_launch_us(batch, clock) for _ in range(2))
            )
            run_us = minimum_over_ranks(min(self._measure_run_us(recorded.replay, clock) for _ in range(2)))
            self._room_us.add(bucket.decodes, max(0, run_us - round(self._run_us.estimate_us(bucket.tokens))))

    def _record_padding(self, bucket: PrefillBucket) -> RecordedPrefill:
        inputs, batch = self._padding_batch(bucket)
        return RecordedPrefill(inputs, self._record(lambda: self._step(batch)))

    def _record_prompts(self, bucket: PrefillBucket) -> tuple[RecordedPrefill, PrefillBatch]:
        """Record a bucket and fill it with `_measuring_prompts`. Returns the graph and its batch."""
        inputs, batch = self._padding_batch(bucket)
        recorded = RecordedPrefill(inputs, self._record(lambda: self._step(batch)))
        self._stager.overwrite(inputs, self._measuring_prompts(bucket))
        self._wait()
        return recorded, batch

    def _padding_batch(self, bucket: PrefillBucket) -> tuple[Tensor, PrefillBatch]:
        """Build a batch of padding. Returns its packed tensor and the batch."""
        inputs, views = self._stager.buffer(pack_prefill((), NO_DECODES, self._pages, bucket))
        return inputs, PrefillBatch(*views, max_query_len=bucket.tokens, num_decodes=bucket.decodes)

    def _measuring_prompts(self, bucket: PrefillBucket) -> list[np.ndarray]:
        """The arrays of a batch of random tokens for measurements, which are stored in the scratch page.

        The tokens need a slot, because tokens without one are padding, which reaches no expert.
        """
        generator = np.random.default_rng(bucket.tokens)
        longest = min(MEASURED_PROMPT_TOKENS, self._pages.max_tokens)
        chunks: list[Chunk] = []
        left = bucket.tokens
        while left and len(chunks) < bucket.rows:
            token_ids = generator.integers(0, self._vocab_size, min(left, longest)).astype("<i4")
            chunks.append(Chunk(self._pages.padding_row, 0, token_ids.tobytes(), True))
            left -= len(token_ids)
        arrays = pack_prefill(tuple(chunks), NO_DECODES, self._pages, bucket)
        # Positions could exceed RoPE's table, because the last page may extend beyond the context.
        arrays[PrefillBatch._fields.index("positions")].fill(0)
        return arrays

    def _is_worth_recording(self, bucket: PrefillBucket) -> bool:
        return self._estimate_run_us(bucket) <= MAX_RUN_PER_LAUNCH * self._launch_us

    def _estimate_run_us(self, size: PrefillBucket) -> float:
        """Estimated time of the device for a batch of this size, without what grows with decodes' keys."""
        return self._run_us.estimate_us(size.tokens) + self._room_us.estimate_us(size.decodes)

    def _measure_launch_us(self, batch: PrefillBatch, clock: Callable[[], float]) -> int:
        """Microseconds in which the host launches the uncaptured step."""
        begin = clock()
        self._step(batch)
        launched = clock()
        self._wait()
        return round(1e6 * (launched - begin))

    def _measure_run_us(self, replay: Callable[[], object], clock: Callable[[], float]) -> int:
        """Microseconds of one replay."""
        begin = clock()
        replay()
        self._wait()
        return round(1e6 * (clock() - begin))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
