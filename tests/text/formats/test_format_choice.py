"""Which format a model has: by flag, by its own response_template, by signs in its chat template."""

from typing import Any

import pytest
from families import FAMILIES

from minisgl.errors import ConfigError, ModelError
from minisgl.text.formats.choose import REASONING_PARSERS, TOOL_PARSERS, choose_format, detect
from minisgl.text.formats.response_template import ResponseTemplate
from minisgl.text.formats.table import CALL_ALIASES, CALLS, HARMONY, THOUGHT_ALIASES, THOUGHTS, Format

RESPONSE_TEMPLATE = {"start_anchor": "A", "fields": {"content": {}}}
ASKS_FOR_PYTHON = "Example Format: [func_name1(params_name1=params_value1)]"
ASKS_FOR_JSON = "Environment: ipython\nRespond in the format"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_is_known_by_its_template(name: str) -> None:
    family = FAMILIES[name]
    source = family.source + {"pythonic": ASKS_FOR_PYTHON, "llama3_json": ASKS_FOR_JSON}.get(name, "")
    found = detect(source, {})
    assert isinstance(found, Format)
    assert (found.calls, found.channels) == (family.format.calls, family.format.channels)
    assert found.thought == family.format.thought


@pytest.mark.parametrize("source", [None, "", "{{ messages }}", "{% if '[' in x %}{\"name\"}{% endif %}"])
def test_without_a_sign_there_is_no_format(source: str | None) -> None:
    assert detect(source, {"chat_template": "<tool_call>"}) is None


def test_a_template_with_thoughts_only_has_no_calls() -> None:
    found = detect("{{ '<think>' }}", {})
    assert isinstance(found, Format)
    assert (found.thought, found.calls) == (THOUGHTS["think"], None)


def test_the_models_own_template_comes_before_a_guess_and_a_flag_before_both() -> None:
    config = {"response_template": RESPONSE_TEMPLATE}
    assert isinstance(detect("<tool_call>", config), ResponseTemplate)
    assert isinstance(choose_format("<tool_call>", config), ResponseTemplate)
    chosen = choose_format("<tool_call><think>", config, tool_parser="pythonic")
    assert isinstance(chosen, Format)
    assert (chosen.calls, chosen.thought) == (CALLS["pythonic"], THOUGHTS["think"])
    chosen = choose_format("<tool_call>", config, reasoning_parser="deepseek_r1")
    assert isinstance(chosen, Format)
    assert (chosen.calls, chosen.thought) == (CALLS["hermes"], THOUGHTS["think"])
    with pytest.raises(ModelError, match="response_template"):
        detect("<tool_call>", {"response_template": {"version": 9}})


def test_none_switches_a_parser_off() -> None:
    chosen = choose_format("<tool_call><think>", {}, reasoning_parser="none")
    assert isinstance(chosen, Format)
    assert (chosen.calls, chosen.thought) == (CALLS["hermes"], None)
    assert choose_format("<tool_call><think>", {}, "none", "none") is None


@pytest.mark.parametrize("name", [*TOOL_PARSERS, *CALL_ALIASES])
def test_every_name_of_tool_parser_is_taken(name: str) -> None:
    chosen = choose_format(None, {}, tool_parser=name)
    assert isinstance(chosen, Format)
    assert chosen is HARMONY or chosen.calls is CALLS[CALL_ALIASES.get(name, name)]


@pytest.mark.parametrize("name", [*REASONING_PARSERS, *THOUGHT_ALIASES])
def test_every_name_of_reasoning_parser_is_taken(name: str) -> None:
    chosen = choose_format(None, {}, reasoning_parser=name)
    assert isinstance(chosen, Format)
    assert chosen is HARMONY or chosen.thought is THOUGHTS[THOUGHT_ALIASES.get(name, name)]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"tool_parser": "hermess"}, "did you mean hermes?"),
        ({"reasoning_parser": "thinks"}, "--reasoning-parser must be one of"),
        ({"tool_parser": "harmony", "reasoning_parser": "think"}, "can't be used together"),
        ({"tool_parser": "hermes", "reasoning_parser": "harmony"}, "can't be used together"),
        ({"tool_parser": "pythonic", "reasoning_parser": "mistral"}, "can't be used together"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_format(None, {}, **flags)
    assert named in str(caught.value)
