"""What is sent again when an engine has ended, and which requests are suspected of its crashes."""

from typing import Any

import numpy as np
import pytest

from minisgl.ipc.calls import add_requests
from minisgl.ipc.messages import (
    AddRequest,
    StepOutput,
)
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.server.engines.sent_requests import NEAR_TOKENS, SentRequests
from minisgl.server.engines.supervision.restarts import LONGEST_WAIT_S, WINDOW_S, Restarts

PROMPTS = [[5, 6, 7], [8, 9]]


def call(n: int = 2, **params: Any) -> AddRequest:
    values: dict[str, Any] = {"max_tokens": 50, "temperature": 1.0, **params}
    (message,) = add_requests(
        range(10, 10 + n * len(PROMPTS)), PROMPTS, SamplingParams(**values), base_seed=3, arrived_s=7.0
    )
    return message


def give(sent: SentRequests, request_id: int, *token_ids: int, end: FinishReason | None = None) -> None:
    sent.take_output(StepOutput([RequestOutput(request_id, list(token_ids), end)]))


def ids(token_ids: bytes) -> list[int]:
    return np.frombuffer(token_ids, "<i4").tolist()


def test_each_request_is_sent_again_behind_its_output_with_its_own_prompt_and_seed() -> None:
    sent, message = SentRequests(), call()
    sent.add(message, sent_to=1)
    give(sent, 10, 1, 2)
    give(sent, 10, 3)
    give(sent, 11, 4, end=FinishReason.STOP)
    give(sent, 13, 5)
    sent.forget(13)
    assert sent.lose(1) == []
    first, third = sent.unsent(2, 9.0)
    assert (first.request_id, ids(first.prompt_ids), first.seeds) == (10, [5, 6, 7], message.seeds[:1])
    assert [ids(one) for one in first.outputs] == [[1, 2, 3]]
    assert (third.request_id, ids(third.prompt_ids), third.seeds) == (12, [8, 9], message.seeds[2:3])
    assert (third.outputs, third.num_requests, third.waiting_since_s) == ((), 1, 9.0)
    assert list(sent.unsent(2, 9.0)) == []


def test_a_call_without_any_output_is_sent_as_it_was() -> None:
    sent, message = SentRequests(), call()
    sent.add(message, sent_to=1)
    sent.lose(1)
    (again,) = sent.unsent(2, 3.0)
    assert again.num_requests == 4
    assert (again.seeds, again.more_prompts) == (message.seeds, message.more_prompts)
    assert again.waiting_since_s == 7.0, "it arrived during the restart"


def test_seeds_of_choices_and_log_probabilities_of_prompts_are_those_of_an_engine_that_lives() -> None:
    sent = SentRequests()
    sent.add(call(seed=100, prompt_logprobs=1), sent_to=1)
    for request_id in (10, 11):
        give(sent, request_id, 1)
    sent.lose(1)
    again = list(sent.unsent(2, 9.0))
    assert [one.params.seed for one in again] == [100, 101, 100, 101]
    assert [one.params.prompt_logprobs for one in again] == [None, None, 1, None], (
        "sent once, for each prompt"
    )


def test_a_request_that_gets_further_between_two_crashes_is_no_suspect() -> None:
    sent = SentRequests()
    sent.add(call(n=1), sent_to=1)
    for life in (1, 2):
        give(sent, 10, *range(NEAR_TOKENS + 1))
        give(sent, 11, *range(1))
        assert sent.lose(life) == []
        assert len(list(sent.unsent(life + 1, 0.0))) == 2
    assert [one.request_id for one in sent.suspects()] == [11]


def test_a_suspect_is_guilty_of_the_next_crash_and_free_once_it_gets_past() -> None:
    sent = SentRequests()
    sent.add(call(n=1), sent_to=1)
    sent.lose(1)
    list(sent.unsent(2, 0.0))
    sent.lose(2)
    first, second = sent.suspects()
    sent.again(first, 3, 0.0)
    assert [one.request_id for one in sent.lose(3)] == [10], "the other one was not in the engine"
    sent.forget(10)
    sent.again(second, 4, 0.0)
    give(sent, 11, *range(NEAR_TOKENS))
    assert not second.is_past_its_crash
    give(sent, 11, 1)
    assert second.is_past_its_crash
    second.acquit()
    assert sent.suspects() == sent.lose(4) == []


def test_requests_that_no_engine_had_are_not_blamed() -> None:
    sent = SentRequests()
    sent.add(call(), sent_to=0)
    for life in (1, 2, 3):
        assert sent.lose(life) == sent.suspects() == []


def test_restarts_are_limited_within_a_window_and_wait_longer_each_time() -> None:
    restarts = Restarts(3)
    assert [restarts.take(now) for now in (0.0, 1.0, 2.0, 3.0)] == [0.0, 1.0, 2.0, None]
    assert restarts.take(WINDOW_S) == 2.0, "the first one has left the window"
    assert restarts.take(3 * WINDOW_S) == 0.0
    many = Restarts(50)
    assert max(wait for _ in range(50) if (wait := many.take(5.0)) is not None) == LONGEST_WAIT_S
    assert Restarts(0).take(0.0) is None


@pytest.mark.parametrize("most", [1, 2])
def test_refused_restarts_do_not_count(most: int) -> None:
    restarts = Restarts(most)
    for _ in range(most):
        assert restarts.take(0.0) is not None
    assert restarts.take(0.0) is None
    assert restarts.num_counted == most
