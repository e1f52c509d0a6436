"""Finds regular expressions in text that arrives in pieces.

Promise: a match is reported only when no further text can change it, and the search says which text at the
end may still become a match. Expressions for which that can't be known (look-around, references) are refused.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_MATCH_CHARS = 500
"""Longer matches are none, so that a piece of text costs the same however much is held back."""
END = r"\Z"


class Delimiter:
    """One delimiter of a response template: fixed texts, or a regular expression.

    Raises:
        ValueError: the expression is invalid, or has a part that can't be searched for piece by piece.
    """

    def __init__(self, texts: Sequence[str] = (), pattern: str = "") -> None:
        self.text = texts[0] if len(texts) == 1 else ""
        """The only text that it may be; empty: there are others."""
        self.pattern = pattern or "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
        try:
            self._whole = re.compile(self.pattern, re.DOTALL)
            self._open = re.compile(open_ended(self.pattern), re.DOTALL)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not valid: {error}") from None
        self.names = frozenset(self._whole.groupindex)
        # Of fixed texts, only one that begins another can become another match.
        self._is_final = bool(texts) and not any(
            one != other and other.startswith(one) for one in texts for other in texts
        )

    def search(self, text: str, start: int, ended: bool) -> "Found":
        """The first match from `start` on, if it is certain, and where text begins that may become one."""
        if ended:
            match = _first_short(self._whole, text, start)
            return Found(match, len(text))
        pending = _first_short(self._open, text, start)
        if pending is None:
            return Found(None, len(text))
        begin = pending.start()
        if self._is_final or pending.end() < len(text):
            match = self._whole.match(text, begin)
            if match is not None and 0 < match.end() - begin <= MAX_MATCH_CHARS:
                return Found(match, len(text))
        return Found(None, begin)


class Found(NamedTuple):
    """The result of a search."""

    match: re.Match[str] | None
    pending: int  # text from here on may become a match

    @property
    def begin(self) -> int:
        """Where a search of a longer text may begin: nothing before can become a match."""
        return self.pending if self.match is None else self.match.start()


def _first_short(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    """The first match from `start` on that is not too long."""
    match = pattern.search(text, start)
    while match is not None and match.end() - match.start() > MAX_MATCH_CHARS:
        match = pattern.search(text, match.start() + 1)
    return match


def open_ended(pattern: str) -> str:
    """An expression that matches whatever the text's end cuts off from a match of `pattern`, too.

    Every part may also be matched by the text's end.
    """
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "(":
            size, opening = _group(pattern, at)
            # a group is `(?:(...)|\Z)`; where it closes, see below
            parts.append("(?:" + opening)
            at += size
        elif char == ")":
            parts.append(f")|{END})")
            at += 1
        elif char == "|":
            parts.append("|")
            at += 1
        elif char in "*+?{":
            size = _quantifier(pattern, at)
            parts.append(pattern[at : at + size])
            at += size
        elif char == "$" or pattern.startswith(END, at):
            parts.append(END)
            at += 1 if char == "$" else 2
        else:
            size = _atom(pattern, at)
            parts.append(f"(?:{pattern[at : at + size]}|{END})")
            at += size
    return "".join(parts)


def _group(pattern: str, at: int) -> tuple[int, str]:
    """The size of a group's opening, and how the open-ended group opens."""
    if not pattern.startswith("(?", at):
        return 1, "(?:"
    if pattern.startswith("(?:", at):
        return 3, "(?:"
    named = re.compile(r"\(\?P?<\w+>").match(pattern, at)
    if named is None:
        raise ValueError(f"{pattern!r} has {pattern[at : at + 4]!r}, which is not supported")
    return len(named[0]), "(?:"


def _quantifier(pattern: str, at: int) -> int:
    found = re.compile(r"([*+?]|\{\d*,?\d*\})[?]?").match(pattern, at)
    if found is None or pattern.startswith("+", at + len(found[0])):
        raise ValueError(f"{pattern!r} has {pattern[at : at + 4]!r}, which is not supported")
    return len(found[0])


def _atom(pattern: str, at: int) -> int:
    """The size of one character, escape or class."""
    found = re.compile(
        r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^0-9AbBGkxuUNpP]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[^]",
        re.DOTALL,
    ).match(pattern, at)
    if found is None:
        raise ValueError(f"{pattern!r} has {pattern[at : at + 2]!r}, which is not supported")
    return len(found[0])
