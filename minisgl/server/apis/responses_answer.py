"""What POST /v1/responses answers: one object with output items, or events that build it up.

Promise: the stream's last event holds the object that the whole answer would be. Every item and part that is
added is also done, in order, and `sequence_number` counts the events from 0.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from minisgl.replies.plan import ReplyReader
from minisgl.replies.tools import new_call_id
from minisgl.server.calls.call import CallContext, sse
from minisgl.server.calls.openai_answer import encode
from minisgl.server.http.errors import Fault
from minisgl.server.open_choices import Delta
from minisgl.text.formats.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message", forbid_unknown_fields=True):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(Struct, tag_field="type", tag="reasoning", forbid_unknown_fields=True):
    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[None] = []
    encrypted_content: None = None


class OutputCall(Struct, tag_field="type", tag="function_call", forbid_unknown_fields=True):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Struct, forbid_unknown_fields=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, forbid_unknown_fields=True):
    reasoning_tokens: int


class ResponseUsage(Struct, forbid_unknown_fields=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct, forbid_unknown_fields=True):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct, forbid_unknown_fields=True):
    code: str
    message: str


class ResponseAnswer(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that OpenAI's object has, of which this server honours some and repeats others."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0] = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class OpenItem:
    """The output item that is being written, and its text so far."""

    def __init__(self, item: OutputItem, index: int) -> None:
        self.item = item
        self.index = index
        self.texts: list[str] = []


class ResponsesFormat:
    """Writes the answer of one call.

    Args:
        echo: the fields of the answer that repeat the call's.
        reader: takes the reply apart.
    """

    is_slow = True

    def __init__(self, echo: dict[str, Any], reader: ReplyReader, context: CallContext) -> None:
        self._head = ResponseAnswer(
            id=f"resp_{context.request_id}", created_at=int(time.time()), model=context.model_name, **echo
        )
        self._reader = reader
        self._usage = context.usage
        self._items: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._finish_reason: str | None = None
        self._events: list[bytes] = []
        self._is_streamed = False
        self._num_events = 0

    def whole(self, choices: Sequence[Delta]) -> bytes:
        """The answer of `stream: false`."""
        self._read(choices[0])
        return encode(self._answer())

    def opening(self, num_choices: int) -> bytes:
        """The events that a response was created and is in progress."""
        self._is_streamed = True
        self._emit("response.created", response=self._head)
        self._emit("response.in_progress", response=self._head)
        return self._take()

    def piece(self, delta: Delta) -> bytes:
        """The events of new text, and those of the items that it opens and ends."""
        self._read(delta)
        return self._take()

    def ending(self) -> bytes:
        """The last event, which has the whole answer."""
        answer = self._answer()
        self._emit(f"response.{answer.status}", response=answer)
        return self._take()

    def failure(self, fault: Fault) -> bytes:
        """The last event of a response that failed."""
        code = "server_error" if fault.status >= 500 else "invalid_prompt"
        error = ResponseError("rate_limit_exceeded" if fault.status == 429 else code, fault.message)
        answer = msgspec.structs.replace(
            self._head, status="failed", error=error, output=self._items, usage=self._usage_answer()
        )
        self._emit("response.failed", response=answer)
        return self._take()

    def _answer(self) -> ResponseAnswer:
        """The whole answer."""
        is_cut = self._finish_reason == "length"
        return msgspec.structs.replace(
            self._head,
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._items,
            usage=self._usage_answer(),
        )

    def _usage_answer(self) -> ResponseUsage:
        usage = self._usage()
        return ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.cached_tokens),
            usage.completion_tokens,
            OutputDetails(self._reader.num_reasoning_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )

    def _read(self, delta: Delta) -> None:
        """Add a delta to the output."""
        for event in self._reader.read(delta):
            self._add(event)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            if not self._items and self._open is None:  # clients look for a message
                self._open_item(OutputMessage(_new_id("msg"), "in_progress", []))
            self._close(is_complete=delta.finish_reason != "length")

    def _add(self, event: Event) -> None:
        match event:
            case Reasoning(text):
                if self._open is None or not isinstance(self._open.item, OutputReasoning):
                    self._open_item(OutputReasoning(_new_id("rs"), "in_progress", []))
                self._add_text("response.reasoning_text.delta", text, content_index=0)
            case Content(text):
                if self._open is None or not isinstance(self._open.item, OutputMessage):
                    self._open_item(OutputMessage(_new_id("msg"), "in_progress", []))
                self._add_text("response.output_text.delta", text, content_index=0, logprobs=[])
            case CallStart(_, name):
                self._open_item(OutputCall(_new_id("fc"), "in_progress", new_call_id(), name, ""))
            case CallArguments(_, text):
                self._add_text("response.function_call_arguments.delta", text)
            case CallEnd(_, is_complete):
                self._close(is_complete)

    def _open_item(self, item: OutputItem) -> None:
        """Begin an item, after the end of the one before."""
        self._close()
        self._open = OpenItem(item, len(self._items))
        self._emit("response.output_item.added", output_index=len(self._items), item=item)
        if not isinstance(item, OutputCall):
            part = OutputText("") if isinstance(item, OutputMessage) else ReasoningText("")
            self._emit_of_item("response.content_part.added", content_index=0, part=part)

    def _add_text(self, name: str, text: str, **fields: Any) -> None:
        assert self._open is not None
        self._open.texts.append(text)
        self._emit_of_item(name, delta=text, **fields)

    def _close(self, is_complete: bool = True) -> None:
        """End the open item, if there is one."""
        if self._open is None:
            return
        item, text = self._open.item, "".join(self._open.texts)
        status: ItemStatus = "completed" if is_complete else "incomplete"
        if isinstance(item, OutputCall):
            done: OutputItem = msgspec.structs.replace(item, arguments=text, status=status)
            self._emit_of_item("response.function_call_arguments.done", name=item.name, arguments=text)
        elif isinstance(item, OutputReasoning):
            part = ReasoningText(text)
            done = msgspec.structs.replace(item, content=[part], status=status)
            self._emit_of_item("response.reasoning_text.done", content_index=0, text=text)
            self._emit_of_item("response.content_part.done", content_index=0, part=part)
        else:
            part = OutputText(text)
            done = msgspec.structs.replace(item, content=[part], status=status)
            self._emit_of_item("response.output_text.done", content_index=0, text=text, logprobs=[])
            self._emit_of_item("response.content_part.done", content_index=0, part=part)
        self._emit("response.output_item.done", output_index=self._open.index, item=done)
        self._items.append(done)
        self._open = None

    def _emit_of_item(self, event: str, /, **fields: Any) -> None:
        assert self._open is not None
        self._emit(event, item_id=self._open.item.id, output_index=self._open.index, **fields)

    def _emit(self, event: str, /, **fields: Any) -> None:
        if self._is_streamed:
            whole = {"type": event, "sequence_number": self._num_events, **fields}
            self._events.append(sse(encode(whole), event))
            self._num_events += 1

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
