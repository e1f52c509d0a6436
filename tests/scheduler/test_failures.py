"""Steps that give a row no token: its request ends with an error, and nobody else notices."""

from collections.abc import Sequence

import numpy as np
import pytest
from scheduler_rig import build, drain, prompt_of, tokens_of

from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.scheduler.plan import NO_LOGITS, NONE_ALLOWED, StepPlan
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulator import FakeExecutor

LONG = np.arange(4, 26, dtype=np.int32)  # five pages of four tokens, and two tokens more


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


def step(scheduler: Scheduler, executor: FakeExecutor, **instead: int) -> list[RequestOutput]:
    """One step in which row N gives `rowN` in place of its token."""
    plan = planned(scheduler)
    results = executor.execute(plan)
    scheduler.apply(plan, with_no_token(plan, results, **instead))
    scheduler.check_invariants()
    return scheduler.take_outputs()


def with_no_token(plan: StepPlan, results: Sequence[int], **instead: int) -> list[int]:
    return [instead.get(f"row{row}", token) for row, token in zip(plan.sampled_rows, results, strict=True)]


@pytest.mark.parametrize(
    ("no_token", "status", "code"),
    [(NO_LOGITS, 500, "no_finite_logits"), (NONE_ALLOWED, 400, "no_token_left")],
)
def test_a_row_without_a_token_ends_its_request_alone(no_token: int, status: int, code: str) -> None:
    scheduler, executor, cache = build()
    prompts = [prompt_of(*range(4 + 9 * n, 10 + 9 * n)) for n in range(3)]
    for request_id, prompt in enumerate(prompts):
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=9, seed=request_id, ignore_eos=True))
    outputs = step(scheduler, executor) + step(scheduler, executor, row1=no_token)
    (error,) = [output for output in outputs if output.finish_reason is not None]
    assert (error.request_id, error.finish_reason) == (1, FinishReason.ERROR)
    assert (error.error_status, error.error_code, error.token_ids) == (status, code, [])
    outputs += drain(scheduler, executor)
    for request_id in (0, 2):
        expected = executor.model.expected_tokens(prompts[request_id].tolist(), 9, request_id)
        assert tokens_of(outputs, request_id) == expected
    assert len(tokens_of(outputs, 1)) == 1
    counted = scheduler.stats.num_without_logits, scheduler.stats.num_without_token
    assert counted == ((1, 0) if no_token == NO_LOGITS else (0, 1))
    assert scheduler.stats.num_output_tokens == 19
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_usable_pages


def test_the_step_that_was_launched_already_changes_nothing() -> None:
    scheduler, executor, _ = build()
    scheduler.add(0, LONG, SamplingParams(max_tokens=9))
    first, second = planned(scheduler), planned(scheduler)
    scheduler.apply(first, with_no_token(first, executor.execute(first), row0=NO_LOGITS))
    (error,) = scheduler.take_outputs()
    assert error.finish_reason is FinishReason.ERROR
    scheduler.check_invariants()
    assert scheduler.num_held_rows == 1, "the row came back while a step used it"
    scheduler.apply(second, with_no_token(second, executor.execute(second), row0=NO_LOGITS))
    assert scheduler.take_outputs() == []
    assert scheduler.stats.num_without_logits == 1
    assert not scheduler.has_work
    scheduler.check_invariants()


@pytest.mark.parametrize("ends_by", ["its logits", "an abort"])
def test_no_later_request_gets_keys_and_values_that_the_model_spoiled(ends_by: str) -> None:
    scheduler, executor, cache = build(chunk_tokens=8)
    scheduler.add(0, LONG[:9], SamplingParams(max_tokens=1))
    drain(scheduler, executor)
    assert cache.match_length(LONG) == 8
    # It begins with what is cached, and adds pages chunk by chunk before its logits are known.
    scheduler.add(1, LONG, SamplingParams(max_tokens=9))
    assert step(scheduler, executor) == []
    last = planned(scheduler)
    if ends_by == "an abort":
        scheduler.abort(1)
    scheduler.apply(last, with_no_token(last, executor.execute(last), row0=NO_LOGITS))
    scheduler.check_invariants()
    assert cache.match_length(LONG) == 0
    outputs = drain(scheduler, executor)
    if ends_by == "its logits":
        expected = executor.model.expected_tokens(LONG.tolist(), 9, 0)
        assert tokens_of(outputs, 1) == expected, "its own tokens did not spoil it: computed alone it goes on"
    assert cache.match_length(LONG) == 0, "what is computed alone is not shared"
    # The same prompt is computed from the beginning, and shared again.
    scheduler.add(2, LONG, SamplingParams(max_tokens=9, seed=4))
    outputs = drain(scheduler, executor)
    assert tokens_of(outputs, 2) == executor.model.expected_tokens(LONG.tolist(), 9, 4)
    assert outputs[-1].num_cached_tokens == 0
    assert cache.match_length(LONG) == 20


