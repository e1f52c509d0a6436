"""Prefill as CUDA graphs: one for each bucket of prompt tokens and rows, replayed on padded batches.

Launching a prefill kernel by kernel takes the host longer than a small one takes the GPU. Nothing in it
depends on what the host knows of the batch: the attention kernels find a token's row in `row_start` on the
device and have a grid that suits every batch of so many tokens and rows, so one recording serves them all.

Padding is computed, too. So a batch takes a graph only where that is hardly longer than it would run, or than
launching it would take the host; both times are measured at the start. They say, too, whether a step's
decodes go through the model with its chunks: weights are read once then, and layers compute some tokens more.

Promise: a padded batch gives each row what it gets unpadded, up to the rounding of other matrix products;
padding writes nowhere. A step without a fitting bucket is not ours and runs uncaptured.
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.buckets import PrefillBucket, prefill_bucket_for
from minisgl.engine.compiled import Record
from minisgl.engine.inputs import (
    NO_DECODES,
    Decodes,
    HostPageTable,
    PrefillBatch,
    Stager,
    pack_prefill,
    size_of,
)
from minisgl.engine.measured import MeasuredDurations
from minisgl.scheduler.plan import Chunk

WORTH_RECORDING = 2.0
"""A graph may run this many times as long as a launch takes: the host of a server has other work, too."""
PADDED = 1.05
"""A graph may run this many times as long as its batch would uncaptured: it leaves the host free."""
MEASURED_PROMPT_TOKENS = 1024
"""Of a prompt that graphs are measured with; larger buckets get several."""


class PrefillWay(NamedTuple):
    """How a step's chunks run."""

    bucket: PrefillBucket | None  # the graph's; None = uncaptured
    joined: bool  # its decodes with them
    duration_us: float  # of the step, but for what grows with the keys that decodes read


UNCAPTURED = PrefillWay(None, False, 0.0)
"""Where nothing is measured."""


class Recorded(NamedTuple):
    """One bucket's graph."""

    inputs: Tensor  # int32, packed: what the graph's batch consists of
    replay: Callable[[], Tensor]  # -> the rows' tokens, overwritten by the next replay


