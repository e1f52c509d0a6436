"""The fields of OpenAI's bodies that are refused here unless their value asks for nothing."""

from minisgl.text.field_rules import Rules, one_of


def _zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


def _one(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 1


UNSUPPORTED_BY_BOTH: Rules = {
    "frequency_penalty": _zero,
    "presence_penalty": _zero,
    "repetition_penalty": _one,
    "logit_bias": one_of({}),
    "store": one_of(False),
}
UNSUPPORTED_BY_CHAT: Rules = {
    **UNSUPPORTED_BY_BOTH,
    "tools": one_of([]),
    "tool_choice": one_of("none"),
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "functions": one_of([]),
    "function_call": one_of("none"),
    "response_format": one_of({"type": "text"}),
    "logprobs": one_of(False),
    "top_logprobs": _zero,
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
    "echo": one_of(False),
    "logprobs": one_of(),  # 0 asks for the chosen token's
    "suffix": one_of(""),
}
