"""Chat messages from a client or from Python: the same rules, and never another exception."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.errors import RequestError
from minisgl.text.messages import ROLES, normalize_messages

PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_parts_are_joined_and_a_developer_is_the_system() -> None:
    messages = [{"role": "developer", "content": PARTS}, {"role": "user", "content": "x", "name": "Ann"}]
    assert normalize_messages(messages) == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "x", "name": "Ann"},
    ]
    assert normalize_messages(tuple(messages)) == normalize_messages(messages)


def test_what_clients_send_back_with_an_answer_is_taken_or_ignored() -> None:
    parts = [{**PARTS[0], "cache_control": {"type": "ephemeral"}}, {"type": "refusal", "refusal": "no"}]
    keys = {"id": "m1", "annotations": [{"a": 1}], "audio": None, "reasoning_details": [{}], "prefix": False}
    assert normalize_messages([{"role": "assistant", "content": parts, "cache_control": {}, **keys}]) == [
        {"role": "assistant", "content": "ano"}
    ]
    refused = {"role": "assistant", "content": None, "refusal": "I can't"}
    assert normalize_messages([refused])[0]["content"] == "I can't"
    assert normalize_messages([{**refused, "content": "but"}])[0]["content"] == "but"
    with pytest.raises(RequestError, match=r"messages\[0\].content is missing"):
        normalize_messages([{**refused, "role": "user"}])


def test_what_clients_add_to_an_answer_may_come_back_with_it() -> None:
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    answer: dict[str, Any] = {"role": "assistant", "content": "x", "tool_calls": [call]}
    added = {"parsed": {"a": 1}, "provider_specific_fields": {"refusal": None}, "annotations": []}
    calls = [{**call, "index": 0, "function": {**function, "parsed_arguments": {}}}]
    assert normalize_messages([{**answer, **added, "tool_calls": calls}]) == normalize_messages([answer])


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hello", "messages"),
        (None, "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([{"role": "user", "content": "x"}, 5], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content"),
        ([{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
        ([{"role": "user", "content": "x", 5: "red"}], "messages[0].5"),
    ],
)
def test_anything_else_is_a_400_that_names_the_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages(messages)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 250


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(NESTED | st.lists(st.fixed_dictionaries({"role": st.sampled_from([*ROLES]), "content": NESTED})))
def test_what_passes_has_a_known_role_and_text(messages: Any) -> None:
    try:
        ready = normalize_messages(messages)
    except RequestError:
        return
    assert len(ready) == len(messages)
    assert all(message["role"] in ROLES.values() for message in ready)
    assert all(isinstance(message["content"], str) for message in ready)
