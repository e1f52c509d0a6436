"""Takes a reply apart into thought, answer and calls while its text arrives.

Promise: all events together are the same for every way to cut the text. Only text that may belong to a
marker, or whitespace next to one, is held back. The cost of a piece of text does not grow with the reply.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minisgl.text.formats.calls import Calls, read_calls
from minisgl.text.formats.events import Event
from minisgl.text.formats.harmony import read_harmony
from minisgl.text.formats.reader import Markers, Reader, Reading
from minisgl.text.formats.response_template import ResponseTemplate, read_by_template
from minisgl.text.formats.table import END_TOKENS, CallFormat, Format, Thought
from minisgl.text.formats.tools import Tools
from minisgl.text.formats.writer import Writer

MAX_PIECE_CHARS = 512
"""Longer text is read in pieces, so that what a search has in sight does not grow with it."""
ReplyFormat = Format | ResponseTemplate
Program = Callable[[Calls], Reading[None]]
"""Reads a whole reply and writes its events."""


class ReplyParser:
    """Parses one reply.

    Args:
        program: how the reply is read.
        tools: the request's tools; None: every name may be called.
        skipped: text at the reply's begin that gives no events: what the prompt has written of it.
        trim: drop whitespace at the reply's own begin and end.
    """

    def __init__(
        self,
        program: Program,
        tools: Sequence[Mapping[str, Any]] | None = None,
        skipped: str = "",
        trim: bool = False,
    ) -> None:
        self._reader = Reader()
        self._writer = Writer(trim)
        self._calls = Calls(self._reader, self._writer, Tools(tools))
        self._reading = program(self._calls)
        self._is_over = False
        self._go_on()
        if skipped:
            self.feed(skipped)

    def feed(self, text: str) -> list[Event]:
        """The events of the next piece of text."""
        for begin in range(0, len(text), MAX_PIECE_CHARS):
            self._reader.feed(text[begin : begin + MAX_PIECE_CHARS])
            self._go_on()
        return self._writer.take()

    def finish(self) -> list[Event]:
        """The events of what was held back; the reply is over."""
        self._reader.ended = True
        self._go_on()
        self._calls.close()
        self._writer.finish()
        return self._writer.take()

    def _go_on(self) -> None:
        if self._is_over:
            return
        try:
            next(self._reading)
        except StopIteration:
            self._is_over = True
        self._calls.flush()


def new_parser(
    form: ReplyFormat, *, prompt: str = "", tools: Sequence[Mapping[str, Any]] | None = None
) -> ReplyParser:
    """A parser for one reply of a model with this format.

    Args:
        prompt: the rendered prompt, whose end may have opened the thought.
        tools: the request's tools. None: every name may be called; empty: no calls are looked for.
    """
    if isinstance(form, ResponseTemplate):
        return ReplyParser(lambda calls: read_by_template(calls, form), tools, form.begun(prompt), trim=True)
    if form.channels:
        begin = prompt.rpartition("<|start|>assistant")
        return ReplyParser(read_harmony, tools, skipped=begin[2] if begin[1] else "")
    in_thought = form.thought is not None and opens_thought(form.thought, prompt)
    calls = form.calls if tools is None or tools else None
    return ReplyParser(lambda state: read_marked(state, form.thought, calls, in_thought), tools)


def reply_markers(thought: Thought | None, calls: CallFormat | None) -> Markers:
    """What is looked for in a reply's text.

    Raises:
        ValueError: these thoughts and calls can't be told apart.
    """
    opens = calls.opens if calls else ()
    return Markers([*opens, *END_TOKENS, *([thought.open] if thought and thought.anywhere else [])])


def opens_thought(thought: Thought, prompt: str) -> bool:
    """Whether the prompt ends inside a thought, so that the reply begins with it."""
    return prompt.rstrip().endswith(thought.open)


def read_marked(
    calls: Calls, thought: Thought | None, form: CallFormat | None, in_thought: bool
) -> Reading[None]:
    """Read a reply whose thoughts and calls stand between markers."""
    reader, writer = calls.reader, calls.writer
    opens = form.opens if form else ()
    unread = frozenset(form.unread if form else ())
    found = reply_markers(thought, form)
    if thought:
        if not in_thought:
            space = yield from reader.spaces()
            in_thought = bool((yield from reader.literal(thought.open)))
            if not in_thought:
                writer.content(space)
        if in_thought:
            yield from _read_thought(calls, thought)
    while marker := (yield from reader.until(found, writer.content, unread)):
        if marker in opens:
            assert form is not None
            yield from read_calls(calls, form, marker)
        elif thought and marker == thought.open:
            yield from _read_thought(calls, thought)
        else:
            writer.end_token(marker)


def _read_thought(calls: Calls, thought: Thought) -> Reading[None]:
    """Read a thought whose opening marker is read, up to its end."""
    reader, writer = calls.reader, calls.writer
    writer.boundary()
    yield from reader.spaces()
    yield from reader.literal(thought.open)  # some models write it once more
    markers = Markers([thought.close, *END_TOKENS])
    while (marker := (yield from reader.until(markers, writer.reasoning))) not in ("", thought.close):
        writer.end_token(marker)
    writer.boundary()
