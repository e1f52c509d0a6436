"""Graphs that a start leaves out, recorded one at a time between steps while those there are serve.

Promise: a request waits for one recording at a time, which takes tens of milliseconds, and while requests run
recording takes no more than a twentieth of the time. Whoever needs a graph that is missing gets a larger one,
or runs uncaptured, which soon costs as much as recording does: then recording may take a quarter of the time.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from minisgl.engine.compiled import KernelCompilations

logger = logging.getLogger(__name__)

PAUSE, URGENT_PAUSE = 19, 3
"""After a recording none is due for so many times as long, while requests run."""


class LateGraphs(Protocol):
    """The graphs of one kind of step."""

    @property
    def num_missing(self) -> int:
        """How many are to be recorded."""
        ...

    @property
    def is_urgent(self) -> bool:
        """Whether steps run uncaptured for want of one that is missing."""
        ...

    def record_next(self) -> None:
        """Record one that is missing; on padding only, and behind what is queued on the device."""
        ...

    def give_up(self) -> None:
        """Go on with those there are: none is missing any more."""
        ...


class LateRecording:
    """Decides when the next graph is recorded.

    Args:
        graphs: the kinds of steps, the most urgent first.
        kernels: is not to count what recording compiles.
        strict: what can't be recorded is an error, and not only a warning.
    """

    def __init__(
        self,
        graphs: Sequence[LateGraphs],
        kernels: KernelCompilations | None,
        *,
        strict: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._graphs = graphs
        self._kernels = kernels
        self._strict = strict
        self._clock = clock
        self._last_s = (clock(), 0.0)  # end and duration of the last recording

    @property
    def num_missing(self) -> int:
        """Graphs to be recorded; grows when a step needs one that nobody foresaw."""
        return sum(graphs.num_missing for graphs in self._graphs)

    @property
    def is_due(self) -> bool:
        """Whether one should be recorded now though requests run."""
        if not self.num_missing:
            return False
        pause = URGENT_PAUSE if any(graphs.is_urgent for graphs in self._graphs) else PAUSE
        ended_s, duration_s = self._last_s
        return self._clock() >= ended_s + pause * duration_s

    def record_all(self) -> None:
        """Record all that are missing; as `record_one`."""
        while self.num_missing:
            self.record_one()

    @torch.inference_mode()
    def record_one(self) -> None:
        """Record the next graph; there has to be one.

        Raises:
            Exception: what went wrong, if `strict`.
        """
        begin_s = self._clock()
        graphs = next(graphs for graphs in self._graphs if graphs.num_missing)
        before = self._kernels.count if self._kernels is not None else 0
        try:
            graphs.record_next()
        except Exception:
            if self._strict:
                raise
            graphs.give_up()
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
