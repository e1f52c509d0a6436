"""Reads gpt-oss's harmony format: a reply is a sequence of messages, each with a header and an end token.

Promise: channel analysis is the thought, final and commentary are content, and a message to `functions.name`
is a call. Two messages of the same kind are joined by a line break.
"""

import re

from minisgl.text.formats.calls import Calls
from minisgl.text.formats.reader import Markers, Reading, json_value

MAX_HEADER_CHARS = 300
HEADER_START = ("<|channel|>", "<|message|>", "<|start|>", "to=", "assistant")
ENDS = Markers(["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"])
UNREAD = frozenset({"<|channel|>"})
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")


def read_harmony(calls: Calls) -> Reading[None]:
    """Read a whole reply. It begins in a header, as the prompt ends with `<|start|>assistant`."""
    reader, writer = calls.reader, calls.writer
    while True:
        calls.open("")
        header = yield from _read_header(calls)
        if header is None:
            calls.spill()
            calls.close()
            if not (yield from reader.until(ENDS, writer.content, UNREAD)):
                return
            continue
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        if recipient is not None:
            yield from _read_call(calls, recipient[1].removeprefix("functions."))
        else:
            calls.close()
            is_thought = channel is not None and channel[1] == "analysis"
            emit = writer.reasoning if is_thought else writer.content
            writer.boundary()
            yield from reader.until(ENDS, emit, UNREAD)
        if reader.ended and reader.at == len(reader.text):
            return


def _read_header(calls: Calls) -> Reading[str | None]:
    """Read up to `<|message|>`; None if what comes is no header, and some of it may be read."""
    reader = calls.reader
    header = yield from reader.spaces()
    if not (yield from reader.next_of(*HEADER_START)):
        return None
    while True:
        ahead = yield from reader.peek(1)
        if not ahead or len(header) > MAX_HEADER_CHARS:
            return None
        if ahead == "<" and (yield from reader.literal("<|message|>")):
            return header
        header += reader.take(1)


def _read_call(calls: Calls, name: str) -> Reading[None]:
    """Read the arguments of a message to a function; an empty message has none."""
    reader, writer = calls.reader, calls.writer
    yield from reader.spaces()
    calls.begin(name)
    if (yield from reader.peek(1)) == "{":
        calls.end((yield from json_value(reader, calls.arguments)))
    else:
        pieces: list[str] = []
        ending = yield from reader.until(ENDS, pieces.append, frozenset(ENDS.texts))
        text = "".join(pieces)
        calls.arguments(text if text or not ending else "{}")
        calls.end(bool(ending) or not text)
    yield from reader.spaces()
    if (yield from reader.literal(*(end for end in ENDS.texts if end not in UNREAD))):
        calls.close()
    else:
        calls.spill()
        calls.close()
        yield from reader.until(ENDS, writer.content, UNREAD)
