"""Counts requests by how long they waited, were prefilled and decoded.

Promise: fixed memory, and about a microsecond per request and part.
"""

from bisect import bisect_left

from minisgl.lives import REQUEST_BOUNDS_S, REQUEST_PARTS


class RequestTimes:
    """For each of `REQUEST_PARTS`, the requests that have ended it, by its length."""

    def __init__(self) -> None:
        self.counts = [[0] * (len(REQUEST_BOUNDS_S) + 1) for _ in REQUEST_PARTS]
        """One per bound, which it includes, then one for longer ones."""
        self.seconds = [0.0] * len(REQUEST_PARTS)
        """Sums of the lengths."""

    def queued(self, us: int) -> None:
        """A request got its first row after `us` microseconds in the engine."""
        self._add(0, us)

    def prefilled(self, us: int) -> None:
        """A request got its first token `us` microseconds after its row."""
        self._add(1, us)

    def decoded(self, us: int) -> None:
        """A request ended, however it did, `us` microseconds after its first token."""
        self._add(2, us)

    def inferred(self, us: int) -> None:
        """A request that had a row ended, however it did, `us` microseconds after it got its first."""
        self._add(3, us)

    def _add(self, part: int, us: int) -> None:
        seconds = us / 1e6
        self.counts[part][bisect_left(REQUEST_BOUNDS_S, seconds)] += 1
        self.seconds[part] += seconds
