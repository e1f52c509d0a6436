"""Parses the server-sent events of a streamed answer, and notes when they arrived.

Promise: every event is counted once, however the network splits the bytes. Token counts come from the
server's usage, never from the number of chunks. No I/O and no clock: the caller passes bytes and times.

A client receives tens of thousands of events a second on one core. After the first token it therefore counts
events by their separators. It parses only the last few reads, which contain usage, finish reason and [DONE].
"""

from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

KEPT_READS = 4
"""Servers send finish reason, usage and [DONE] in up to three reads."""


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """A server's own count of the tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: Details | None = None

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the prefix cache; None where the server does not send the number."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def written(self) -> str:
        """The text this event adds."""
        if self.delta is None:
            return self.text or ""
        return "".join((self.delta.reasoning_content or self.delta.reasoning or "", self.delta.content or ""))


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")
    object: str | None = None
    message: str | None = None

    @property
    def error_message(self) -> str | None:
        """The message of an error object; None if the chunk is no error."""
        if self.object == "error":
            return self.message or "an error object without a message"
        found = bytes(self.error)
        if not found or found == b"null":
            return None
        try:
            return msgspec.json.decode(found, type=ErrorObject).message
        except msgspec.MsgspecError:
            return found.decode("utf-8", "replace")


class ErrorObject(msgspec.Struct):
    message: str


class BadEventError(Exception):
    """The bytes are not a stream of OpenAI chunks."""


class StreamedServerError(Exception):
    """The stream contains an error object; the message is the server's."""


class Read(NamedTuple):
    """The complete events that ended in one read, and the read's index in `times`."""

    place: int
    events: bytes


class AnswerStream:
    """One streamed answer, fed read by read.

    Args:
        is_chat: chunks of /v1/chat/completions, where an event without text has no token (the first names
            the role). In /v1/completions it has one, whose text is still held back.
        keep_text: `text` is wanted in the end.
    """

    def __init__(self, is_chat: bool, keep_text: bool = False) -> None:
        self._is_chat = is_chat
        self._kept: deque[Read] = deque(maxlen=None if keep_text else KEPT_READS)
        self._rest = b""
        self._has_crlf = False
        self._has_begun = False
        self.times = array("d")
        """When each read came, in the caller's seconds."""
        self.counts = array("L")
        """How many events with tokens it held; right only after `finish`."""
        self.ended_at: float | None = None
        """When the last event of the answer came (usage and [DONE] are none); set by `finish`."""
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.is_done = False
        """[DONE] was there."""
        self.text = ""
        """All of the answer's, with `keep_text`; set by `finish`."""

    def feed(self, data: bytes, at: float) -> None:
        """Take what one read brought at the time `at`.

        Raises:
            StreamedServerError: it holds an error object.
            BadEventError: it can't be understood.
        """
        if self._rest or self._has_crlf or not data.endswith(b"\n\n"):
            data = self._complete_events(data)
            if not data:
                return
        count = data.count(b"\n\n")
        is_plain = data.startswith(b"data:") and data.count(b"\n\ndata:") == count - 1
        if not (is_plain and self._has_begun) or b'"error"' in data:
            count = sum(self._has_token(chunk) for chunk in read_chunks(data))
            self._has_begun = self._has_begun or count > 0
        self._kept.append(Read(len(self.times), data))
        self.times.append(at)
        self.counts.append(count)

    def finish(self) -> None:
        """End the stream: parse the last reads, and count their tokens exactly.

        Raises:
            StreamedServerError, BadEventError: as `feed`.
        """
        if self._rest.strip():  # the last event may have no blank line after it
            self.feed(b"\n\n", self.times[-1] if self.times else 0.0)
        bare_end: int | None = None
        written: list[str] = []
        for read in self._kept:
            count = 0
            for chunk in read_chunks(read.events):
                self.is_done = self.is_done or chunk is DONE
                self.usage = chunk.usage or self.usage
                if not chunk.choices:
                    continue
                self.ended_at = self.times[read.place]
                written.append(chunk.choices[0].written)
                self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
                if chunk.choices[0].finish_reason is not None and not chunk.choices[0].written:
                    bare_end = read.place
                else:
                    count += self._has_token(chunk)
            self.counts[read.place] = count
        # If there are fewer events than tokens, the event with only the finish reason stands for a token:
        # end-of-sequence, or one whose text was held back.
        if bare_end is not None and self.usage and sum(self.counts) < self.usage.completion_tokens:
            self.counts[bare_end] += 1
        if self._kept.maxlen is None:
            self.text = "".join(written)
        self._kept.clear()

    def _complete_events(self, data: bytes) -> bytes:
        """The bytes kept from earlier reads plus `data`, up to the end of the last complete event."""
        data = self._rest + data
        self._has_crlf = self._has_crlf or b"\r\n" in data
        if self._has_crlf:
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(b"\n\n")
        end = end + 2 if end >= 0 else 0
        self._rest = data[end:]
        return data[:end]

    def _has_token(self, chunk: Chunk) -> bool:
        return bool(chunk.choices) and (not self._is_chat or chunk.choices[0].written != "")


def read_chunks(events: bytes) -> Iterator[Chunk]:
    """The chunks in complete server-sent events; [DONE] is the object `DONE`.

    Raises:
        StreamedServerError: one is an error object.
        BadEventError: one is not of OpenAI's form.
    """
    for event in events.split(b"\n\n"):
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if not data:
            continue  # a comment, which keeps the connection alive
        if data == b"[DONE]":
            yield DONE
            continue
        try:
            chunk = DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadEventError(f"{error}: {data[:200].decode('utf-8', 'replace')}") from None
        if chunk.error_message is not None:
            raise StreamedServerError(chunk.error_message)
        yield chunk


DECODER = msgspec.json.Decoder(Chunk)
DONE = Chunk()
