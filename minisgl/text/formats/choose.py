"""Which format a model's replies have: what a flag names, else the model's own, else a guess.

Promise: the guess reads the chat template's text only. Without a sign of a format it says None.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from minisgl.errors import ConfigError
from minisgl.text.formats.parser import ReplyFormat, reply_markers
from minisgl.text.formats.response_template import load_response_template
from minisgl.text.formats.table import (
    CALL_ALIASES,
    CALLS,
    HARMONY,
    THOUGHT_ALIASES,
    THOUGHTS,
    CallFormat,
    Format,
    Thought,
)

NONE = "none"
"""A flag's value that switches the parser off."""

CALL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|start|>assistant")),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("olmo3", ("<function_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("gemma3", ("```tool_code",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("Environment: ipython", '"parameters": ')),
    ("llama3_json", ("<|python_tag|>", '"parameters": ')),
)
"""What a chat template's text has in it, all of it -> the format; the first row that fits counts."""

THOUGHT_SIGNS = (
    ("gemma4", "<|channel>thought"),
    ("mistral", "[THINK]"),
    ("seed_oss", "<seed:think>"),
    ("think", "<think>"),
    ("think", "</think>"),
)

TOOL_PARSERS = (*CALLS, HARMONY.name)
"""What --tool-parser takes, besides aliases and "none"."""
REASONING_PARSERS = (*THOUGHTS, HARMONY.name)
"""What --reasoning-parser takes, besides aliases and "none"."""


def choose_format(
    chat_template: str | None,
    tokenizer_config: Mapping[str, Any],
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> ReplyFormat | None:
    """The format of a model's replies; None: plain text without thoughts and calls.

    Args:
        tool_parser: the flag's value; None: the model's own format, or a guess.
        reasoning_parser: likewise.

    Raises:
        ConfigError: a flag has an unknown name, or the two can't be used together.
        ModelError: the model's own response_template can't be used.
    """
    named_calls = _lookup("--tool-parser", tool_parser, TOOL_PARSERS, CALL_ALIASES)
    named_thought = _lookup("--reasoning-parser", reasoning_parser, REASONING_PARSERS, THOUGHT_ALIASES)
    if named_calls is None and named_thought is None:
        return detect(chat_template, tokenizer_config)
    text = chat_template or ""
    calls = named_calls or _first_call_sign(text) or NONE
    thought = named_thought or (HARMONY.name if calls == HARMONY.name else _first_thought_sign(text)) or NONE
    if HARMONY.name in (calls, thought):
        if not {calls, thought} <= {HARMONY.name, NONE}:
            raise ConfigError(
                f"--tool-parser {calls} and --reasoning-parser {thought} can't be used together: harmony is "
                "the format of whole replies; name it in both flags or in neither"
            )
        return HARMONY
    return _format(calls, CALLS.get(calls), THOUGHTS.get(thought))


def detect(chat_template: str | None, tokenizer_config: Mapping[str, Any]) -> ReplyFormat | None:
    """The format that a model has by its own files; None if there is no sign of one.

    Raises:
        ModelError: the model's response_template can't be used.
    """
    own = tokenizer_config.get("response_template")
    if own is not None:
        return load_response_template(own)
    text = chat_template or ""
    calls = _first_call_sign(text)
    if calls == HARMONY.name:
        return HARMONY
    return _format(calls or NONE, CALLS.get(calls or ""), THOUGHTS.get(_first_thought_sign(text) or ""))


def _format(name: str, calls: CallFormat | None, thought: Thought | None) -> Format | None:
    if calls is None and thought is None:
        return None
    form = Format(name=name, thought=thought, calls=calls)
    try:
        reply_markers(thought, calls)
    except ValueError as error:
        raise ConfigError(
            f"--tool-parser {name} and this --reasoning-parser can't be used together: {error}"
        ) from None
    return form


def _first_call_sign(text: str) -> str | None:
    return next((name for name, signs in CALL_SIGNS if all(sign in text for sign in signs)), None)


def _first_thought_sign(text: str) -> str | None:
    return next((name for name, sign in THOUGHT_SIGNS if sign in text), None)


def _lookup(flag: str, value: str | None, names: Iterable[str], aliases: Mapping[str, str]) -> str | None:
    """The row's name for a flag's value; None if the flag is not set."""
    if value is None or value in names or value == NONE:
        return value
    if value in aliases:
        return aliases[value]
    like = difflib.get_close_matches(value, [*names, *aliases], 1)
    hint = f"; did you mean {like[0]}?" if like else ""
    raise ConfigError(f"{flag} must be one of {', '.join(names)} or none, got {value}{hint}")
