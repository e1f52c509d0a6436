"""Times the stages of a start. Each stage begins where the one before ends, so the times add up."""

import time
from collections.abc import Callable, Mapping

OnStage = Callable[[str, float], None]
"""Called at the end of each stage with its name and its milliseconds."""


class StartupStages:
    """Starts timing the first stage when it is constructed."""

    def __init__(self, on_stage: OnStage) -> None:
        self._on_stage = on_stage
        self._last = time.perf_counter()

    def finish(self, name: str) -> None:
        """End the current stage under this name, report it, and begin the next stage."""
        now = time.perf_counter()
        self._on_stage(name, (now - self._last) * 1e3)
        self._last = now


def load_ms(stages: Mapping[str, float]) -> float:
    """Milliseconds of the stage that loaded the weights or made dummy weights."""
    return stages.get("load weights", 0.0) + stages.get("dummy weights", 0.0)