class PrefillGraphs:
    """Recorded prefill steps.

    Args:
        step: a prefill step on the device, as `steps.prefill_step` without model and rows.
        record: how it is recorded.
        buckets: ascending; those that are not worth it are left out by `warm_up`. If none has room for
            decodes, they never go with chunks.
        pages: only asked for the row that belongs to nobody.
        vocab_size: token ids below it are measured with.
    """

    def __init__(
        self,
        step: Callable[[PrefillBatch], Tensor],
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
        self._join_decodes = any(bucket.decodes for bucket in buckets)
        self._pages = pages
        self._stager = stager
        self._device = device
        self._vocab_size = vocab_size
        self._launch_us = 0
        self._joined_launch_us = 0
        self._run_us = MeasuredDurations()  # by tokens
        self._room_us = MeasuredDurations()  # by decodes: what room for them takes besides
        self._room_us.add(0, 0)
        self._recorded: dict[PrefillBucket, Recorded] = {}
        self._ascending: tuple[PrefillBucket, ...] = ()  # those that are recorded
        self._wanted: PrefillBucket | None = None  # of the chunks before

    def warm_up(
        self,
        first: Iterable[PrefillBucket],
        clock: Callable[[], float] = time.perf_counter,
        agree: Callable[[int], int] = int,
    ) -> None:
        """Record these buckets, smallest first, up to where launching is no matter.

        Of the other buckets those are left to be recorded that are worth it by the line between the measured
        ones on both sides. What runs here is stored in the scratch page only.

        Args:
            agree: the least of all ranks' measured microseconds: they must decide alike.
        """
        for bucket in sorted(first):
            recorded, batch = self._record_prompts(bucket)
            if not self._run_us:  # the same for all
                self._launch_us = agree(min(self._launch(batch, clock) for _ in range(3)))
            run_us = agree(min(self._duration(recorded.replay, clock) for _ in range(2)))
            self._run_us.add(bucket.tokens, run_us)
            if not self._is_worth_recording(bucket):
                break
            self._keep(bucket, recorded)
        self._measure_joined(clock, agree)
        self._buckets = tuple(
            bucket
            for bucket in self._buckets
            if bucket in self._recorded
            or (bucket.tokens <= self._run_us.largest and self._is_worth_recording(bucket))
        )

    @property
    def buckets(self) -> tuple[PrefillBucket, ...]:
        """Those that are recorded, ascending."""
        return self._ascending

    @property
    def num_missing(self) -> int:
        """Buckets without a graph, whose chunks run in a larger one or uncaptured."""
        return len(self._buckets) - len(self._recorded)

    @property
    def is_urgent(self) -> bool:
        """Never: uncaptured, such a prompt takes little longer."""
        return False

    def record_next(self) -> None:
        """Record a missing bucket: the last chunks', or else the smallest."""
        missing = [bucket for bucket in self._buckets if bucket not in self._recorded]
        bucket = next((bucket for bucket in missing if bucket == self._wanted), missing[0])
        inputs, batch = self._padding(bucket)
        self._keep(bucket, Recorded(inputs, self._record(lambda: self._step(batch))))

    def give_up(self) -> None:
        """Do with the graphs there are."""
        self._buckets = self.buckets

    def choose(self, chunks: tuple[Chunk, ...], num_decodes: int = 0, decode_us: float = 0.0) -> PrefillWay:
        """How these chunks run best, and whether the step's decodes go with them.

        Args:
            num_decodes: that may go with them.
            decode_us: how long they take before the chunks, but for what grows with their keys.
        """
        size = size_of(chunks)
        way = self._way(size, False, before_us=decode_us)
        if num_decodes and self._join_decodes and self._recorded:
            all_size = size_of(chunks, num_decodes)
            joined = self._way(all_size, True)
            if joined.duration_us < way.duration_us:
                size, way = all_size, joined
        if self.num_missing:
            self._wanted = prefill_bucket_for(size, self._buckets)
        return way

    def run(
        self, chunks: tuple[Chunk, ...], decodes: Decodes, bucket: PrefillBucket, pages: HostPageTable
    ) -> Tensor:
        """Decode and feed the chunks. A token for each row, int32, overwritten by the next replay: those of
        the chunks come from place `bucket.decodes` on."""
        recorded = self._recorded[bucket]
        self._stager.overwrite(recorded.inputs, pack_prefill(chunks, decodes, pages, bucket))
        return recorded.replay()

    def _way(self, size: PrefillBucket, joined: bool, before_us: float = 0.0) -> PrefillWay:
        """With a graph or without, whichever is better; before_us: what the device does before."""
        run_us = self._run_us_of(size)
        launch_us = self._joined_launch_us if joined else self._launch_us
        bucket = prefill_bucket_for(size, self.buckets)
        if bucket is not None:
            graph_us = self._run_us_of(bucket)
            if graph_us <= PADDED * max(launch_us, run_us):
                return PrefillWay(bucket, joined, before_us + graph_us)
        return PrefillWay(None, joined, max(launch_us, before_us + run_us))

    def _keep(self, bucket: PrefillBucket, recorded: Recorded) -> None:
        self._recorded[bucket] = recorded
        self._ascending = tuple(sorted(self._recorded))

    def _measure_joined(self, clock: Callable[[], float], agree: Callable[[int], int]) -> None:
        """Record the largest buckets that differ from a recorded one by room for decodes alone, and measure
        this room."""
        rooms = [
            bucket
            for bucket in self._buckets
            if bucket.decodes and bucket._replace(decodes=0) in self._recorded
        ]
        for bucket in [bucket for bucket in rooms if bucket.tokens == rooms[-1].tokens]:
            recorded, batch = self._record_prompts(bucket)
            self._keep(bucket, recorded)
            self._joined_launch_us = agree(min(self._launch(batch, clock) for _ in range(2)))
            run_us = agree(min(self._duration(recorded.replay, clock) for _ in range(2)))
            self._room_us.add(bucket.decodes, max(0, run_us - round(self._run_us.of(bucket.tokens))))

    def _record_prompts(self, bucket: PrefillBucket) -> tuple[Recorded, PrefillBatch]:
        """A recorded bucket, filled with `_prompts`, and its batch."""
        inputs, batch = self._padding(bucket)
        recorded = Recorded(inputs, self._record(lambda: self._step(batch)))
        self._stager.overwrite(inputs, self._prompts(bucket))
        self._wait()
        return recorded, batch

    def _padding(self, bucket: PrefillBucket) -> tuple[Tensor, PrefillBatch]:
        """A batch that is all padding, and the packed memory it lies in."""
        inputs, views = self._stager.buffer(pack_prefill((), NO_DECODES, self._pages, bucket))
        return inputs, PrefillBatch(*views, max_query_len=bucket.tokens, num_decodes=bucket.decodes)

    def _prompts(self, bucket: PrefillBucket) -> list[np.ndarray]:
        """The arrays of a batch without padding, to measure with: random tokens, stored in the scratch page.

        Without a slot they would be padding, which goes to no expert.
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
        # The last page may reach beyond the context, where RoPE's table ends.
        arrays[PrefillBatch._fields.index("positions")].fill(0)
        return arrays

    def _is_worth_recording(self, bucket: PrefillBucket) -> bool:
        return self._run_us_of(bucket) <= WORTH_RECORDING * self._launch_us

    def _run_us_of(self, size: PrefillBucket) -> float:
        """How long a batch of this size takes the device, but for what grows with its decodes' keys."""
        return self._run_us.of(size.tokens) + self._room_us.of(size.decodes)

    def _launch(self, batch: PrefillBatch, clock: Callable[[], float]) -> int:
        """Microseconds that the host takes to launch the step kernel by kernel."""
        begin = clock()
        self._step(batch)
        launched = clock()
        self._wait()
        return round(1e6 * (launched - begin))

    def _duration(self, replay: Callable[[], Tensor], clock: Callable[[], float]) -> int:
        """Microseconds that a graph runs."""
        begin = clock()
        replay()
        self._wait()
        return round(1e6 * (clock() - begin))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
