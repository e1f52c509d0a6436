"""What is needed, in words; what passes beside the known fields."""

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from minisgl.errors import RequestError
from minisgl.fields import convert_value, describe_type, refuse_unknown

Small = Annotated[int, Meta(ge=0, le=9)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Small, "a whole number from 0 to 9"),
        (Annotated[int, Meta(ge=1)], "a whole number of at least 1"),
        (Annotated[float, Meta(gt=0, le=1)], "a number above 0 and at most 1"),
        (Annotated[float, Meta(gt=0)], "a number above 0"),
        (bool | None, "true or false"),
        (Annotated[str, Meta(min_length=1, max_length=5)], "a string of 1 to 5 characters"),
        (str | list[str], "a string or a list of items, each a string"),
        (
            Annotated[list[Small], Meta(max_length=3)],
            "a list of up to 3 items, each a whole number from 0 to 9",
        ),
        (list[Any], "a list"),
        (dict[str, Any], "an object"),
        (Literal["a", "b"], 'one of "a", "b"'),
    ],
)
def test_a_type_is_said_in_words(kind: Any, words: str) -> None:
    assert describe_type(kind) == words


@pytest.mark.parametrize(
    ("value", "code", "message"),
    [
        (10, "invalid_value", "digit must be a whole number from 0 to 9, got 10"),
        ("1", "invalid_type", 'digit must be a whole number from 0 to 9, got "1"'),
        (True, "invalid_type", "digit must be a whole number from 0 to 9, got true"),
        ("x" * 10**6, "invalid_type", f'digit must be a whole number from 0 to 9, got "{"x" * 56}...'),
        pytest.param(
            10**5000,
            "invalid_value",
            "digit must be a whole number from 0 to 9, got a very large value",
            id="huge",
        ),
    ],
)
def test_a_refusal_says_what_was_needed_and_what_came(value: Any, code: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        convert_value(value, Small, "digit")
    assert (refused.value.code, refused.value.message, refused.value.param) == (code, message, "digit")


def test_the_item_at_fault_is_shown_with_its_place() -> None:
    with pytest.raises(RequestError, match=r"got 12 at grid\[1\]\[2\]$"):
        convert_value([[1], [2, 3, 12]], list[list[Small]], "grid")


def test_a_set_where_a_list_belongs_is_no_accident() -> None:
    with pytest.raises(RequestError, match=r"^words must be "):
        convert_value([{"a", 5}], list[list[str]], "words")


def test_true_is_not_one_but_a_float_may_be() -> None:
    refuse_unknown({"best_of": 1.0}, (), {"best_of": (1,)})
    with pytest.raises(RequestError, match=r"^best_of = true is not supported here"):
        refuse_unknown({"best_of": True}, (), {"best_of": (1,)})
