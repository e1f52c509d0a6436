"""Finds stop strings in text that arrives in pieces.

Promise: the result does not depend on how the text was cut, and only text that may start a stop string is
held back. The match that is complete first wins, because generation would have ended there; of two matches
that end at the same character, the longer wins.
"""

from collections.abc import Sequence


class StopStrings:
    """Non-empty stop strings with their search tables. Outputs with the same strings share one object."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(sorted(set(stops), key=len, reverse=True))
        self.fallbacks = [_fallback(stop) for stop in self.stops]
        self.first_chars = frozenset(stop[0] for stop in self.stops)


class StopMatcher:
    """Searches one output for stop strings, character by character (Knuth, Morris and Pratt 1977).

    Args:
        include_stop: return the found stop string as part of the text.
    """

    def __init__(self, strings: StopStrings, include_stop: bool = False) -> None:
        self._include_stop = include_stop
        self._stops = strings.stops
        self._fallbacks = strings.fallbacks
        self._first_chars = strings.first_chars
        self._matched = [0] * len(
            self._stops
        )  # per stop string: length of its prefix that ends the text so far
        self._held = ""
        self.found: str | None = None  # the stop string that is complete

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string is complete). Push nothing after a match."""
        if not self._held and self._first_chars.isdisjoint(text):
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
                    self._held, self.found = "", stop
                    return seen[: position + 1 - (0 if self._include_stop else len(stop))], True
                self._matched[rank] = count
        keep = len(seen) - max(self._matched, default=0)
        self._held = seen[keep:]
        return seen[:keep], False

    def finish(self) -> str:
        """Return the text that was held back; no text follows that could complete a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _fallback(stop: str) -> list[int]:
    """For each prefix length n: length of the longest shorter prefix that is also a suffix of that prefix."""
    table = [0] * len(stop)
    count = 0
    for position in range(1, len(stop)):
        table[position] = count
        while count and stop[position] != stop[count]:
            count = table[count]
        count += stop[position] == stop[count]
    return table
