"""Records the remaining CUDA graphs between steps, after the server is ready, one at a time.

Promise: a request waits for one recording at a time, which takes tens of milliseconds. While requests run,
recording takes at most a twentieth of the time. A step whose bucket has no graph yet runs in the next larger
graph, or uncaptured. While steps run uncaptured, recording may take a quarter of the time. A graph is used by
all ranks or by none.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from minisgl.engine.graphs.decode_graphs import KernelCompilations

if TYPE_CHECKING:
    from minisgl.parallel.mesh import Ranks

logger = logging.getLogger(__name__)

PAUSE, URGENT_PAUSE = 19, 3
"""While requests run, the pause after a recording, as a multiple of its duration."""


class RecordableGraphs(Protocol):
    """The graphs of one kind of step, some of which are still to be recorded."""

    @property
    def num_missing(self) -> int:
        """Number of graphs still to be recorded."""
        ...

    @property
    def is_urgent(self) -> bool:
        """Whether steps run uncaptured because a graph is missing."""
        ...

    def prepare_next(self) -> None:
        """Run the part of the step before `record_next` that needs no collective with other ranks."""
        ...

    def record_next(self) -> None:
        """Record a missing graph, on padding rows, after the work queued on the device."""
        ...

    def stop_recording(self) -> None:
        """Keep the graphs from before the last `record_next`, and record no more."""
        ...


class BackgroundRecorder:
    """Decides when to record the next graph, and records it.

    Args:
        graphs: the kinds of steps, most urgent first.
        kernels: the counter of compilations. Recording leaves its count unchanged.
        strict: a failed recording raises, instead of logging a warning.
        ranks: all ranks record at the same time. If one of them can't, all stop. None = one rank only.
    """

    def __init__(
        self,
        graphs: Sequence[RecordableGraphs],
        kernels: KernelCompilations | None,
        *,
        strict: bool,
        ranks: "Ranks | None" = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._graphs = graphs
        self._ranks = ranks
        self._num_agreements = 0  # how often the ranks agreed on success; names the next agreement
        self._kernels = kernels
        self._strict = strict
        self._clock = clock
        self._last_s = (clock(), 0.0)  # end and duration of the last recording

    @property
    def num_missing(self) -> int:
        """Number of graphs still to be recorded. It grows when a step with extras needs a new graph."""
        return sum(graphs.num_missing for graphs in self._graphs)

    @property
    def is_due(self) -> bool:
        """Whether to record a graph now although requests run."""
        if not self.num_missing:
            return False
        pause = URGENT_PAUSE if any(graphs.is_urgent for graphs in self._graphs) else PAUSE
        ended_s, duration_s = self._last_s
        return self._clock() >= ended_s + pause * duration_s

    def record_all(self, *, strict: bool = False) -> None:
        """Record all missing graphs, as `record_one` does.

        Args:
            strict: a failure raises, also if the class's `strict` is False.
        """
        while self.num_missing:
            self._record_one(strict=strict or self._strict)

    def record_one(self) -> None:
        """Record the next missing graph. There must be one.

        With several ranks, all must call it after the same step.

        Raises:
            Exception: the recording failed, if `strict`.
            EngineDeadError: another rank has ended.
        """
        self._record_one(strict=self._strict)

    @torch.inference_mode()
    def _record_one(self, *, strict: bool) -> None:
        begin_s = self._clock()
        graphs = next(graphs for graphs in self._graphs if graphs.num_missing)
        before = self._kernels.count if self._kernels is not None else 0
        try:
            # In two parts, because a recording with collectives waits until all ranks record it.
            if not all(
                self._try_on_all_ranks(part, strict) for part in (graphs.prepare_next, graphs.record_next)
            ):
                graphs.stop_recording()
        finally:
            if self._kernels is not None:
                self._kernels.count = before
        end_s = self._clock()
        self._last_s = (end_s, end_s - begin_s)
        if not self.num_missing:
            logger.info("all graphs are recorded")

    def _try_on_all_ranks(self, part: Callable[[], None], strict: bool) -> bool:
        """Call `part`, and return whether it succeeded on all ranks."""
        fine = True
        try:
            part()
        except Exception:
            if strict:
                raise
            fine = False
            logger.warning(
                "a graph can't be recorded; such steps run in larger graphs or uncaptured from now on, which "
                "is slower. It said:",
                exc_info=True,
            )
        if self._ranks is None or strict:
            return fine
        self._num_agreements += 1
        all_ranks_succeeded = self._ranks.all_ranks_succeeded(
            f"record a graph ({self._num_agreements})", fine
        )
        if fine and not all_ranks_succeeded:
            logger.warning(
                "another rank can't record a graph, so none uses it; such steps run in larger graphs or "
                "uncaptured from now on, which is slower"
            )
        return all_ranks_succeeded
