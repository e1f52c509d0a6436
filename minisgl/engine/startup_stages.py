"""The stages of a start, each measured from the end of the one before, so that they add up."""

import time
from collections.abc import Callable, Mapping

OnStage = Callable[[str, float], None]
"""Called when a stage is over: its name and milliseconds."""


class Stages:
    """Begins with the first stage."""

    def __init__(self, on_stage: OnStage) -> None:
        self._on_stage = on_stage
        self._last = time.perf_counter()

    def done(self, name: str) -> None:
        """The stage that runs is over, and the next one begins."""
        now = time.perf_counter()
        self._on_stage(name, (now - self._last) * 1e3)
        self._last = now


def load_ms(stages: Mapping[str, float]) -> float:
    """How long the stage took that loads the weights, or makes them up."""
    return stages.get("load weights", 0.0) + stages.get("dummy weights", 0.0)
