"""Prefill as CUDA graphs: one for each bucket of prompt tokens and rows, replayed on padded batches.

Launching a prefill kernel by kernel takes the host longer than a small one takes the GPU. Nothing in it
depends on what the host knows of the batch: the attention kernels find a token's row in `row_start` on the
device and have a grid that suits every batch of so many tokens and rows, so one recording serves them all.

Promise: a padded batch gives each row what it gets unpadded, up to the rounding of other matrix products;
padding writes nowhere. A step without a fitting bucket is not ours and runs uncaptured.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.engine.buckets import PrefillBucket, prefill_bucket_for
from minisgl.engine.inputs import HostPageTable, PrefillBatch, Stager, pack_prefill
from minisgl.scheduler.plan import Chunk

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Runs a function and records it; what comes back runs it again on what its tensors hold by then."""


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
        self.buckets = buckets
        self._pages = pages
        self._stager = stager
        self._device = device
        self._recorded: dict[PrefillBucket, Recorded] = {}

    def warm_up(
        self, clock: Callable[[], float] = time.perf_counter, agree: Callable[[bool], bool] = bool
    ) -> None:
        """Record the buckets, smallest first, as long as launching takes the host longer than they run.

        The GPU is kept busy by larger ones however they are launched, and computing their padding would
        cost time. Only padding runs here.

        Args:
            agree: whether all ranks find that a bucket is worth it: they must record the same ones.
        """
        launch_s = None
        for bucket in self.buckets:
            inputs, views = self._stager.buffer(pack_prefill((), self._pages, *bucket))
            batch = PrefillBatch(*views, max_query_len=bucket.tokens)
            replay = self._record(lambda batch=batch: self._step(batch))
            self._wait()
            if launch_s is None:  # the same for all
                begin = clock()
                self._step(batch)
                launch_s = clock() - begin
                self._wait()
            if not agree(min(self._duration_s(replay, clock) for _ in range(2)) <= launch_s):
                break
            self._recorded[bucket] = Recorded(inputs, replay)
        self.buckets = tuple(self._recorded)

    def bucket_for(self, chunks: tuple[Chunk, ...]) -> PrefillBucket | None:
        """The bucket to run these chunks in; None = they are better run uncaptured."""
        num_tokens = sum(chunk.num_new_tokens for chunk in chunks)
        return prefill_bucket_for(num_tokens, len(chunks), self.buckets)

    def run(self, chunks: tuple[Chunk, ...], bucket: PrefillBucket, pages: HostPageTable) -> Tensor:
        """Feed the chunks; a token for each, int32 [at least len(chunks)], overwritten by the next replay."""
        recorded = self._recorded[bucket]
        self._stager.overwrite(recorded.inputs, pack_prefill(chunks, pages, *bucket))
        return recorded.replay()

    def _duration_s(self, replay: Callable[[], Tensor], clock: Callable[[], float]) -> float:
        begin = clock()
        replay()
        self._wait()
        return clock() - begin

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
