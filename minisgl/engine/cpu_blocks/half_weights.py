"""Halves a CPU model's float32 weights while it serves: `PlainWeight.halve`, one weight after the other."""

import logging
import os
import threading

from torch import nn

from minisgl.engine.start.device import release_freed_memory
from minisgl.models.checkpoint import plain_weights
from triton_kernels.packed_weights import HalfWeight, can_halve

logger = logging.getLogger(__name__)

STEPS_BEFORE_HALVING = 64
"""Decode steps after which it begins, so that short runs and the first answer do not share the processor."""
BYTES_TO_RELEASE = 1 << 28
"""After so many freed bytes, memory is given back to the system. Meanwhile, for up to 0.1 s, no other thread
gets any, so it is rare."""
NICENESS = 10
"""A tenth of the processor where others want all of it. With less, the end of an engine would wait long."""


class WeightHalver:
    """Promise: it gives way to others, and steps may run at any time.

    A step may read some weights as they were and others as they are then; all rows of it read the same.
    """

    def __init__(self, model: nn.Module, steps_before: int = STEPS_BEFORE_HALVING) -> None:
        self._weights = [
            (weight, shared) for weight, shared in plain_weights(model) if can_halve(weight.values)
        ]
        self._steps_left = steps_before
        self._is_stopped = threading.Event()
        # No daemon: a process that ends while a thread is in torch aborts.
        self._thread = threading.Thread(target=self._run, name="halve-weights")

    @property
    def has_work(self) -> bool:
        """Whether there are weights that may be halved."""
        return bool(self._weights)

    def before_step(self) -> None:
        """Called before each decode step."""
        self._steps_left -= 1
        if self._steps_left == 0 and self.has_work:
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads
                _warn(error)

    def wait(self) -> None:
        """Return when all weights have been tried, if it has begun."""
        if self._thread.ident is not None:
            self._thread.join()

    def stop(self) -> None:
        """Leave the weights that have not been halved as they are. `wait` for the one in work."""
        self._is_stopped.set()

    def _goes_on(self) -> bool:
        # The main thread has ended where a process ends without closing its engine.
        return not self._is_stopped.is_set() and threading.main_thread().is_alive()

    def _run(self) -> None:
        bytes_freed = 0
        try:
            # Of this thread alone; only root may lower a niceness.
            os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), NICENESS))
            for weight, is_shared in self._weights:
                if not self._goes_on():
                    return
                weight.halve(self._goes_on, is_shared=is_shared)
                if isinstance(weight.values, HalfWeight) and not is_shared:
                    bytes_freed += weight.values.nbytes
                if bytes_freed >= BYTES_TO_RELEASE:
                    release_freed_memory()
                    bytes_freed = 0
        except (RuntimeError, OSError) as error:  # out of memory
            _warn(error)
            return
        halved = sum(isinstance(weight.values, HalfWeight) for weight, _ in self._weights)
        if halved:
            release_freed_memory()
        logger.info("%d of %d weights are read as float16 from now on", halved, len(self._weights))


def _warn(error: object) -> None:
    logger.warning("weights stay as they are: %s", error)
