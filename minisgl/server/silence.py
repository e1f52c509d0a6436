"""A watchdog: calls a function when nothing has happened for a given time.

Promise: an event costs no timer call; its sender only records the time.
"""

import asyncio
from collections.abc import Callable


class SilenceLimit:
    """Calls `act` once, when `heard_at()` is `limit_s` seconds ago. Create and cancel it in one event loop.

    Args:
        heard_at: time of the last event, by the event loop's clock.
    """

    def __init__(self, limit_s: float, heard_at: Callable[[], float], act: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._calls: tuple[Callable[[], float], Callable[[], None]] | None = (heard_at, act)
        self._timer = self._loop.call_at(heard_at() + limit_s, self._check)

    def cancel(self) -> None:
        """Stop the timer; `act` is not called any more."""
        self._timer.cancel()
        self._calls = None  # they may hold a reference to the owner of this object

    def _check(self) -> None:
        assert self._calls is not None, "a cancelled timer ran"
        heard_at, act = self._calls
        due = heard_at() + self._limit_s
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._check)
        else:
            act()
