"""Chat messages as they come from outside, made ready for a template: the server's rules and `LLM`'s.

Promise: what passes has a known role and text content; anything else is a 400 that names the place.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert, kind_of, refuse_unknown

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""As a client writes it -> as templates know it."""
UNSUPPORTED_IN_MESSAGES: dict[str, Neutral] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the parts of a message's text, which are put together as they are."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1)]


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """The conversation as a template sees it: {"role", "content": text} and a few texts more.

    Raises:
        RequestError: 400 with the message and field at fault.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(
            400, "invalid_type", f"messages must be a list of messages, got {kind_of(messages)}", "messages"
        )
    if not messages:
        raise RequestError(400, "invalid_value", "messages must hold at least one message", "messages")
    return [_normalize(message, f"messages[{rank}]") for rank, message in enumerate(messages)]


def _normalize(given: object, where: str) -> dict[str, Any]:
    """One message. `where` names it in errors."""
    if not isinstance(given, Mapping):
        raise RequestError(
            400, "invalid_type", f'{where} must be {{"role", "content"}}, got {kind_of(given)}', where
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