def test_pages_that_no_request_has_shared_yet_are_not_shared_either() -> None:
    scheduler, executor, cache = build()
    scheduler.add(0, LONG[:3], SamplingParams(max_tokens=30, ignore_eos=True))
    outputs = [output for _ in range(7) for output in step(scheduler, executor)]
    outputs += step(scheduler, executor, row0=NO_LOGITS)
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert cache.match_length([*LONG[:3], *tokens_of(outputs, 0)]) == 0
    assert cache.num_free_pages == cache.num_usable_pages


def test_requests_that_share_a_spoiled_prefix_go_on_with_pages_of_their_own() -> None:
    scheduler, executor, cache = build()
    scheduler.add(0, LONG, SamplingParams(max_tokens=30, seed=0))
    outputs = step(scheduler, executor)
    scheduler.add(1, LONG, SamplingParams(max_tokens=30, seed=7))
    outputs += step(scheduler, executor)
    assert outputs[-1].num_cached_tokens == 20
    outputs += step(scheduler, executor, row1=NO_LOGITS)
    scheduler.add(2, LONG, SamplingParams(max_tokens=30, seed=2))
    outputs += drain(scheduler, executor)
    for request_id, seed in ((0, 0), (1, 7), (2, 2)):
        expected = executor.model.expected_tokens(LONG.tolist(), 30, seed)
        assert tokens_of(outputs, request_id) == expected
    assert scheduler.stats.num_without_logits == 0
    assert {o.num_cached_tokens for o in outputs if o.request_id == 2} == {0}
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_usable_pages


def test_a_request_that_fails_alone_too_ends_once_and_drops_what_was_in_flight() -> None:
    scheduler, executor, cache = build()
    scheduler.add(0, LONG, SamplingParams(max_tokens=1))
    drain(scheduler, executor)
    scheduler.add(1, LONG, SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    first, second = planned(scheduler), planned(scheduler)
    scheduler.apply(first, with_no_token(first, executor.execute(first), row0=NO_LOGITS))
    scheduler.check_invariants()
    scheduler.apply(second, executor.execute(second))  # a token that follows from nothing
    assert scheduler.take_outputs() == []
    scheduler.check_invariants()
    alone = planned(scheduler)
    assert [chunk.num_computed_tokens for chunk in alone.chunks] == [0]
    scheduler.apply(alone, with_no_token(alone, executor.execute(alone), row0=NO_LOGITS))
    (error,) = scheduler.take_outputs()
    assert (error.error_code, error.token_ids) == ("no_finite_logits", [])
    assert scheduler.stats.num_without_logits == 1
    assert not scheduler.has_work
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_usable_pages


def test_what_a_request_computed_stays_cached_when_its_own_rules_end_it() -> None:
    scheduler, executor, cache = build()
    scheduler.add(0, LONG, SamplingParams(max_tokens=9, allowed_token_ids=(5,), bad_words_ids=((5, 5),)))
    (error,) = step(scheduler, executor, row0=NONE_ALLOWED)
    assert error.error_param == "allowed_token_ids"
    assert cache.match_length(LONG) == 20


def test_a_request_that_is_being_preempted_can_fail() -> None:
    scheduler, executor, cache = build(num_pages=5, page_size=4, max_rows=2, output_reserve_tokens=0)
    scheduler.add(0, prompt_of(*range(10, 17)), SamplingParams(max_tokens=3, ignore_eos=True))
    step(scheduler, executor)
    scheduler.add(1, prompt_of(*range(20, 28)), SamplingParams(max_tokens=2))
    ending = planned(scheduler)  # request 1's prompt ends in the last free page
    assert scheduler.plan() is None  # request 0 needs a page
    assert scheduler.stats.num_preemptions == 1
    scheduler.apply(ending, with_no_token(ending, executor.execute(ending), row1=NO_LOGITS))
    scheduler.check_invariants()
    outputs = [*scheduler.take_outputs(), *drain(scheduler, executor)]
    finals = {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}
    assert finals == {0: FinishReason.LENGTH, 1: FinishReason.ERROR}
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_usable_pages


@pytest.mark.parametrize("no_token", [NO_LOGITS, NONE_ALLOWED])
def test_a_request_for_its_prompt_alone_fails_by_the_model_but_not_by_its_rules(no_token: int) -> None:
    scheduler, executor, _ = build()
    scheduler.add(0, LONG, SamplingParams(max_tokens=0))
    (output,) = step(scheduler, executor, row0=no_token)
    expected = FinishReason.ERROR if no_token == NO_LOGITS else FinishReason.LENGTH
    assert output.finish_reason is expected


def test_an_error_forgets_the_prompts_log_probabilities() -> None:
    scheduler, executor, _ = build()
    scheduler.add(0, LONG, SamplingParams(max_tokens=4, prompt_logprobs=0))
    plan = planned(scheduler)
    results = with_no_token(plan, executor.execute(plan), row0=NO_LOGITS)
    lines = np.zeros((len(plan.chunks[0].targets) // 4, 4), dtype=np.int32)
    scheduler.apply(plan, results, None, [lines])
    (output,) = scheduler.take_outputs()
    assert output.prompt_logprobs is None
    assert not scheduler._prompt_logprobs
