"""Limits on a user's calls and tokens a minute, in the manner and with the headers of OpenAI.

Promise: limits hold at every moment, not by the calendar's minute: a bucket of a minute's worth refills at a
constant rate, so a user that paused for a minute may use a minute's worth at once.
"""

import math
from collections.abc import Callable
from typing import Literal

from minisgl.errors import RequestError

Kind = Literal["requests", "tokens"]


class LimitReachedError(RequestError):
    """A 429 that a limit on the caller's key causes.

    Args:
        limit: the limit's name in metrics.
        kind: what OpenAI calls the error's `type`.
    """

    def __init__(self, limit: str, kind: Kind, message: str, retry_after_s: float | None = None) -> None:
        whole_s = None if retry_after_s is None else max(1, math.ceil(retry_after_s))
        super().__init__(429, "rate_limit_exceeded", message, retry_after_s=whole_s)
        self.limit = limit
        self.kind = kind


class Bucket:
    """An amount that refills at `per_minute` a minute, up to `per_minute`.

    Args:
        clock: gives seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        """What is left now; below 0 if more was taken than there was."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def take(self, amount: int) -> None:
        """Take an amount (below 0: give it back), even if there is less."""
        self._level = self.level - amount

    def seconds_until(self, amount: float) -> float:
        """After how many seconds the level will be `amount`; 0 if it is."""
        return max(0.0, (amount - self.level) * 60 / self.per_minute)

    def resize(self, per_minute: int) -> None:
        """Change the limit. What was taken stays taken."""
        level = self.level
        self._level = level + per_minute - self.per_minute
        self.per_minute = per_minute

    def headers(self, kind: Kind) -> dict[str, str]:
        """OpenAI's headers: the limit, what remains, and how long until all of it is back."""
        level = self.level
        return {
            f"x-ratelimit-limit-{kind}": str(self.per_minute),
            f"x-ratelimit-remaining-{kind}": str(max(0, math.floor(level))),
            f"x-ratelimit-reset-{kind}": duration(self.seconds_until(self.per_minute)),
        }


HEADER_NAMES = tuple(
    f"x-ratelimit-{part}-{kind}"
    for kind in ("requests", "tokens")
    for part in ("limit", "remaining", "reset")
)


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: "6m0s", "12s", "250ms"; rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
