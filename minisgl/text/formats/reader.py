"""Reads text that arrives in pieces, as if all of it were there.

Promise: what a reading function finds does not depend on how the text was cut. Each is a generator that
pauses (yields) only while more text could change its answer.
"""

import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reading that pauses while it needs more text, and returns a T."""
Emit = Callable[[str], None]

SPACE_RUN = re.compile(r"[ \t\r\n]*")


class Markers:
    """Non-empty strings to look for.

    Raises:
        ValueError: one of them stands in another, not at its end, so that it can't be told which is meant.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        for text in self.texts:
            for other in self.texts:
                if text in other[:-1]:
                    raise ValueError(f"{text!r} stands in {other!r}")
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._prefixes = frozenset(text[:size] for text in self.texts for size in range(1, len(text)))
        self._longest = max(map(len, self.texts), default=1)

    def num_pending(self, text: str, start: int) -> int:
        """How many characters at the end of `text`, from `start` on, may become a marker."""
        for begin in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[begin:] in self._prefixes:
                return len(text) - begin
        return 0


class Reader:
    """The text of one reply that has arrived and is not yet read."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # everything before is read
        self.ended = False  # no more text comes
        self._record: list[str] | None = None

    def feed(self, text: str) -> None:
        """More text arrived."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def record(self, first: str = "") -> None:
        """Remember what is read from here on, and `first` before it."""
        self._record = [first]

    def recorded(self) -> str:
        """What was read since `record`; it goes on with nothing remembered."""
        text = "".join(self._record or ())
        self._record = []
        return text

    def forget(self) -> None:
        """Remember nothing from here on."""
        self._record = None

    def take(self, size: int) -> str:
        """Read `size` characters, which have arrived."""
        text = self.text[self.at : self.at + size]
        self.at += size
        if self._record is not None:
            self._record.append(text)
        return text

    def peek(self, size: int) -> Reading[str]:
        """The next `size` characters without reading them; fewer at the end of the text."""
        while len(self.text) - self.at < size and not self.ended:
            yield
        return self.text[self.at : self.at + size]

    def run(self, pattern: re.Pattern[str], emit: Emit | None = None) -> Reading[str]:
        """Read the longest run of characters of a class; `pattern` is one class with `*`.

        With `emit`, the run is given to it piece by piece and not returned.
        """
        pieces = []
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            piece = self.take(match.end() - self.at)
            if emit is None:
                pieces.append(piece)
            elif piece:
                emit(piece)
            if self.at < len(self.text) or self.ended:
                return "".join(pieces)
            yield

    def spaces(self) -> Reading[str]:
        """Read whitespace."""
        return (yield from self.run(SPACE_RUN))

    def literal(self, *texts: str) -> Reading[str]:
        """Read the one of `texts` that comes next; "" and nothing read if none does.

        No text may begin with another one. The empty text is never read.
        """
        texts = tuple(filter(None, texts))
        if not texts:
            return ""
        while True:
            rest = len(self.text) - self.at
            for text in texts:
                if self.text.startswith(text, self.at):
                    self.take(len(text))
                    return text
            if self.ended or not any(
                len(text) > rest and text.startswith(self.text[self.at :]) for text in texts
            ):
                return ""
            yield

    def next_of(self, *texts: str) -> Reading[str]:
        """The one of `texts` that comes next, which is not read; "" if none does."""
        size = 1
        while True:
            ahead = yield from self.peek(size)
            for text in texts:
                if ahead.startswith(text):
                    return text
            if len(ahead) < size or not any(text.startswith(ahead) for text in texts):
                return ""
            size += 1

    def until(self, markers: Markers, emit: Emit, unread: frozenset[str] = frozenset()) -> Reading[str]:
        """Give the text before the next marker to `emit`; read the marker and return it, "" at the end.

        A marker in `unread` is found but not read.
        """
        while True:
            found = markers.pattern.search(self.text, self.at)
            if found is not None:
                if found.start() > self.at:
                    emit(self.take(found.start() - self.at))
                if found[0] not in unread:
                    self.take(len(found[0]))
                return found[0]
            held = 0 if self.ended else markers.num_pending(self.text, self.at)
            size = len(self.text) - held - self.at
            if size:
                emit(self.take(size))
            if self.ended:
                return ""
            yield


STRING_RUN = re.compile(r'[^"\\]*')
OUTSIDE_RUN = re.compile(r"[ \t\r\n:,0-9A-Za-z+\-.]*")
SCALAR_RUN = re.compile(r"[0-9A-Za-z+\-.]*")


def json_value(reader: Reader, emit: Emit) -> Reading[bool]:
    """Read one JSON value and give its text to `emit` as it is written.

    Only brackets and strings are checked. Returns whether the value is whole. If not, the text ended, or what
    comes next can't stand in JSON.
    """
    first = yield from reader.peek(1)
    if not first or first not in '{["':
        scalar = yield from reader.run(SCALAR_RUN)
        emit(scalar)
        return bool(scalar)
    closers: list[str] = []
    in_string = escaped = False
    while True:
        text, at = reader.text, reader.at
        size, done, broken = len(text), False, False
        while at < size and not done and not broken:
            if escaped:
                escaped = False
                at += 1
            elif in_string:
                at = STRING_RUN.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]  always matches
                if at < size:
                    escaped = text[at] == "\\"
                    in_string = escaped
                    done = not in_string and not closers
                    at += 1
            else:
                at = OUTSIDE_RUN.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
                if at == size:
                    break
                char = text[at]
                if char == '"':
                    in_string = True
                elif char in "{[":
                    closers.append("}" if char == "{" else "]")
                elif closers and char == closers[-1]:
                    closers.pop()
                    done = not closers
                else:
                    broken = True
                at += not broken
        if at > reader.at:
            emit(reader.take(at - reader.at))
        if done:
            return True
        if broken or reader.ended:
            return False
        yield
