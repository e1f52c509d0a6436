"""Which fields of a body pass unread, and which are refused because this engine lacks what they ask for.

Promise: a field is read, harmless, neutral, or named in a 400; none is ignored that could change the answer.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from minisgl.errors import RequestError

Rules = Mapping[str, Callable[[object], bool]]
"""Fields that exist elsewhere and not here (yet) -> whether a value asks for nothing."""

HARMLESS = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Say something about the caller, nothing about the answer."""


def _one_of(*neutral: object) -> Callable[[object], bool]:
    return lambda value: any(value == other and type(value) is type(other) for other in neutral)


def _zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _one(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 1


UNSUPPORTED_BY_BOTH: Rules = {
    "frequency_penalty": _zero,
    "presence_penalty": _zero,
    "repetition_penalty": _one,
    "logit_bias": _one_of({}),
    "store": _one_of(False),
}
UNSUPPORTED_BY_CHAT: Rules = {
    **UNSUPPORTED_BY_BOTH,
    "tools": _one_of([]),
    "tool_choice": _one_of("none"),
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "functions": _one_of([]),
    "function_call": _one_of("none"),
    "response_format": _one_of({"type": "text"}),
    "logprobs": _one_of(False),
    "top_logprobs": _zero,
    "modalities": _one_of(["text"]),
    "audio": _one_of(),
    "prediction": _one_of(),
    "reasoning_effort": _one_of("none"),
    "verbosity": _one_of(),
    "web_search_options": _one_of(),
}
UNSUPPORTED_BY_COMPLETIONS: Rules = {
    **UNSUPPORTED_BY_BOTH,
    "best_of": _one,
    "echo": _one_of(False),
    "logprobs": _one_of(),  # 0 asks for the chosen token's
    "suffix": _one_of(""),
}


MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_call_id", "reasoning_content"})
UNSUPPORTED_IN_MESSAGES: Rules = {
    "tool_calls": _one_of([]),
    "function_call": _one_of(),
    "refusal": _one_of(),
    "audio": _one_of(),
    "annotations": _one_of([]),
}


def refuse_unsupported(
    fields: Mapping[str, Any], known: Collection[str], unsupported: Rules, where: str = ""
) -> None:
    """Pass what is known, harmless, null or neutral. `where` stands before a field's name in errors.

    Raises:
        RequestError: 400 `unsupported_parameter` or `unknown_parameter`, with the field.
    """
    for name, value in fields.items():
        if name in known or name in HARMLESS or value is None:
            continue
        field = where + short(name)
        if name not in unsupported:
            raise RequestError(400, "unknown_parameter", f"unknown parameter: {field}", field)
        if not unsupported[name](value):
            raise RequestError(
                400,
                "unsupported_parameter",
                f"{field} = {short(value)} is not supported here; leave it out",
                field,
            )


def kind_of(value: object) -> str:
    """The JSON name of a value's type."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return names.get(type(value), "null")


def short(value: object) -> str:
    """A value for an error message, cut when it is long."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
