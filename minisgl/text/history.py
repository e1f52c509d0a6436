"""Earlier calls as a model's template wants them: templates differ, so each is tried once.

Promise: a conversation with calls is rendered with them, or refused; a template never drops them silently.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

NAME, KEY, VALUE, CALL_ID = "probe_function", "probe_key", "probe_value", "probe0001"
ARGUMENTS = f'{{"{KEY}": "{VALUE}"}}'
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SHORT_ID_CHARS = 9

Messages = Sequence[Mapping[str, Any]]


class Habits(NamedTuple):
    """How a template wants the calls of a conversation."""

    arguments_as_text: bool  # JSON text rather than an object
    content_is_none: bool  # a message with calls must have no content
    short_ids: bool  # call ids have nine letters and digits


def find_habits(render: Callable[[Messages], str]) -> Habits | None:
    """How the template behind `render` wants calls; None if it can't write them."""
    for arguments_as_text in (False, True):
        for content_is_none in (False, True):
            habits = Habits(arguments_as_text, content_is_none, False)
            if _writes_call(render, habits, CALL_ID):
                return habits._replace(
                    short_ids=not _writes_call(render, habits, f"call_{CALL_ID}_{CALL_ID}")
                )
    return None


def _writes_call(render: Callable[[Messages], str], habits: Habits, call_id: str) -> bool:
    call = {"id": call_id, "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "y", "tool_call_id": call_id, "name": NAME},
    ]
    try:
        text = render(for_template(messages, habits))
    except Exception:  # a template is foreign code: any exception says that it does not want this
        return False
    has_arguments = ARGUMENTS in text if habits.arguments_as_text else f"'{KEY}'" not in text
    return NAME in text and KEY in text and VALUE in text and has_arguments


def for_template(messages: Messages, habits: Habits) -> list[dict[str, Any]]:
    """The messages of `normalize_messages`, with calls as the template wants them."""
    ready = []
    for message in messages:
        message = dict(message)
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call, habits) for call in message["tool_calls"]]
            if habits.content_is_none:
                message["content"] = None
        if habits.short_ids and "tool_call_id" in message:
            message["tool_call_id"] = short_id(message["tool_call_id"])
        ready.append(message)
    return ready


def _call(call: Mapping[str, Any], habits: Habits) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function["arguments"]
    if isinstance(arguments, str) and not habits.arguments_as_text:
        function["arguments"] = json.loads(arguments)
    elif not isinstance(arguments, str) and habits.arguments_as_text:
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    call = {**call, "function": function}
    if habits.short_ids and "id" in call:
        call["id"] = short_id(call["id"])
    return call


def short_id(call_id: str) -> str:
    """A call id of nine letters and digits: the id itself if it is one, else always the same one for it."""
    if len(call_id) == SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8], "big")
    chars = []
    for _ in range(SHORT_ID_CHARS):
        number, rank = divmod(number, len(ALPHABET))
        chars.append(ALPHABET[rank])
    return "".join(chars)
