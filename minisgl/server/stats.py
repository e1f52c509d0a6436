"""What one server process has counted: numbers only, so that those of several processes can be added.

Promise: adding the figures of all processes gives what one process would have counted.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

LATENCY_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
)  # fmt: skip
INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
RATE_WINDOW_S = 30


class Histogram(msgspec.Struct):
    """Counts of values up to each bound (inclusive), and of those beyond the last."""

    bounds: tuple[float, ...]  # ascending
    counts: list[int]  # one more than bounds
    total: float = 0.0  # sum of all values

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: "Histogram") -> None:
        """Take in another one's counts; the bounds are the same."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


def histogram(bounds: tuple[float, ...]) -> Histogram:
    """An empty one."""
    return Histogram(bounds, [0] * (len(bounds) + 1))


class FrontStats(msgspec.Struct, kw_only=True):
    """Figures of one server process, or the sums of several."""

    num_open_requests: int = 0
    """Requests whose reader has not left, those still being tokenized included."""
    num_running_requests: int = 0
    """Requests the engine has and has not ended: the entries of the table of open requests."""
    num_queued_tokens: int = 0
    """Prompt tokens of requests that have no token yet."""
    num_upload_bytes: int = 0
    """Request bodies that are being read or tokenized."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ended: dict[str, int] = {}
    responses: dict[str, int] = {}
    first_token_s: Histogram = msgspec.field(default_factory=lambda: histogram(LATENCY_S))
    inter_token_s: Histogram = msgspec.field(default_factory=lambda: histogram(INTER_TOKEN_S))
    request_s: Histogram = msgspec.field(default_factory=lambda: histogram(LATENCY_S))
    prompt_tokens: Histogram = msgspec.field(default_factory=lambda: histogram(TOKENS))
    output_tokens: Histogram = msgspec.field(default_factory=lambda: histogram(TOKENS))


def total(parts: Iterable[FrontStats]) -> FrontStats:
    """The sums over all processes."""
    whole = FrontStats()
    for part in parts:
        for name in FrontStats.__struct_fields__:
            mine, theirs = getattr(whole, name), getattr(part, name)
            if isinstance(mine, Histogram):
                mine.add(theirs)
            elif isinstance(mine, dict):
                for key, count in theirs.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(whole, name, mine + theirs)
    return whole


class BusyClock:
    """Seconds in which there was something to do, all together: what happened in them shows what a server
    can do, where an idle one's throughput only shows what it was asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = 0.0
        self._began: float | None = None  # None: nothing to do now

    def now(self) -> float:
        """The clock's time."""
        return self._before + (0.0 if self._began is None else self._clock() - self._began)

    def run(self, busy: bool) -> None:
        """From now on the clock runs, or stands still."""
        if busy and self._began is None:
            self._began = self._clock()
        elif not busy and self._began is not None:
            self._before, self._began = self.now(), None


class Rate:
    """How many things per second happened lately: over `RATE_WINDOW_S` of `clock`, or since the first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque()  # (second, things)

    def count(self, things: int) -> None:
        """So many have just happened."""
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            things += self._seconds.pop()[1]
        self._seconds.append((second, things))
        self._forget(second)

    def per_s(self) -> float:
        """0 when nothing happened in the window."""
        now = self._clock()
        self._forget(int(now))
        if not self._seconds:
            return 0.0
        return sum(things for _, things in self._seconds) / max(1.0, now - self._seconds[0][0])

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - RATE_WINDOW_S:
            self._seconds.popleft()
