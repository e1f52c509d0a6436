"""Records the remaining CUDA graphs between steps, after the server is ready, one at a time.

Promise: a request waits for one recording at a time, which takes tens of milliseconds. While requests run,
recording takes at most a twentieth of the time. A step whose bucket has no graph yet runs in the next larger
graph, or uncaptured. With several ranks nothing is left to be recorded: the start has recorded all graphs.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minisgl.engine.device_faults import device_fault_of
from minisgl.engine.graphs.decode_graphs import KernelCompilations
from minisgl.engine.graphs.graph_table import GraphTable

logger = logging.getLogger(__name__)

PAUSE = 19
"""While requests run, the pause after a recording, as a multiple of its duration."""


class BackgroundRecorder:
    """Decides when to record the next graph, and records it.

    Args:
        tables: the graphs of each kind of step; those of the first are recorded first.
        kernels: the counter of compilations. Recording leaves its count unchanged.
        strict: a failed recording raises, instead of logging a warning.
    """

    def __init__(
        self,
        tables: Sequence[GraphTable[Any, Any]],
        kernels: KernelCompilations | None,
        *,
        strict: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tables = tables
        self._kernels = kernels
        self._strict = strict
        self._clock = clock
        self._last_s = (clock(), 0.0)  # end and duration of the last recording

    @property
    def num_missing(self) -> int:
        """Number of graphs still to be recorded."""
        return sum(table.num_missing for table in self._tables)

    @property
    def is_due(self) -> bool:
        """Whether to record a graph now although requests run."""
        ended_s, duration_s = self._last_s
        return bool(self.num_missing) and self._clock() >= ended_s + PAUSE * duration_s

    def record_all(self, *, strict: bool = False) -> None:
        """Record all missing graphs, as `record_one` does.

        Args:
            strict: a failure raises, also if the class's `strict` is False.
        """
        while self.num_missing:
            self._record_one(strict=strict or self._strict)

    def record_one(self) -> None:
        """Record the next missing graph. There must be one.

        Raises:
            Exception: the recording failed, if `strict`, or because of a GPU fault.
        """
        self._record_one(strict=self._strict)

    @torch.inference_mode()
    def _record_one(self, *, strict: bool) -> None:
        begin_s = self._clock()
        table = next(table for table in self._tables if table.num_missing)
        before = self._kernels.count if self._kernels is not None else 0
        try:
            table.record_next()
        except Exception as error:
            if strict or device_fault_of(error) is not None:
                raise
            table.give_up()
            logger.warning(
                "a graph can't be recorded; such steps run in larger graphs or uncaptured from now on, which "
                "is slower. It said:",
                exc_info=True,
            )
        finally:
            if self._kernels is not None:
                self._kernels.count = before
        end_s = self._clock()
        self._last_s = (end_s, end_s - begin_s)
        if not self.num_missing:
            logger.info("all graphs are recorded")
