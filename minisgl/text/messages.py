"""Checks chat messages and normalizes them for a template, with the same rules for the server and `LLM`.

Promise: every returned message has a known role and text content, and calls whose arguments are the text of a
JSON object; any other message is a 400 that names it.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert, json_type_name, refuse_unknown, shorten

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""A client's role -> the role that templates know."""
UNSUPPORTED_IN_MESSAGES: dict[str, Neutral] = {
    "function_call": (),
    "audio": (),
    "prefix": (False,),
    **dict.fromkeys(
        (
            *("id", "type", "object", "status", "created", "created_at", "timestamp", "metadata"),
            *("annotations", "cache_control", "thinking_blocks", "reasoning_details"),
            *("parsed", "provider_specific_fields", "extra_content"),
        )
    ),
}
"""None: clients send these keys with answers that they send back, and they change no prompt."""


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A part of a message's text. The parts are joined without a separator; their other keys are ignored."""

    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """A refusal of the assistant, which is text for the template."""

    refusal: str


class FunctionCall(msgspec.Struct, frozen=True):
    """A call's function."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: str | dict[str, Any]
    """A JSON object, or its text; an empty text is an empty object."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model made earlier in the conversation."""

    id: Annotated[str, Meta(min_length=1)]
    function: FunctionCall
    type: Literal["function"] = "function"


IGNORED_IN_CALLS: dict[str, Neutral] = dict.fromkeys(
    ("index", "status", "cache_control", "provider_specific_fields", "extra_content")
)


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation. Only an assistant's turn with calls may do without content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`, which counts if both are given."""
    refusal: str | None = None
    """An assistant's refusal: its text, if it has no content."""


MAX_MESSAGES = 10_000
"""Most messages of one conversation. A template's time grows with their number, before the text is known."""
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """The conversation in one form: {"role", "content": text}, a few more text fields, and "tool_calls".

    Raises:
        RequestError: 400 with the message and field at fault.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(
            400,
            "invalid_type",
            f"messages must be a list of messages, got {json_type_name(messages)}",
            "messages",
        )
    if not messages:
        raise RequestError(400, "invalid_value", "messages must hold at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        text = f"messages must hold up to {MAX_MESSAGES} messages, got {len(messages)}; leave the oldest out"
        raise RequestError(400, "invalid_value", text, "messages")
    return [_normalize(message, f"messages[{rank}]") for rank, message in enumerate(messages)]


def _normalize(given: object, where: str) -> dict[str, Any]:
    """Normalize one message. `where` names it in errors."""
    if not isinstance(given, Mapping):
        raise RequestError(
            400, "invalid_type", f'{where} must be {{"role", "content"}}, got {json_type_name(given)}', where
        )
    refuse_unknown(given, Message.__struct_fields__, UNSUPPORTED_IN_MESSAGES, f"{where}.")
    given = dict(given)
    calls = given.pop("tool_calls", None)
    calls = None if calls in ([], ()) else calls
    message: Message = convert(given, Message, f"{where}.")
    text = message.content
    if text is None and message.role == "assistant":
        text = message.refusal
    if text is None and (message.role != "assistant" or calls is None):
        raise RequestError(
            400, "missing_required_parameter", f"{where}.content is missing", f"{where}.content"
        )
    if not isinstance(text, str):
        text = "".join(part.text if isinstance(part, TextPart) else part.refusal for part in text or ())
    ready: dict[str, Any] = {"role": ROLES[message.role], "content": text}
    fields = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning
        if message.reasoning_content is None
        else message.reasoning_content,
    }
    ready |= {name: value for name, value in fields.items() if value is not None}
    if calls is not None:
        if message.role != "assistant" or not isinstance(calls, list | tuple):
            text = f"{where}.tool_calls must be a list of calls in a message of the assistant"
            raise RequestError(400, "invalid_value", text, f"{where}.tool_calls")
        ready["tool_calls"] = [
            _normalize_call(call, f"{where}.tool_calls[{rank}]") for rank, call in enumerate(calls)
        ]
    return ready


def _normalize_call(given: object, where: str) -> dict[str, Any]:
    """Check one call of the conversation; its arguments become JSON text."""
    if not isinstance(given, Mapping):
        text = f'{where} must be {{"id", "function"}}, got {json_type_name(given)}'
        raise RequestError(400, "invalid_type", text, where)
    refuse_unknown(given, ToolCall.__struct_fields__, IGNORED_IN_CALLS, f"{where}.")
    given = {name: value for name, value in given.items() if value is not None}
    function = given.get("function")
    if isinstance(function, Mapping):
        refuse_unknown(
            function, FunctionCall.__struct_fields__, {"parsed_arguments": None}, f"{where}.function."
        )
        convert(dict(function), FunctionCall, f"{where}.function.")
    call: ToolCall = convert(given, ToolCall, f"{where}.")
    arguments = arguments_text(call.function.arguments, f"{where}.function.arguments")
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }


def arguments_text(arguments: str | dict[str, Any], where: str) -> str:
    """The JSON text of a call's arguments, as it was given if it was text."""
    try:
        if not isinstance(arguments, str):
            return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        if not arguments.strip():
            return "{}"
        if isinstance(json.loads(arguments), dict):
            return arguments
    except (ValueError, TypeError, RecursionError):
        pass
    text = f"{where} must be the text of a JSON object, got {shorten(arguments)}"
    raise RequestError(400, "invalid_value", text, where)
