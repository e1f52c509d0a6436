"""Measures whether the load client itself was the bottleneck.

Promise: the measurement costs less than a thousandth of a core.
"""

import asyncio
import contextlib
import time
from types import TracebackType

import numpy as np

TICK_S = 0.05
WINDOW_S = 1.0
FULL_CORE = 0.9
"""CPU time over wall time. The client has one thread, so near 1 it can't read answers as they arrive."""
LATE_MS = 20.0
"""Delay of the event loop that 1 of 100 ticks exceeds. The delay adds to every measured latency."""


class ClientWatch:
    """Watches this process while the `async with` block lasts."""

    def __init__(self) -> None:
        self._lags_ms: list[float] = []
        self._shares: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ClientWatch":
        self._started = (time.monotonic(), time.process_time())
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.wall_s = time.monotonic() - self._started[0]
        cpu_s = time.process_time() - self._started[1]
        self.cpu_share = cpu_s / self.wall_s if self.wall_s > 0 else 0.0
        self.peak_cpu_share = max(self._shares, default=self.cpu_share)
        self.loop_lag_p99_ms = float(np.percentile(self._lags_ms, 99)) if self._lags_ms else 0.0

    @property
    def warning(self) -> str | None:
        """A message for the user where the client's own delays are part of the figures, else None."""
        if self.peak_cpu_share >= FULL_CORE:
            return (
                f"this client was saturated (up to {self.peak_cpu_share:.0%} of a core): the latencies "
                "include its own delays; lower the rate, or send from several clients"
            )
        if self.loop_lag_p99_ms >= LATE_MS:
            return (
                f"this client was late (p99 {self.loop_lag_p99_ms:.0f} ms behind its clock): the latencies "
                "include that; leave it a core of its own"
            )
        return None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        window_wall, window_cpu = self._started
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags_ms.append(1000 * max(0.0, loop.time() - due))
            wall = time.monotonic()
            if wall - window_wall >= WINDOW_S:
                cpu = time.process_time()
                self._shares.append((cpu - window_cpu) / (wall - window_wall))
                window_wall, window_cpu = wall, cpu
