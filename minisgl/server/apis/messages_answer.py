"""What POST /v1/messages answers: a message of content blocks, or events that build it up.

Promise: the blocks of the stream add up to those of the whole answer, and only one block is open at a time.
`input_tokens` does not count the tokens that were found in the prefix cache, as in Anthropic's usage.
"""

import uuid
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from minisgl.replies.plan import ReplyReader
from minisgl.server.calls.call import CallContext, sse
from minisgl.server.calls.openai_answer import encode
from minisgl.server.http.errors import ErrorFormat, Fault
from minisgl.server.open_choices import Delta
from minisgl.text.formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status -> the error's `type`. Others are "invalid_request_error" below 500, else "api_error"."""
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


BROKEN_INPUT = "INVALID_JSON"
"""The key under which a call that broke off has the text of its arguments, as Anthropic's guide to
fine-grained tool streaming names it."""


class MessagesErrorFields(Struct):
    type: str
    message: str


class MessagesError(Struct, tag_field="type", tag="error"):
    """Anthropic's error object."""

    error: MessagesErrorFields


def error_body(fault: Fault) -> bytes:
    """Anthropic's error object as JSON."""
    kind = ERROR_TYPES.get(fault.status, "invalid_request_error" if fault.status < 500 else "api_error")
    return encode(MessagesError(MessagesErrorFields(kind, fault.message)))


ERRORS = ErrorFormat(MessagesError, error_body)


class TextContent(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class ThinkingContent(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    thinking: str
    signature: str = ""


class ToolUseContent(Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokens(Struct, forbid_unknown_fields=True):
    thinking_tokens: int


class MessageUsage(Struct, forbid_unknown_fields=True):
    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_creation_input_tokens: Literal[0] = 0


class MessageAnswer(Struct, kw_only=True, tag_field="type", tag="message", forbid_unknown_fields=True):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct, forbid_unknown_fields=True):
    input_tokens: int


class MessagesFormat:
    """Writes the answer of one call.

    Args:
        reader: takes the reply apart.
        max_tokens: the call's own limit; an answer that ends before it for its length filled the context.
        shows_thoughts: False: thoughts are left out.
    """

    is_slow = True

    def __init__(
        self, reader: ReplyReader, context: CallContext, max_tokens: int, shows_thoughts: bool
    ) -> None:
        self._context = context
        self._reader = reader
        self._max_tokens = max_tokens
        self._shows_thoughts = shows_thoughts
        self._blocks: list[ContentBlock] = []
        self._open: ContentBlock | None = None
        self._texts: list[str] = []  # of the open block
        self._last: Delta | None = None  # the one with the finish reason
        self._is_streamed = False
        self._events: list[bytes] = []

    def whole(self, choices: Sequence[Delta]) -> bytes:
        """The answer of `stream: false`."""
        self._read(choices[0])
        reason, sequence = self._stop()
        return encode(self._answer(content=self._blocks, stop_reason=reason, stop_sequence=sequence))

    def opening(self, num_choices: int) -> bytes:
        """The event with the message, which has no content yet."""
        self._is_streamed = True
        self._emit("message_start", message=self._answer(content=[]))
        return self._take()

    def piece(self, delta: Delta) -> bytes:
        """The events of new text, and those of the blocks that it opens and ends."""
        self._read(delta)
        return self._take()

    def ending(self) -> bytes:
        """The event with the end's reason and the usage, and the last one."""
        reason, sequence = self._stop()
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        self._emit("message_delta", delta=stop, usage=self._usage())
        self._emit("message_stop")
        return self._take()

    def failure(self, fault: Fault) -> bytes:
        """The event of an error."""
        return sse(error_body(fault), "error")

    def _answer(self, **fields: Any) -> MessageAnswer:
        context = self._context
        answer_id = f"msg_{context.request_id}"
        return MessageAnswer(id=answer_id, model=context.model_name, usage=self._usage(), **fields)

    def _usage(self) -> MessageUsage:
        usage = self._context.usage()
        return MessageUsage(
            usage.prompt_tokens - usage.cached_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            ThinkingTokens(self._reader.num_reasoning_tokens),
        )

    def _stop(self) -> tuple[StopReason, str | None]:
        """Why the answer ended, and the stop sequence that ended it."""
        last = self._last
        if last is not None and last.finish_reason == "length":
            is_asked = self._context.usage().completion_tokens >= self._max_tokens
            return "max_tokens" if is_asked else "model_context_window_exceeded", None
        if last is not None and isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        return "tool_use" if self._reader.ends_in_calls else "end_turn", None

    def _read(self, delta: Delta) -> None:
        """Add a delta to the content."""
        for event in self._reader.read(delta):
            self._add(event)
        if delta.finish_reason is not None:
            self._last = delta
            self._close()

    def _add(self, event: Event) -> None:
        match event:
            case Reasoning(text):
                if self._shows_thoughts:
                    if not isinstance(self._open, ThinkingContent):
                        self._open_block(ThinkingContent(""))
                    self._add_text("thinking_delta", "thinking", text)
            case Content(text):
                if not isinstance(self._open, TextContent):
                    self._open_block(TextContent(""))
                self._add_text("text_delta", "text", text)
            case CallStart(_, name):
                self._open_block(ToolUseContent(f"toolu_{uuid.uuid4().hex[:24]}", name, {}))
            case CallArguments(_, text):
                self._add_text("input_json_delta", "partial_json", text)
            case CallEnd(_, is_complete):
                self._close(is_complete)

    def _open_block(self, block: ContentBlock) -> None:
        """Begin a block, after the end of the one before."""
        self._close()
        self._open = block
        self._emit("content_block_start", index=len(self._blocks), content_block=block)

    def _add_text(self, kind: str, field: str, text: str) -> None:
        self._texts.append(text)
        self._emit("content_block_delta", index=len(self._blocks), delta={"type": kind, field: text})

    def _close(self, is_complete: bool = False) -> None:
        """End the open block, if there is one. A call that broke off has its arguments as a text."""
        if self._open is None:
            return
        block, text = self._open, "".join(self._texts)
        self._open, self._texts = None, []
        self._emit("content_block_stop", index=len(self._blocks))
        match block:
            case TextContent():
                block = TextContent(text)
            case ThinkingContent():
                block = ThinkingContent(text)
            case ToolUseContent() if is_complete:
                # The text is a JSON object, so it need not be read to be sent.
                raw = cast("dict[str, Any]", msgspec.Raw(text.encode()))
                block = ToolUseContent(block.id, block.name, raw)
            case ToolUseContent():
                block = ToolUseContent(block.id, block.name, {BROKEN_INPUT: text})
        self._blocks.append(block)

    def _emit(self, name: str, **fields: Any) -> None:
        if self._is_streamed:
            self._events.append(sse(encode({"type": name, **fields}), name))

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events
