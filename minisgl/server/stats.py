"""Statistics of a server process: numbers only, so that those of several processes can be added.

Promise: the sum over all processes equals what a single process would have counted.
"""

import math
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
    """Counts of values by bucket. A bucket ends at its bound (inclusive); the last has no bound."""

    bounds: tuple[float, ...]  # ascending
    counts: list[int]  # one per bound, then one for larger values
    total: float = 0.0  # sum of all values

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as `times` observations."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: "Histogram") -> None:
        """Add the counts of `other`, which must have the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


def empty_histogram(bounds: tuple[float, ...]) -> Histogram:
    """A histogram without observations."""
    return Histogram(bounds, [0] * (len(bounds) + 1))


class ServerStats(msgspec.Struct, kw_only=True):
    """Statistics of one server process, or the sums over several."""

    num_open_requests: int = 0
    """Requests whose stream is open, including those still being tokenized."""
    num_running_requests: int = 0
    """Requests that the engine has and has not ended."""
    num_queued_tokens: int = 0
    """Prompt tokens of requests that have no output token yet."""
    num_upload_bytes: int = 0
    """Bytes of request bodies that are being read or tokenized."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ended: dict[str, int] = {}
    responses: dict[str, int] = {}
    key_requests: dict[str, int] = {}
    """Requests that ended, by "KEY finish_reason"; only if there is a file of API keys."""
    key_tokens: dict[str, int] = {}
    """Tokens by "KEY kind": prompt, cached (a part of prompt), output."""
    key_refusals: dict[str, int] = {}
    """Calls refused because of a limit, by "KEY limit"."""
    first_token_s: Histogram = msgspec.field(default_factory=lambda: empty_histogram(LATENCY_S))
    inter_token_s: Histogram = msgspec.field(default_factory=lambda: empty_histogram(INTER_TOKEN_S))
    per_token_s: Histogram = msgspec.field(default_factory=lambda: empty_histogram(INTER_TOKEN_S))
    """Of a request that ended with a reason of its own: the mean time between its tokens."""
    request_s: Histogram = msgspec.field(default_factory=lambda: empty_histogram(LATENCY_S))
    prompt_tokens: Histogram = msgspec.field(default_factory=lambda: empty_histogram(TOKENS))
    output_tokens: Histogram = msgspec.field(default_factory=lambda: empty_histogram(TOKENS))


def total(parts: Iterable[ServerStats]) -> ServerStats:
    """The sums over all processes."""
    whole = ServerStats()
    for part in parts:
        for name in ServerStats.__struct_fields__:
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
    """A clock that runs only while the server is busy.

    A rate measured by it shows the server's capacity; by wall time it would show the demand.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before = 0.0
        self._began: float | None = None  # None: idle now

    def now(self) -> float:
        """Busy seconds so far."""
        return self._before + (0.0 if self._began is None else self._clock() - self._began)

    def set_busy(self, busy: bool) -> None:
        """Let the clock run (busy) or stop it (idle)."""
        if busy and self._began is None:
            self._began = self._clock()
        elif not busy and self._began is not None:
            self._before, self._began = self.now(), None


class Rate:
    """Events per second over the last `RATE_WINDOW_S` of `clock`, or since the first event if later."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque()  # (second, number of events)

    def count(self, things: int) -> None:
        """Record that `things` events happened now."""
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            things += self._seconds.pop()[1]
        self._seconds.append((second, things))
        self._forget(second)

    def per_s(self) -> float:
        """Events per second; 0 if there were none in the window."""
        now = self._clock()
        self._forget(int(now))
        if not self._seconds:
            return 0.0
        return sum(things for _, things in self._seconds) / max(1.0, now - self._seconds[0][0])

    def seconds_for(self, things: int, most: int) -> int | None:
        """Whole seconds, 1 to `most`, that `things` events take at this rate; None if the rate is 0."""
        per_s = self.per_s()
        return min(most, max(1, math.ceil(things / per_s))) if per_s > 0 else None

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - RATE_WINDOW_S:
            self._seconds.popleft()
