"""An event loop whose clock jumps to the next timer instead of waiting, for tests of time limits."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class JumpingSelector:
    """Selects without waiting; the time that would have passed goes onto the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._real = selectors.DefaultSelector()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def select(self, timeout: float | None = None) -> Any:
        ready = self._real.select(0)
        assert ready or timeout is not None, "everything waits and there is no timer: a deadlock"
        if not ready:
            self.now += max(timeout or 0.0, 0.0)
        return ready


def run_in_virtual_time(scenario: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` with such a clock, which starts at 0."""
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)  # pyright: ignore[reportArgumentType] (it has all methods)
    loop.time = lambda: selector.now
    try:
        loop.run_until_complete(scenario)
    finally:
        loop.close()
