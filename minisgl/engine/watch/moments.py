"""The last moments when something was slow, in fixed memory.

Promise: moments of the same kind and reason that follow each other closely are one, so a long trouble does
not push the others out.
"""

from collections import deque
from typing import Literal

from minisgl.lives import MAX_MOMENTS, Moment

JOIN_US = 1_000_000
"""Moments that are closer than this are told as one."""


class OpenMoment:
    """A moment that may still grow. Times are microseconds of the engine's clock."""

    __slots__ = ("at_us", "count", "figures", "kind", "number", "reason", "until_us", "usual_ms", "worst_ms")

    def __init__(
        self, number: int, kind: Literal["step", "first_token"], reason: str, at_us: int, until_us: int
    ) -> None:
        self.number = number
        self.kind: Literal["step", "first_token"] = kind
        self.reason = reason
        self.at_us = at_us
        self.until_us = until_us
        self.count = 0
        self.worst_ms = 0.0
        self.usual_ms = 0.0
        self.figures: dict[str, float] = {}


class Moments:
    """A ring of moments."""

    def __init__(self, capacity: int = MAX_MOMENTS) -> None:
        self._ring: deque[OpenMoment] = deque(maxlen=capacity)
        self.num = 0
        """Moments so far."""

    def add(
        self,
        kind: Literal["step", "first_token"],
        reason: str,
        until_us: int,
        ms: float,
        usual_ms: float,
        figures: dict[str, float],
    ) -> None:
        """Note that something took `ms` until `until_us`, where it usually takes `usual_ms`."""
        at_us = until_us - int(ms * 1e3)
        for known in reversed(self._ring):
            if known.kind == kind and known.reason == reason and known.until_us + JOIN_US >= at_us:
                moment = known
                break
        else:
            self.num += 1
            moment = OpenMoment(self.num, kind, reason, at_us, until_us)
            self._ring.append(moment)
        moment.count += 1
        moment.until_us = max(moment.until_us, until_us)
        if ms > moment.worst_ms:
            moment.worst_ms, moment.usual_ms, moment.figures = ms, usual_ms, figures

    def told(self, unix_offset_s: float) -> list[Moment]:
        """All moments, the oldest first. `unix_offset_s` is added to times to make them Unix times."""
        return [
            Moment(
                number=one.number,
                kind=one.kind,
                reason=one.reason,
                at=round(one.at_us / 1e6 + unix_offset_s, 3),
                until=round(one.until_us / 1e6 + unix_offset_s, 3),
                count=one.count,
                worst_ms=round(one.worst_ms, 3),
                usual_ms=round(one.usual_ms, 3),
                figures=one.figures,
            )
            for one in self._ring
        ]
