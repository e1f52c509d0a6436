"""What becomes a request, and what is refused."""

from typing import Any

import numpy as np
import pytest

from minisgl.errors import RequestError
from minisgl.request import Request, SamplingParams
from minisgl.scheduler.queue.shares import Account
from minisgl.scheduler.request_factory import RequestFactory

PROMPT = np.array([4, 5, 6], dtype=np.int32)


def factory() -> RequestFactory:
    return RequestFactory(max_context_tokens=10, vocab_size=50, eos_token_ids=(3,))


def make(source: RequestFactory, prompt: np.ndarray = PROMPT, **params: Any) -> Request:
    call = source.check(SamplingParams(**params))
    (request,) = source.make([0], prompt, call, priority=0, streamed=True, account=Account("a"))
    return request


def test_a_request_keeps_the_seed_that_it_brings() -> None:
    assert make(factory(), seed=-5).seed == -5


def test_the_output_ends_at_the_context_and_at_the_tokens_that_end_it() -> None:
    assert make(factory(), max_tokens=100).max_new_tokens == 7
    assert make(factory(), stop_token_ids=(8,)).stop_ids == {3, 8}
    assert make(factory(), stop_token_ids=(8,), ignore_eos=True).stop_ids == {8}


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
        make(factory(), **params)
    assert (refusal.value.status, refusal.value.param) == (400, field)
