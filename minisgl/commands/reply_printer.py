"""Writes a reply to a terminal or a pipe while it arrives: thought, answer and calls.

Promise: on a terminal the thought is dimmed and each call stands in a frame; elsewhere the same parts are
plain text, a call a line. The terminal's state is as before after `finish`.
"""

from typing import TextIO

from minisgl.offline import Delta
from minisgl.text.formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

DIM, NORMAL = "\x1b[2m", "\x1b[22m"


class ReplyPrinter:
    """Prints one reply.

    Args:
        is_terminal: None = whether `out` is one.
    """

    def __init__(self, out: TextIO, is_terminal: bool | None = None) -> None:
        self._out = out
        self._is_terminal = out.isatty() if is_terminal is None else is_terminal
        can_draw = (out.encoding or "").lower().replace("-", "").startswith("utf")
        self._frame = ("╭─ ", "│ ", "╰─") if can_draw else ("+- ", "| ", "+-")
        self._in_thought = False
        self._in_call = False
        self._in_text = False
        self._separator = ""  # stands between what was written and what comes

    def write(self, delta: Delta) -> None:
        """Write what is new."""
        if delta.events:
            for event in delta.events:
                self._write_event(event)
        else:
            self._out.write(delta.text)
        self._out.flush()

    def finish(self) -> None:
        """End what is open, and the line."""
        self._end_thought()
        self._end_call("")
        self._out.write("\n")
        self._out.flush()

    def _write_event(self, event: Event) -> None:
        match event:
            case Reasoning(text):
                if not self._in_thought:
                    self._begin()
                    self._in_thought = True
                    self._out.write(DIM if self._is_terminal else "")
                self._out.write(text)
            case Content(text):
                if not self._in_text:
                    self._begin()
                    self._in_text = True
                self._out.write(text)
            case CallStart(_, name):
                self._begin()
                self._in_call = True
                opening = f"{self._frame[0]}{name}\n{self._frame[1]}" if self._is_terminal else f"{name} "
                self._out.write(opening)
            case CallArguments(_, text):
                self._out.write(text.replace("\n", f"\n{self._frame[1]}") if self._is_terminal else text)
            case CallEnd(_, is_complete):
                self._end_call("" if is_complete else " broken off")

    def _begin(self) -> None:
        """End what came before another part."""
        self._end_thought()
        self._end_call("")
        if self._in_text:
            self._in_text, self._separator = False, "\n"
        self._out.write(self._separator)
        self._separator = ""

    def _end_thought(self) -> None:
        if self._in_thought:
            self._in_thought = False
            self._out.write(NORMAL if self._is_terminal else "")
            self._separator = "\n\n"

    def _end_call(self, note: str) -> None:
        if self._in_call:
            self._in_call = False
            self._out.write(f"\n{self._frame[2]}{note}" if self._is_terminal else note)
            self._separator = "\n"
