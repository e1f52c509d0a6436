"""The fields of OpenAI's bodies that are refused here unless their value asks for nothing."""

from minisgl.text.field_rules import Rules, one_of


def _one(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 1


UNSUPPORTED_BY_BOTH: Rules = {"store": one_of(False)}
UNSUPPORTED_BY_CHAT: Rules = {
    **UNSUPPORTED_BY_BOTH,
    "tools": one_of([]),
    "tool_choice": one_of("none"),
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "functions": one_of([]),
    "function_call": one_of("none"),
    "response_format": one_of({"type": "text"}),
    "modalities": one_of(["text"]),
    "audio": one_of(),
    "prediction": one_of(),
    "reasoning_effort": one_of("none"),
    "verbosity": one_of(),
    "web_search_options": one_of(),
}
UNSUPPORTED_BY_COMPLETIONS: Rules = {
    **UNSUPPORTED_BY_BOTH,
    "best_of": _one,
    "suffix": one_of(""),
}
