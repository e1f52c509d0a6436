"""Where templating and tokenizing happen: on the event loop while they are short, else in a few threads.

Promise: text of any length keeps the event loop for about a millisecond at most.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 4096
"""Bodies up to this size are handled on the event loop: under a millisecond, less than a thread costs."""
NUM_THREADS = 2


class TextThreads:
    """The threads. `close` lets go of them without waiting."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(NUM_THREADS, "text")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Do `work` on input of this size."""
        return work() if num_bytes <= INLINE_BYTES else await self.run_aside(work)

    async def run_aside(self, work: Callable[[], T]) -> T:
        """Do `work` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """What has not begun is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
