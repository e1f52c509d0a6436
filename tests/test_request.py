"""Sampling parameters made in Python: wrong types and values are the request's error, in few words."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.errors import RequestError
from minisgl.request import (
    MAX_SEED,
    PackedLogprobs,
    SamplingParams,
    fit_to_context,
    params_for_choice,
    with_bad_words_ids,
    without_stop_strings,
)
from minisgl.scheduler.logprobs import read_logprobs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 2.5),
        ("max_tokens", "3"),
        ("max_tokens", True),
        ("max_tokens", np.int64(3)),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", 2.5),
        ("top_k", None),
        ("top_p", "0.9"),
        ("min_p", [0.1]),
        ("seed", 1.5),
        ("seed", "7"),
        ("stop", 5),
        ("stop", None),
        ("stop", (5,)),
        ("stop", ("fine", b"END")),
        ("stop", {"END"}),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("stop_token_ids", (1.5,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", ("1",)),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", None),
        ("skip_special_tokens", "no"),
        ("min_tokens", None),
        ("presence_penalty", "1"),
        ("repetition_penalty", True),
        ("logprobs", True),
        ("prompt_logprobs", 1.5),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: "a"}),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", ("a",)),
        ("bad_words", (5,)),
        ("bad_words_ids", (5,)),
        ("bad_words_ids", (("a",),)),
    ],
)
def test_a_wrong_type_is_a_request_error_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field} must be ") as caught:
        SamplingParams(**{field: value})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_type", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("logit_bias", {1: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", (-1,)),
        ("allowed_token_ids", tuple(range(8193))),
        ("bad_words", ("",)),
        ("bad_words", ("x",) * 65),
        ("bad_words_ids", ((),)),
        ("bad_words_ids", (tuple(range(17)),)),
        ("bad_words_ids", ((1,),) * 129),
        ("temperature", float("nan")),
        ("temperature", -0.1),
        pytest.param("temperature", 10**5000, id="huge temperature"),
        ("top_k", -2),
        ("top_p", 0),
        ("min_p", 1.5),
        ("seed", 2**63),
        pytest.param("seed", 10**5000, id="huge seed"),
        ("stop", ("",)),
        ("stop", ""),
        ("stop", ("x" * 1001,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (2**31,)),
        ("stop_token_ids", tuple(range(1025))),
        ("stop_token_ids", [-1] * 200_000),
    ],
)
def test_a_value_out_of_range_is_refused_in_few_words(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field} must be ") as caught:
        SamplingParams(**{field: value})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", field)
    assert len(caught.value.message) < 200


def test_min_tokens_may_not_exceed_max_tokens_and_is_cut_to_the_room_with_it() -> None:
    with pytest.raises(RequestError, match=r"^min_tokens must be from 0 to max_tokens \(3\), got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    fitted = fit_to_context(90, SamplingParams(min_tokens=50), 100)
    assert (fitted.max_tokens, fitted.min_tokens) == (10, 10)


def test_only_a_request_without_output_may_fill_the_context() -> None:
    assert fit_to_context(100, SamplingParams(max_tokens=0), 100).max_tokens == 0
    with pytest.raises(RequestError, match="the prompt has 100 tokens"):
        fit_to_context(100, SamplingParams(max_tokens=1), 100)


def test_a_bad_word_of_too_many_tokens_is_named() -> None:
    params = SamplingParams(bad_words=("long",), bad_words_ids=((5,),))
    assert with_bad_words_ids(params, ((1, 2), (3,))).bad_words_ids == ((5,), (1, 2), (3,))
    with pytest.raises(RequestError, match="bad_words must be words of up to 16 tokens"):
        with_bad_words_ids(params, (tuple(range(17)),))


def test_one_stop_string_is_one_and_lists_are_taken() -> None:
    made: Any = SamplingParams
    assert made(stop="END").stop == ("END",)
    assert made(stop=["a", "b"]).stop == ("a", "b")
    assert made(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert made(stop="x" * 1000).stop == ("x" * 1000,)
    assert hash(made(stop=["a"])) == hash(made(stop=("a",)))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.tuples(st.integers() | st.floats() | st.text(max_size=3)),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), VALUES, max_size=4))
def test_whatever_is_accepted_survives_the_wire(values: dict[str, Any]) -> None:
    try:
        params = fit_to_context(5, SamplingParams(**values), 100)  # as before every sending
    except RequestError:
        return
    data = msgspec.msgpack.encode(params)
    again = msgspec.msgpack.decode(data, type=SamplingParams)
    assert again == params


def test_a_number_of_numpys_that_is_a_float_is_taken() -> None:
    assert SamplingParams(temperature=np.float64(0.5)).temperature == 0.5


def test_packed_log_probabilities_are_those_of_each_line() -> None:
    source = np.random.default_rng(0)
    token_ids = source.integers(0, 1000, 7).astype("<i4")
    for k in (0, 1, 20):
        values = -source.random((7, 1 + k)).astype("<f4")
        values[2] = -np.inf
        counts = source.integers(0, 1000, (7, 1 + k)).astype("<i4")
        bits = values.view("<i4")
        lines = np.concatenate([bits[:, :1], counts, bits[:, 1:]], 1)
        packed = PackedLogprobs(token_ids.tobytes(), lines.tobytes())
        assert len(packed) == 7
        expected = [
            read_logprobs(line, token_id, k) for line, token_id in zip(lines, token_ids.tolist(), strict=True)
        ]
        assert packed.unpack() == expected
    assert PackedLogprobs(b"", b"").unpack() == []


def test_what_is_derived_from_checked_parameters_is_not_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(seed=-2, prompt_logprobs=2, stop=("x",), allowed_token_ids=(1, 2), min_tokens=3)
    monkeypatch.setattr("minisgl.request.convert_value", None)  # would raise a TypeError
    first, second = (params_for_choice(fit_to_context(6, params, 8), index) for index in (0, 1))
    assert (first.max_tokens, first.min_tokens, first.seed, first.prompt_logprobs) == (2, 2, -2, 2)
    assert (second.max_tokens, second.seed, second.prompt_logprobs) == (2, MAX_SEED, None)
    assert without_stop_strings(params).stop == ()
    assert (params.max_tokens, params.seed, params.stop) == (None, -2, ("x",))
