"""Runs templating and tokenizing: short input on the event loop, longer input in a few threads.

Promise: no input blocks the event loop for more than about a millisecond. Short input never waits for long
input, which has its own thread.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 4096
"""Input up to this size is processed on the event loop: it takes under a millisecond, less than a thread."""
LONG_BYTES = 256 * 1024
"""Larger input goes to the thread for long input. Tokenizing this much takes about 0.1 s."""
NUM_SHORT = 2
"""Threads for shorter input."""
NUM_LONG = 1
"""Threads for long input. Only one, because tokenizing takes about 45 bytes of memory per byte of text."""

GIL_S = 0.001
"""After this time a thread that runs Python lets the event loop run. Python's own 5 ms would delay every turn
of the loop by that much while a thread works."""


class TextThreads:
    """The threads. `close` ends them without waiting."""

    def __init__(self) -> None:
        sys.setswitchinterval(GIL_S)
        self._short = ThreadPoolExecutor(NUM_SHORT, "text")
        self._long = ThreadPoolExecutor(NUM_LONG, "long-text")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Run `work`, on input of `num_bytes` bytes, on the event loop or in a thread; returns its result."""
        if num_bytes <= INLINE_BYTES:
            return work()
        if num_bytes > LONG_BYTES:
            return await self.run_in_long_thread(work)
        return await asyncio.get_running_loop().run_in_executor(self._short, work)

    async def run_in_long_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread for long input; returns its result."""
        return await asyncio.get_running_loop().run_in_executor(self._long, work)

    def close(self) -> None:
        """Drop work that has not begun; do not wait for the rest."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
