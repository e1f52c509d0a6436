"""Checks chat messages and normalizes them for a template, with the same rules for the server and `LLM`.

Promise: every returned message has a known role and text content; any other message is a 400 that names it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert, json_type_name, refuse_unknown

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""A client's role -> the role that templates know."""
UNSUPPORTED_IN_MESSAGES: dict[str, Neutral] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a message's text; the parts are joined without a separator."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


MAX_MESSAGES = 10_000
"""Most messages of one conversation. A template's time grows with their number, before the text is known."""
Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """The conversation in a template's form: {"role", "content": text} and a few more text fields.

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
    message: Message = convert(dict(given), Message, f"{where}.")
    text = message.content
    if not isinstance(text, str):
        text = "".join(part.text for part in text)
    ready = {"role": ROLES[message.role], "content": text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            ready[name] = value
    return ready
