"""Adds up how long the queue was held by each reason, so that a request's wait is a difference of two marks.

Promise: at any time exactly one reason counts, so the parts of a wait add up to it exactly. A mark costs the
same whatever the number of requests that wait. Times are whole microseconds.
"""

import msgspec

from minisgl.lives import Wait, WaitReason
from minisgl.scheduler.journal import Held
from minisgl.scheduler.queue.policy import MAX_PRIORITY

Sums = dict[WaitReason, int]
"""Microseconds by reason."""
Figures = dict[WaitReason, dict[str, int]]
_NONE: Sums = {}


class Mark(msgspec.Struct, frozen=True):
    """The state of the clock at some time, as far as a request of some priority needs it. Never changed."""

    all: Sums
    behind_higher: Sums
    """The part during which the first request of the queue had a higher priority."""
    figures: Figures
    """What explained each reason, when it was last given."""


class QueueClock:
    """The reason that holds the queue now, and for how long each has held it."""

    def __init__(self) -> None:
        self._now_us = 0
        self._reason: WaitReason = "step"
        self._level: int | None = None  # priority of the queue's first request; None = the queue is empty
        self._sums: Sums = {}
        self._by_level: dict[int, Sums] = {}  # at most 2 * MAX_PRIORITY + 1
        self._levels: list[int] = []  # the same, the one that held the queue last comes first
        self._figures: Figures = {}
        self._last: tuple[int, int, Mark] | None = None  # time, priority, mark: many come together

    def advance(self, now_us: int) -> None:
        """Count the time until now for the present reason."""
        passed_us = now_us - self._now_us
        if passed_us <= 0:
            return
        self._now_us = now_us
        reason = self._reason
        self._sums[reason] = self._sums.get(reason, 0) + passed_us
        if self._level is not None:
            of_level = self._by_level[self._level]
            of_level[reason] = of_level.get(reason, 0) + passed_us

    def hold(self, note: Held) -> None:
        """From now on, the queue is held as the note says."""
        self._reason = note.reason
        level = self._level = max(-MAX_PRIORITY, min(note.priority, MAX_PRIORITY))
        if not self._levels or self._levels[0] != level:
            self._by_level.setdefault(level, {})
            self._levels = [level, *(one for one in self._levels if one != level)]
        self._figures = {**self._figures, note.reason: note.figures}
        self._last = None

    def release(self) -> None:
        """From now on nothing holds the queue. A request that comes waits for the next step."""
        self._reason, self._level = "step", None

    def mark(self, priority: int) -> Mark:
        """The state now, for a request of this priority that begins or ends to wait."""
        last = self._last
        if last is not None and last[0] == self._now_us and last[1] == priority:
            return last[2]
        behind_higher, figures = _NONE, self._figures
        if len(self._levels) > 1 or (self._levels and self._levels[0] > priority):
            higher = [level for level in self._levels if level > priority]
            if higher:
                behind_higher = self._behind(higher)
                figures = figures.copy()
                figures["priority"] = {"priority_of_first": higher[0]}
        mark = Mark(self._sums.copy(), behind_higher, figures)
        self._last = (self._now_us, priority, mark)
        return mark

    def _behind(self, levels: list[int]) -> Sums:
        sums: Sums = {}
        for level in levels:
            for reason, sum_us in self._by_level[level].items():
                sums[reason] = sums.get(reason, 0) + sum_us
        return sums


def waits_between(begin: Mark, end: Mark) -> list[Wait]:
    """The parts of a wait between two marks for the same priority, the longest first."""
    of_priority_us = 0
    found: list[tuple[int, WaitReason]] = []
    for reason, sum_us in end.all.items():
        passed_us = sum_us - begin.all.get(reason, 0)
        higher_us = end.behind_higher.get(reason, 0) - begin.behind_higher.get(reason, 0)
        of_priority_us += higher_us
        if passed_us > higher_us:
            found.append((passed_us - higher_us, reason))
    if of_priority_us:
        found.append((of_priority_us, "priority"))
    found.sort(reverse=True)
    return [Wait(reason, passed_us / 1e3, end.figures.get(reason, {})) for passed_us, reason in found]
