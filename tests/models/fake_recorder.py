"""Recorded steps on a CPU."""

from collections.abc import Callable
from typing import Any

from minisgl.engine.step.steps import StepOutput


class Recorder:
    """Records by keeping the function, which runs again on what its tensors hold by then.

    As with graphs that share their memory, each replay overwrites the logits of the one before.
    """

    def __init__(self, **options: Any) -> None:
        """What only matters to graphs may be anything."""
        self._last: StepOutput | None = None

    def record(self, run: Callable[[], StepOutput], **options: Any) -> Callable[[], StepOutput]:
        run()

        def replay() -> StepOutput:
            if self._last is not None and self._last.logits is not None:
                self._last.logits.logits.fill_(float("nan"))
            self._last = run()
            return self._last

        return replay

    def release(self) -> None:
        """Nothing to free."""
