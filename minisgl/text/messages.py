"""Chat messages as they come from outside, made ready for a template: the server's rules and `LLM`'s.

Promise: what passes has a known role and text content; anything else is a 400 that names the place.
"""

from collections.abc import Mapping
from typing import Any

from minisgl.errors import RequestError
from minisgl.text.field_rules import Rules, kind_of, one_of, refuse_unsupported, short

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""As a client writes it -> as templates know it."""
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_call_id", "reasoning_content"})
UNSUPPORTED_IN_MESSAGES: Rules = {
    "tool_calls": one_of([]),
    "function_call": one_of(),
    "refusal": one_of(),
    "audio": one_of(),
    "annotations": one_of([]),
}


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
    return [_message(message, f"messages[{rank}]") for rank, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, Any]:
    """One message. `where` names it in errors."""
    if not isinstance(message, Mapping):
        raise RequestError(
            400, "invalid_type", f'{where} must be {{"role", "content"}}, got {kind_of(message)}', where
        )
    refuse_unsupported(message, MESSAGE_FIELDS, UNSUPPORTED_IN_MESSAGES, f"{where}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(
            400,
            "invalid_value",
            f"{where}.role must be one of {', '.join(ROLES)}, got {short(role)}",
            f"{where}.role",
        )
    ready = {"role": ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            field = f"{where}.{name}"
            raise RequestError(400, "invalid_type", f"{field} must be a string, got {kind_of(value)}", field)
        ready[name] = value
    return ready


def _content(content: object, where: str) -> str:
    """A message's text: a string, or text parts put together as they are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            400,
            "invalid_type",
            f"{where} must be a string or a list of text parts, got {kind_of(content)}",
            where,
        )
    return "".join(_part_text(part, f"{where}[{rank}]", where) for rank, part in enumerate(content))


def _part_text(part: object, place: str, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        raise RequestError(
            400, "invalid_value", f'{place} must be a part of type "text", got {short(kind)}', where
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(400, "invalid_type", f"{place}.text must be a string, got {kind_of(text)}", where)
    extra = next((name for name in part if name not in ("type", "text")), None)
    if extra is not None:
        raise RequestError(400, "unknown_parameter", f"unknown parameter: {place}.{short(extra)}", where)
    return text
