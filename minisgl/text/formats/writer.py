"""Collects a parser's events.

Promise: whitespace next to a marker (a thought's or call's begin or end) belongs to the marker, end tokens
at the reply's end are no text, and a line break joins the answer's parts before and after a call. Everything
else that is written becomes an event, in order.
"""

from minisgl.text.formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

SPACES = " \t\r\n"


class Writer:
    """The events of one reply.

    Args:
        trim: also drop whitespace at the reply's own begin and end.
    """

    def __init__(self, trim: bool = False) -> None:
        self._events: list[Event] = []
        self._last: list[str] = []  # the text of the last event, which has none itself until it is complete
        self._trim = trim
        self._kind: type[Reasoning] | type[Content] = Content
        self._held: list[str] = []  # whitespace, and end tokens, that the next text makes part of the text
        self._num_before_end = -1  # entries of `_held` before the first end token; -1 = there is none
        self._skips_spaces = trim
        self._is_new_part = False
        self._seen: set[type] = set()  # kinds of text that have events
        self._num_calls = 0

    def take(self) -> list[Event]:
        """The events since the last call."""
        self._complete_last()
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        """Add text of a thought."""
        self._kind = Reasoning
        self._text(text)

    def content(self, text: str) -> None:
        """Add text of the answer."""
        self._kind = Content
        self._text(text)

    def end_token(self, text: str) -> None:
        """Add an end token: text only if more text follows."""
        if self._num_before_end < 0:
            self._num_before_end = len(self._held)
        self._held.append(text)

    def boundary(self) -> None:
        """A marker stands here: drop the whitespace on both sides."""
        self._is_new_part = True
        self._held = []
        self._num_before_end = -1
        self._skips_spaces = True

    def call_start(self, name: str) -> None:
        """Open a call; calls do not nest."""
        self.boundary()
        self._complete_last()
        self._events.append(CallStart(self._num_calls, name))

    def call_arguments(self, text: str) -> None:
        """Add to the arguments of the open call."""
        if text:
            self._join(CallArguments(self._num_calls, ""), text)

    def call_end(self, complete: bool) -> None:
        """Close the open call."""
        self._complete_last()
        self._events.append(CallEnd(self._num_calls, complete))
        self._num_calls += 1

    def finish(self) -> None:
        """The reply is over."""
        if self._num_before_end >= 0:
            del self._held[self._num_before_end :]
        if self._held and self._kind is Content and not self._trim:
            self._add("".join(self._held))
        self.boundary()

    def _text(self, text: str) -> None:
        if self._skips_spaces:
            text = text.lstrip(SPACES)
        body = text.rstrip(SPACES)
        if body:
            self._skips_spaces = False
            joint = "\n" if self._is_new_part and self._kind in self._seen else ""
            self._is_new_part = False
            self._seen.add(self._kind)
            self._add(joint + "".join(self._held) + body)
            self._held = []
            self._num_before_end = -1
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def _add(self, text: str) -> None:
        self._join(self._kind(""), text)

    def _join(self, event: Reasoning | Content | CallArguments, text: str) -> None:
        """Add text to the last event, if that is of this kind, or an event of its own."""
        if not self._events or type(self._events[-1]) is not type(event):
            self._complete_last()
            self._events.append(event)
        self._last.append(text)

    def _complete_last(self) -> None:
        if self._last:
            self._events[-1] = self._events[-1]._replace(text="".join(self._last))
            self._last = []
