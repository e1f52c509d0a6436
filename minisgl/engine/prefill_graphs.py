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

PADDING_SHARE = 1 / 8
"""Padding of a prefill that keeps the GPU busy for longer than the host: more than this is not computed."""


class Recorded(NamedTuple):
    """One bucket's graph."""

    inputs: Tensor  # int32, packed: what the graph's batch consists of
    replay: Callable[[], Tensor]  # -> the rows' tokens, overwritten by the next replay
    fewest_tokens: int  # a smaller batch is faster uncaptured


class PrefillGraphs:
    """Recorded prefill steps.

    Args:
        step: a prefill step on the device, as `steps.prefill_step` without model and rows.
        record: how it is recorded.
        buckets: ascending.
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

    def warm_up(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Record every bucket, largest first, with padding only; measure when it pays."""
        recorded: dict[PrefillBucket, tuple[Tensor, Callable[[], Tensor], float]] = {}
        launch_s = 0.0
        for bucket in reversed(self.buckets):
            inputs, views = self._stager.buffer(pack_prefill((), self._pages, *bucket))
            batch = PrefillBatch(*views, max_query_len=bucket.tokens)
            replay = self._record(lambda batch=batch: self._step(batch))
            self._wait()
            begin = clock()
            replay()
            self._wait()
            recorded[bucket] = (inputs, replay, clock() - begin)
            if bucket == self.buckets[0]:  # the host's time is the same for all
                begin = clock()
                self._step(batch)
                launch_s = clock() - begin
        for bucket, (inputs, replay, replay_s) in recorded.items():
            fewest = fewest_tokens(bucket.tokens, launch_s, replay_s)
            self._recorded[bucket] = Recorded(inputs, replay, fewest)

    def bucket_for(self, chunks: tuple[Chunk, ...]) -> PrefillBucket | None:
        """The bucket to run these chunks in; None = they are better run uncaptured."""
        num_tokens = sum(chunk.num_new_tokens for chunk in chunks)
        bucket = prefill_bucket_for(num_tokens, len(chunks), self.buckets)
        if bucket is None or num_tokens < self._recorded[bucket].fewest_tokens:
            return None
        return bucket

    def run(self, chunks: tuple[Chunk, ...], bucket: PrefillBucket, pages: HostPageTable) -> Tensor:
        """Feed the chunks; a token for each, int32 [at least len(chunks)], overwritten by the next replay."""
        recorded = self._recorded[bucket]
        self._stager.overwrite(recorded.inputs, pack_prefill(chunks, pages, *bucket))
        return recorded.replay()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def fewest_tokens(bucket_tokens: int, launch_s: float, replay_s: float) -> int:
    """From how many tokens on a bucket's graph is worth its padding.

    Uncaptured, n tokens take about the longer of `launch_s`, the host's time, and their share of `replay_s`,
    the GPU's for a full bucket. The graph may take a little longer than that, because it keeps the host free.
    """
    if launch_s >= (1 - PADDING_SHARE) * replay_s:
        return 1
    return int(bucket_tokens * (1 - PADDING_SHARE))
