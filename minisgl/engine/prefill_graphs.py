"""Prefill as CUDA graphs: one for each bucket of prompt tokens and rows, replayed on padded batches.

Launching a prefill kernel by kernel takes the host longer than a small one takes the GPU. Nothing in it
depends on what the host knows of the batch: the attention kernels find a token's row in `row_start` on the
device and have a grid that suits every batch of so many tokens and rows, so one recording serves them all.

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
from minisgl.engine.inputs import HostPageTable, PrefillBatch, Stager, pack_prefill
from minisgl.scheduler.plan import Chunk


class Recorded(NamedTuple):
    """One bucket's graph."""

    inputs: Tensor  # int32, packed: what the graph's batch consists of
    replay: Callable[[], Tensor]  # -> the rows' tokens, overwritten by the next replay


class PrefillGraphs:
    """Recorded prefill steps.

    Args:
        step: a prefill step on the device, as `steps.prefill_step` without model and rows.
        record: how it is recorded.
        buckets: ascending; those that are not worth it are left out by `warm_up`.
        pages: only asked for the row that belongs to nobody.
    """

    def __init__(
        self,
        step: Callable[[PrefillBatch], Tensor],
        record: Record,
        buckets: tuple[PrefillBucket, ...],
        pages: HostPageTable,
        stager: Stager,
        device: torch.device,
    ) -> None:
        self._step = step
        self._record = record
        self._buckets = buckets
        self._pages = pages
        self._stager = stager
        self._device = device
        self._recorded: dict[PrefillBucket, Recorded] = {}
        self._wanted: PrefillBucket | None = None  # of the chunks before

    def warm_up(
        self,
        first: Iterable[PrefillBucket],
        clock: Callable[[], float] = time.perf_counter,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Record these buckets, smallest first, as long as launching takes the host longer than they run.

        The GPU is kept busy by larger ones however they are launched, and computing their padding would
        cost time. Of the other buckets those are left to be recorded that this is true of as well, going by
        the line between the measured ones on both sides. Only padding runs here.

        Args:
            agree: whether all ranks find that a bucket is worth it: they must record the same ones.
        """
        durations_s: dict[int, float] = {}  # by tokens
        launch_s = 0.0
        for bucket in sorted(first):
            inputs, batch = self._padding(bucket)
            replay = self._record(lambda batch=batch: self._step(batch))
            self._wait()
            if not durations_s:  # the same for all
                begin = clock()
                self._step(batch)
                launch_s = clock() - begin
                self._wait()
            durations_s[bucket.tokens] = min(self._duration_s(replay, clock) for _ in range(2))
            if not agree(durations_s[bucket.tokens] <= launch_s):
                break
            self._recorded[bucket] = Recorded(inputs, replay)
        sizes, measured_s = list(durations_s), list(durations_s.values())

        def is_worth_it(bucket: PrefillBucket) -> bool:
            return float(np.interp(bucket.tokens, sizes, measured_s)) <= launch_s

        between = [
            bucket for bucket in self._buckets if bucket.tokens < sizes[-1] and bucket not in self._recorded
        ]
        left = [bucket for bucket in between if agree(is_worth_it(bucket))]
        self._buckets = tuple(sorted([*self._recorded, *left]))

    @property
    def buckets(self) -> tuple[PrefillBucket, ...]:
        """Those that are recorded, ascending."""
        return tuple(sorted(self._recorded))

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
        self._recorded[bucket] = Recorded(inputs, self._record(lambda: self._step(batch)))

    def give_up(self) -> None:
        """Do with the graphs there are."""
        self._buckets = self.buckets

    def bucket_for(self, chunks: tuple[Chunk, ...]) -> PrefillBucket | None:
        """The bucket to run these chunks in; None = they are better run uncaptured."""
        num_tokens = sum(chunk.num_new_tokens for chunk in chunks)
        if self.num_missing:
            self._wanted = prefill_bucket_for(num_tokens, len(chunks), self._buckets)
        return prefill_bucket_for(num_tokens, len(chunks), self.buckets)

    def run(self, chunks: tuple[Chunk, ...], bucket: PrefillBucket, pages: HostPageTable) -> Tensor:
        """Feed the chunks; a token for each, int32 [at least len(chunks)], overwritten by the next replay."""
        recorded = self._recorded[bucket]
        self._stager.overwrite(recorded.inputs, pack_prefill(chunks, pages, *bucket))
        return recorded.replay()

    def _padding(self, bucket: PrefillBucket) -> tuple[Tensor, PrefillBatch]:
        """A batch that is all padding, and the packed memory it lies in."""
        inputs, views = self._stager.buffer(pack_prefill((), self._pages, *bucket))
        return inputs, PrefillBatch(*views, max_query_len=bucket.tokens)

    def _duration_s(self, replay: Callable[[], Tensor], clock: Callable[[], float]) -> float:
        begin = clock()
        replay()
        self._wait()
        return clock() - begin

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
