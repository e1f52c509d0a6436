"""What becomes a request, and with which seed."""

from typing import Any

import numpy as np
import pytest

from minisgl.errors import RequestError
from minisgl.request import Request, SamplingParams
from minisgl.scheduler.arrivals import Arrivals

PROMPT = np.array([4, 5, 6], dtype=np.int32)


def arrivals(seed: int = 0) -> Arrivals:
    return Arrivals(max_context_tokens=10, vocab_size=50, eos_token_ids=(3,), seed=seed)


def make(source: Arrivals, prompt: np.ndarray = PROMPT, **params: Any) -> Request:
    return source.make(0, prompt, SamplingParams(**params), priority=0, streamed=True)


def test_seeds_differ_by_arrival_and_by_engine_and_repeat() -> None:
    first, second = arrivals(7), arrivals(7)
    many = [make(first).seed for _ in range(500)]
    assert many == [make(second).seed for _ in range(500)]
    assert len({*many, make(arrivals(8)).seed}) == 501
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in many)
    assert min(many) < 0 < max(many)


def test_a_request_keeps_the_seed_that_it_brings() -> None:
    assert make(arrivals(), seed=-5).seed == -5


def test_a_refusal_changes_nobodys_seed() -> None:
    undisturbed, disturbed = arrivals(), arrivals()
    with pytest.raises(RequestError):
        make(disturbed, np.arange(10, dtype=np.int32))
    with pytest.raises(RequestError):
        make(disturbed, np.array([50], dtype=np.int32))
    assert make(disturbed).seed == make(undisturbed).seed


def test_the_output_ends_at_the_context_and_at_the_tokens_that_end_it() -> None:
    assert make(arrivals(), max_tokens=100).max_new_tokens == 7
    assert make(arrivals(), stop_token_ids=(8,)).stop_ids == {3, 8}
    assert make(arrivals(), stop_token_ids=(8,), ignore_eos=True).stop_ids == {8}


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (1, 50)}, "allowed_token_ids"),
        ({"bad_words_ids": ((1, 50),)}, "bad_words_ids"),
        ({"allowed_token_ids": (3,), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": (5,), "bad_words_ids": ((5,), (6,))}, "allowed_token_ids"),
        ({"allowed_token_ids": (3, 5), "min_tokens": 1, "bad_words_ids": ((5,),)}, "allowed_token_ids"),
    ],
)
def test_rules_about_tokens_that_there_are_not_or_that_leave_none_are_refused_by_name(
    params: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as refusal:
        make(arrivals(), **params)
    assert (refusal.value.status, refusal.value.param) == (400, field)
