"""A request that brings output of an engine that has ended goes on as after a preemption."""

import random

import numpy as np
import pytest
from scheduler_rig import EOS, build, drain, prompt_of

from minisgl.request import FinishReason, SamplingParams
from minisgl.scheduler.scheduler import Scheduler

SEED = 77


def resume(
    scheduler: Scheduler, prompt: np.ndarray, outputs: list[list[int]], first_id: int = 0, **params: object
) -> None:
    """As many choices as `outputs`."""
    sampling = SamplingParams(**{"seed": SEED, "temperature": 1.0, **params})  # pyright: ignore[reportArgumentType]
    seeds = [SEED] * len(outputs)
    scheduler.add_call(first_id, [prompt], sampling, len(outputs), 0, True, seeds, outputs=outputs)


@pytest.mark.parametrize("num_pages", [64, 14], ids=["room for all", "preempting"])
def test_tokens_go_on_where_the_output_ends(num_pages: int) -> None:
    source = random.Random(num_pages)
    scheduler, executor, cache = build(
        num_pages=num_pages, eos_one_in=30, max_context_tokens=44, output_reserve_tokens=2
    )
    expected: dict[int, list[int]] = {}
    for number in range(20):
        prompt = prompt_of(*(source.randrange(4, 50) for _ in range(source.randrange(1, 15))))
        whole = executor.model.expected_tokens(prompt.tolist(), 25, SEED)
        cut = source.randrange(len(whole))
        expected[number] = whole[cut:]
        resume(scheduler, prompt, [whole[:cut]], number, max_tokens=25)
    ends: dict[int, FinishReason] = {}
    given: dict[int, list[int]] = {number: [] for number in expected}
    for output in drain(scheduler, executor):
        assert output.request_id not in ends
        given[output.request_id] += output.token_ids
        if output.finish_reason is not None:
            ends[output.request_id] = output.finish_reason
    assert given == expected
    assert all(
        ends[number] is (FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH)
        for number, tokens in expected.items()
    )
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_usable_pages


def test_choices_of_one_prompt_bring_their_own_outputs() -> None:
    scheduler, executor, _ = build()
    prompt = prompt_of(5, 6, 7)
    whole = executor.model.expected_tokens([5, 6, 7], 12, SEED)
    resume(scheduler, prompt, [whole[:3], [], whole[:11]], max_tokens=12)
    given: dict[int, list[int]] = {}
    for output in drain(scheduler, executor):
        given.setdefault(output.request_id, []).extend(output.token_ids)
    assert given == {0: whole[3:], 1: whole, 2: whole[11:]}


def test_an_output_that_fills_this_engines_context_ends_at_once() -> None:
    scheduler, executor, _ = build(max_context_tokens=10)
    resume(scheduler, prompt_of(5, 6, 7, 8), [[9] * 6], max_tokens=50)
    (output,) = drain(scheduler, executor)
    assert (output.finish_reason, output.token_ids) == (FinishReason.LENGTH, [])


def test_an_output_with_unknown_tokens_is_refused() -> None:
    scheduler, executor, _ = build()
    resume(scheduler, prompt_of(5), [[6, 50]], max_tokens=5)
    (output,) = drain(scheduler, executor)
    assert (output.error_status, output.error_code) == (400, "invalid_token_id")


def test_its_cached_tokens_are_those_of_the_engine_before() -> None:
    scheduler, executor, _ = build()
    resume(scheduler, prompt_of(*range(4, 24)), [[]], 0, max_tokens=3)
    drain(scheduler, executor)
    resume(scheduler, prompt_of(*range(4, 24)), [[7, 8]], 1, max_tokens=5)
    assert {output.num_cached_tokens for output in drain(scheduler, executor)} == {0}
