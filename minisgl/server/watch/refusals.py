"""The calls that were refused lately (429, 503), by the error's code, in fixed memory.

Promise: refusals with the same code that follow each other within a second are one moment.
"""

import time
from collections import deque
from collections.abc import Callable

from minisgl.lives import MAX_MOMENTS, Moment

JOIN_S = 1.0
NUMBERS_PER_SERVER = 1 << 32


class Refusals:
    """A ring of moments with refused calls.

    Args:
        rank: of this server process; moments of different processes have different numbers.
        clock: Unix time in seconds.
    """

    def __init__(self, rank: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._ring: deque[Moment] = deque(maxlen=MAX_MOMENTS)
        self._number = rank * NUMBERS_PER_SERVER

    def add(self, code: str) -> None:
        """Count a refused call. Its cost does not depend on how many there were."""
        now = round(self._clock(), 3)
        last = self._ring[-1] if self._ring else None
        if last is not None and last.reason == code and now <= last.until + JOIN_S:
            number, at, count = last.number, last.at, last.count + 1
            self._ring.pop()
        else:
            self._number += 1
            number, at, count = self._number, now, 1
        self._ring.append(
            Moment(
                number=number,
                kind="refused",
                reason=code,
                at=at,
                until=now,
                count=count,
                worst_ms=0.0,
                usual_ms=0.0,
                figures={},
            )
        )

    def told(self) -> list[Moment]:
        """The moments, the oldest first."""
        return list(self._ring)
