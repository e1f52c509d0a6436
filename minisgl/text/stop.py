"""Stop strings in text that arrives in pieces.

Promise: the result does not depend on how the text was cut, and no character is held back that can't
be the start of a stop string. The match that is complete first wins (the generation would have ended
there); of two that end at the same character, the longer.
"""

from collections.abc import Sequence


class StopStrings:
    """`stops` (non-empty strings) and the tables to look for them; outputs with the same ones share it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(sorted(set(stops), key=len, reverse=True))
        self.fallbacks = [_fallback(stop) for stop in self.stops]
        self.firsts = frozenset(stop[0] for stop in self.stops)


class StopMatcher:
    """Watches one output for stop strings, by character, after Knuth, Morris and Pratt.

    Args:
        include_stop: show the stop string that was found.
    """

    def __init__(self, strings: StopStrings, include_stop: bool = False) -> None:
        self._include_stop = include_stop
        self._stops = strings.stops
        self._fallbacks = strings.fallbacks
        self._firsts = strings.firsts
        self._matched = [0] * len(self._stops)  # per stop: how many of its characters end the text so far
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string is complete). After a match: feed nothing more."""
        if not self._held and self._firsts.isdisjoint(text):
            return text, False
        seen = self._held + text
        for position in range(len(self._held), len(seen)):
            char = seen[position]
            for rank, stop in enumerate(self._stops):
                count = self._matched[rank]
                fallback = self._fallbacks[rank]
                while count and stop[count] != char:
                    count = fallback[count]
                count += stop[count] == char
                if count == len(stop):
                    self._held = ""
                    return seen[: position + 1 - (0 if self._include_stop else len(stop))], True
                self._matched[rank] = count
        keep = len(seen) - max(self._matched, default=0)
        self._held = seen[keep:]
        return seen[:keep], False

    def finish(self) -> str:
        """The text held back in vain: nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _fallback(stop: str) -> list[int]:
    """For each length n of a matched prefix: the longest shorter prefix that also ends it."""
    table = [0] * len(stop)
    count = 0
    for position in range(1, len(stop)):
        table[position] = count
        while count and stop[position] != stop[count]:
            count = table[count]
        count += stop[position] == stop[count]
    return table
