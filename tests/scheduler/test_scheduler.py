"""What the scheduler decides, story by story; many are bugs that engines before this one had."""

import numpy as np
import pytest
from scheduler_rig import EOS, build, drain, prompt_of, tokens_of

from minisgl.request import FinishReason, SamplingParams
from minisgl.scheduler import prompts as prompts_module
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.queue.policy import (
    ARRIVALS_PER_PRIORITY,
    MAX_PRIORITY,
    prefill_budget_tokens,
    seniority,
)
from minisgl.scheduler.simulator import Arrival, simulate


def test_abort_while_the_prefill_is_in_flight_retires_once() -> None:
    scheduler, executor, cache = build()
    scheduler.add(0, prompt_of(*range(20)), SamplingParams(max_tokens=5))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort(0)
    (output,) = scheduler.take_outputs()
    assert output.finish_reason is FinishReason.ABORT
    assert cache.num_free_pages < cache.num_usable_pages, "pages came back while the step was in flight"
    scheduler.apply(plan, executor.execute(plan))
    scheduler.check_invariants()
    assert not scheduler.has_work
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_usable_pages


def test_abort_in_the_step_that_gives_eos_answers_once() -> None:
    scheduler, executor, _ = build()
    scheduler.add(0, prompt_of(1, 2), SamplingParams(max_tokens=5))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort(0)
    scheduler.apply(plan, [EOS])
    scheduler.abort(0)
    assert [output.finish_reason for output in scheduler.take_outputs()] == [FinishReason.ABORT]
    scheduler.check_invariants()
    assert executor.model.eos_token_id == EOS


def test_two_equal_prompts_in_one_prefill_share_pages_and_decode_rightly() -> None:
    scheduler, executor, cache = build()
    prompt = prompt_of(*range(10, 30))
    for request_id in range(2):
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=20, seed=7))
    first = scheduler.plan()
    assert first is not None
    results = executor.execute(first)
    second = scheduler.plan()  # before anything is known of the first
    assert second is not None
    second_results = executor.execute(second)
    scheduler.apply(first, results)
    scheduler.apply(second, second_results)
    scheduler.check_invariants()
    assert cache.num_cached_pages == 5, "the tree holds each page of the prompt once"
    third = scheduler.plan()
    assert third is not None
    remapped = [update for update in third.page_updates if update.first_index < 5]
    assert remapped, "the second row goes on reading pages that were given back"
    scheduler.apply(third, executor.execute(third))
    outputs = scheduler.take_outputs() + drain(scheduler, executor)
    expected = executor.model.expected_tokens(prompt.tolist(), 20, 7)
    assert tokens_of(outputs, 0) == tokens_of(outputs, 1) == expected


def num_new_tokens(plan: StepPlan) -> list[int]:
    return [chunk.num_new_tokens for chunk in plan.chunks]


def test_equal_prompts_admitted_in_one_step_are_computed_once() -> None:
    scheduler, executor, _ = build(num_pages=200, max_step_tokens=400, chunk_tokens=400)
    prompt = np.arange(150, dtype=np.int32) % 50
    for request_id in range(8):
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=6, seed=request_id))
    plan = scheduler.plan()
    assert plan is not None
    assert num_new_tokens(plan) == [150, *[150 % 4] * 7], "the others compute their last page only"
    assert scheduler.stats.num_cached_tokens == 7 * 148
    scheduler.apply(plan, executor.execute(plan))
    scheduler.check_invariants()
    outputs = scheduler.take_outputs() + drain(scheduler, executor)
    for request_id in range(8):
        assert tokens_of(outputs, request_id) == executor.model.expected_tokens(
            prompt.tolist(), 6, request_id
        )


def test_a_burst_of_chats_computes_its_system_prompt_once() -> None:
    scheduler, executor, _ = build(num_pages=200, max_step_tokens=400, chunk_tokens=400)
    system = list(range(40))
    prompts = [[*system, 40 + index, 41, 42] for index in range(6)]
    for request_id, prompt in enumerate(prompts):
        scheduler.add(request_id, prompt_of(*prompt), SamplingParams(max_tokens=4, seed=0))
    plan = scheduler.plan()
    assert plan is not None
    assert num_new_tokens(plan) == [43, *[3] * 5]
    scheduler.apply(plan, executor.execute(plan))
    outputs = scheduler.take_outputs() + drain(scheduler, executor)
    for request_id, prompt in enumerate(prompts):
        assert tokens_of(outputs, request_id) == executor.model.expected_tokens(prompt, 4, 0)


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_feed_one_prompt_in_chunks_compute_each_chunk_once(overlap: bool) -> None:
    """Each goes on where the other ended, in the same step, instead of waiting for it."""
    scheduler, executor, _ = build(num_pages=200, max_step_tokens=400, chunk_tokens=32)
    prompt = np.arange(150, dtype=np.int32) % 50
    arrivals = [Arrival(0.0, prompt, SamplingParams(max_tokens=6, seed=index)) for index in range(8)]
    plans: list[StepPlan] = []

    class Recorder:
        """Keeps the plans; what they give is the executor's."""

        context_lens = executor.context_lens

        def execute(self, plan: StepPlan) -> list[int]:
            plans.append(plan)
            return executor.execute(plan)

    served = simulate(scheduler, Recorder(), arrivals, overlap=overlap)
    first, second = num_new_tokens(plans[0]), num_new_tokens(plans[1])
    assert first == [32, 32, 32, 32, 22, 2, 2, 2], "the fifth goes on to the end of the prompt"
    assert second == [2, 2, 2, 2], "the others find the rest when it is their turn again"
    assert not any(plan.chunks for plan in plans[2:])
    for index, one in enumerate(served):
        assert one.token_ids == executor.model.expected_tokens(prompt.tolist(), 6, index)


def test_aborting_the_request_that_computes_a_shared_prefix_leaves_the_others_right() -> None:
    scheduler, executor, cache = build(num_pages=200, max_step_tokens=400, chunk_tokens=400)
    prompt = np.arange(150, dtype=np.int32) % 50
    for request_id in range(3):
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=6, seed=request_id))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.abort(0)
    scheduler.check_invariants()
    scheduler.apply(plan, executor.execute(plan))
    outputs = scheduler.take_outputs() + drain(scheduler, executor)
    for request_id in (1, 2):
        assert tokens_of(outputs, request_id) == executor.model.expected_tokens(
            prompt.tolist(), 6, request_id
        )
    assert cache.num_free_pages + cache.num_evictable_pages == cache.num_usable_pages


def test_admission_counts_pages_so_large_pages_do_not_overcommit() -> None:
    scheduler, executor, _ = build(
        num_pages=129, page_size=256, max_rows=256, max_step_tokens=8192, chunk_tokens=8192, vocab_size=1000
    )
    rng = np.random.default_rng(1)
    for request_id in range(200):
        prompt = rng.integers(4, 1000, 40).astype(np.int32)
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=10, ignore_eos=True))
    outputs = drain(scheduler, executor)
    assert sum(output.finish_reason is FinishReason.LENGTH for output in outputs) == 200


def test_no_token_follows_the_end_when_the_next_step_is_already_launched() -> None:
    scheduler, _, _ = build()
    scheduler.add(0, prompt_of(1, 2, 4), SamplingParams(max_tokens=10))
    first = scheduler.plan()
    second = scheduler.plan()
    assert first is not None
    assert second is not None
    scheduler.apply(first, [EOS])
    (output,) = scheduler.take_outputs()
    assert output.finish_reason is FinishReason.STOP
    assert scheduler.plan() is None
    scheduler.apply(second, [9])
    assert scheduler.take_outputs() == []
    assert not scheduler.has_work
    scheduler.check_invariants()


def test_admission_does_not_reserve_the_whole_max_tokens() -> None:
    scheduler, _, _ = build(num_pages=101, page_size=16, max_step_tokens=64, vocab_size=1000)
    for request_id in range(8):
        scheduler.add(request_id, prompt_of(4 + request_id, 5), SamplingParams(max_tokens=1000))
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.chunks) == 8


def test_under_pressure_the_youngest_is_preempted_and_continues_from_its_cached_prefix() -> None:
    scheduler, executor, _ = build(num_pages=21, page_size=4, max_rows=4, output_reserve_tokens=8)
    prompts = [prompt_of(*range(4 + 10 * i, 12 + 10 * i)) for i in range(4)]
    for request_id, prompt in enumerate(prompts):
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=40, seed=request_id))
    outputs = drain(scheduler, executor)
    assert scheduler.stats.num_preemptions > 0
    for request_id, prompt in enumerate(prompts):
        expected = executor.model.expected_tokens(prompt.tolist(), 40, request_id)
        assert tokens_of(outputs, request_id) == expected
    assert {output.num_cached_tokens for output in outputs} == {0}, "what was cached at first is told"


def test_the_oldest_is_never_preempted_for_a_younger_one() -> None:
    scheduler, executor, _ = build(num_pages=21, page_size=4, max_rows=4, output_reserve_tokens=0)
    for request_id in range(4):
        scheduler.add(request_id, prompt_of(10 + request_id), SamplingParams(max_tokens=60, ignore_eos=True))
    oldest_fed = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        oldest_fed += sum(chunk.token_ids[:4] == prompt_of(10).tobytes() for chunk in plan.chunks)
        scheduler.apply(plan, executor.execute(plan))
        scheduler.take_outputs()
    assert scheduler.stats.num_preemptions > 0
    assert oldest_fed == 1


def test_no_step_is_spent_on_a_request_whose_last_token_is_on_its_way() -> None:
    scheduler, executor, _ = build()
    scheduler.add(0, prompt_of(4, 5), SamplingParams(max_tokens=3, ignore_eos=True))
    plans = []
    while (plan := scheduler.plan()) is not None:
        executor.execute(plan)
        plans.append(plan)
    assert len(plans) == 3


def test_decodes_go_on_in_every_step_while_a_long_prompt_is_fed() -> None:
    scheduler, executor, _ = build(num_pages=200, mixed_step_tokens=8)
    scheduler.add(0, prompt_of(4, 5), SamplingParams(max_tokens=100))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, executor.execute(plan))
    scheduler.add(1, prompt_of(*[6] * 300), SamplingParams(max_tokens=5))
    for _ in range(30):
        plan = scheduler.plan()
        assert plan is not None
        assert len(plan.decode_rows) >= 1, "a prompt starved a decode"
        assert sum(chunk.num_new_tokens for chunk in plan.chunks) <= 8
        scheduler.apply(plan, executor.execute(plan))


@pytest.mark.parametrize(
    ("streamed", "num_prompt_tokens"),
    [([True], 7), ([False], 31), ([False, True], 6), ([False, False], 30)],
)
def test_prompts_are_held_back_only_beside_decodes_that_somebody_reads(
    streamed: list[bool], num_prompt_tokens: int
) -> None:
    scheduler, executor, _ = build(num_pages=200, max_step_tokens=32, mixed_step_tokens=8)
    for request_id, is_streamed in enumerate(streamed):
        scheduler.add(request_id, prompt_of(4, 5), SamplingParams(max_tokens=100), streamed=is_streamed)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, executor.execute(plan))
    scheduler.add(9, prompt_of(*[6] * 300), SamplingParams(max_tokens=5))
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        assert len(plan.decode_rows) == len(streamed)
        assert sum(chunk.num_new_tokens for chunk in plan.chunks) == num_prompt_tokens
        scheduler.apply(plan, executor.execute(plan))


def test_decodes_leave_prompts_half_of_a_mixed_step_and_one_token_at_least() -> None:
    assert [prefill_budget_tokens(n, 64, 8) for n in (1, 3, 4, 5, 60, 63)] == [7, 5, 4, 4, 4, 1]
    assert prefill_budget_tokens(2, 64, 1) == 1
    assert prefill_budget_tokens(10, 64, None) == 54


def test_a_step_never_exceeds_its_token_budget() -> None:
    scheduler, executor, _ = build(num_pages=300, max_step_tokens=20, chunk_tokens=7)
    for request_id in range(20):
        prompt = prompt_of(*[4 + request_id] * (3 + 5 * request_id))
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=6))
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        assert plan.num_new_tokens <= 20
        assert all(chunk.num_new_tokens <= 7 for chunk in plan.chunks)
        scheduler.apply(plan, executor.execute(plan))
        scheduler.take_outputs()


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    scheduler, executor, _ = build(page_size=4)
    prompt = prompt_of(*range(4, 20))
    scheduler.add(0, prompt, SamplingParams(max_tokens=2, seed=1))
    drain(scheduler, executor)
    scheduler.add(1, prompt, SamplingParams(max_tokens=2, seed=1))
    outputs = drain(scheduler, executor)
    assert outputs[-1].num_cached_tokens == 12
    assert tokens_of(outputs, 1) == executor.model.expected_tokens(prompt.tolist(), 2, 1)


def test_rows_of_one_length_are_ordered_by_seniority_not_by_identity() -> None:
    orders = []
    for _ in range(2):
        scheduler, executor, _ = build()
        for request_id in (5, 3, 9):
            scheduler.add(request_id, prompt_of(request_id, 4), SamplingParams(max_tokens=9))
        plans = []
        for _ in range(3):
            plan = scheduler.plan()
            assert plan is not None
            plans.append(plan)
            scheduler.apply(plan, executor.execute(plan))
        orders.append(plans)
    assert orders[0] == orders[1]


def test_the_longest_rows_decode_first_and_their_order_lasts() -> None:
    lengths = {1: 3, 2: 7, 3: 5, 4: 7}
    scheduler, executor, _ = build()
    for request_id, length in lengths.items():
        params = SamplingParams(max_tokens=4, seed=request_id)
        scheduler.add(request_id, prompt_of(*[request_id] * length), params)
    first = scheduler.plan()
    assert first is not None
    row_of = dict(zip(lengths, first.sampled_rows, strict=True))
    scheduler.apply(first, executor.execute(first))
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        assert plan.decode_rows == tuple(row_of[request_id] for request_id in (2, 4, 3, 1))
        scheduler.apply(plan, executor.execute(plan))
    outputs = scheduler.take_outputs()
    for request_id, length in lengths.items():
        expected = executor.model.expected_tokens([request_id] * length, 4, request_id)
        assert tokens_of(outputs, request_id) == expected


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (prompt_of(), "invalid_value"),
        (prompt_of(*[5] * 252), "context_length_exceeded"),
        (prompt_of(*[5] * 5000), "context_length_exceeded"),
        (prompt_of(50), "invalid_token_id"),
        (prompt_of(-1), "invalid_token_id"),
    ],
)
def test_a_bad_prompt_is_answered_and_the_rest_goes_on(prompt: np.ndarray, code: str) -> None:
    scheduler, executor, _ = build()
    scheduler.add(0, prompt_of(4, 5), SamplingParams(max_tokens=3))
    scheduler.add(1, prompt, SamplingParams(max_tokens=3))
    outputs = drain(scheduler, executor)
    (refusal,) = [output for output in outputs if output.request_id == 1]
    assert refusal.finish_reason is FinishReason.ERROR
    assert (refusal.error_status, refusal.error_code) == (400, code)
    assert len(tokens_of(outputs, 0)) == 3


def test_prompt_and_max_tokens_beyond_the_context_are_clamped() -> None:
    scheduler, executor, _ = build(max_context_tokens=20)
    scheduler.add(0, prompt_of(*[5] * 15), SamplingParams(max_tokens=100))
    outputs = drain(scheduler, executor)
    assert len(tokens_of(outputs, 0)) == 5
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_stop_token_ids_end_a_request_and_ignore_eos_does_not() -> None:
    scheduler, _, _ = build()
    scheduler.add(0, prompt_of(1), SamplingParams(max_tokens=3, ignore_eos=True))
    scheduler.add(1, prompt_of(2), SamplingParams(max_tokens=3, stop_token_ids=(9,), ignore_eos=True))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, [EOS, 9])
    outputs = scheduler.take_outputs()
    assert outputs[0].finish_reason is None
    assert outputs[1].finish_reason is FinishReason.STOP


def test_a_preempting_request_is_in_no_further_plan() -> None:
    scheduler, executor, _ = build(num_pages=11, page_size=4, max_rows=3, output_reserve_tokens=0)
    for request_id in range(3):  # the youngest has room in its page when the others need a new one
        prompt = prompt_of(*[10 + request_id] * (3 if request_id == 2 else 4))
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    pending = scheduler.plan()
    assert pending is not None
    results = executor.execute(pending)
    while scheduler.stats.num_preemptions == 0:  # one step in flight, so nobody can be vacated at once
        plan = scheduler.plan()
        assert plan is not None
        next_results = executor.execute(plan)
        victim_row = 2
        if scheduler.stats.num_preemptions:
            assert victim_row not in plan.decode_rows
            assert all(chunk.row != victim_row for chunk in plan.chunks)
        scheduler.apply(pending, results)
        pending, results = plan, next_results
    scheduler.apply(pending, results)
    scheduler.check_invariants()


def test_who_is_preempted_while_the_prompt_ends_is_still_told_its_log_probabilities() -> None:
    scheduler, executor, _ = build(num_pages=5, page_size=4, max_rows=2, output_reserve_tokens=0)
    scheduler.add(0, prompt_of(*range(10, 17)), SamplingParams(max_tokens=3, ignore_eos=True))
    first = scheduler.plan()
    assert first is not None
    scheduler.apply(first, executor.execute(first))
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    scheduler.add(1, prompt_of(*range(20, 28)), params)
    ending = scheduler.plan()  # request 1's prompt ends in the last free page
    assert ending is not None
    assert scheduler.plan() is None  # request 0 needs a page
    assert scheduler.stats.num_preemptions == 1
    (chunk,) = ending.chunks
    lines = np.zeros((len(chunk.targets) // 4, 2), dtype=np.int32)
    scheduler.apply(ending, executor.execute(ending), prompt_logprobs=(lines,))
    outputs = [*scheduler.take_outputs(), *drain(scheduler, executor)]
    told = [output.prompt_logprobs for output in outputs if output.request_id == 1]
    assert told[0] is not None
    assert [entry.token_id for entry in told[0].unpack()] == list(range(21, 28))
    assert told[1:] == [None]


def test_a_low_priority_request_with_a_long_prefix_does_not_pass_a_higher_one() -> None:
    scheduler, executor, _ = build(max_rows=1, num_pages=200)
    hot = prompt_of(*range(4, 24))
    scheduler.add(0, hot, SamplingParams(max_tokens=1))
    drain(scheduler, executor)
    scheduler.add(1, hot, SamplingParams(max_tokens=1), priority=0)
    scheduler.add(2, prompt_of(40, 41), SamplingParams(max_tokens=1), priority=1)
    order = [output.request_id for output in drain(scheduler, executor) if output.finish_reason is not None]
    assert order == [2, 1]


def test_a_longer_prefix_passes_neither_nor_loses_another_priority_that_has_come_between() -> None:
    scheduler, executor, _ = build(max_rows=1, num_pages=200)
    hot, cold, once = prompt_of(*range(4, 24)), prompt_of(40, 41), SamplingParams(max_tokens=1)
    scheduler.add(0, hot, once)
    drain(scheduler, executor)
    scheduler.add(1, cold, once, priority=0)
    scheduler.add(2, hot, once, priority=0)
    for request_id in range(3, ARRIVALS_PER_PRIORITY + 1):  # they only arrive and go
        scheduler.add(request_id, cold, once)
        scheduler.abort(request_id)
    scheduler.take_outputs()
    scheduler.add(ARRIVALS_PER_PRIORITY + 1, cold, once, priority=1)  # as old as the first one, by its level
    order = [output.request_id for output in drain(scheduler, executor) if output.finish_reason is not None]
    assert order == [1, ARRIVALS_PER_PRIORITY + 1, 2]


def test_the_next_turn_of_a_conversation_finds_the_answer_in_the_cache() -> None:
    scheduler, executor, _ = build(page_size=4)
    prompt = list(range(4, 11))
    scheduler.add(0, prompt_of(*prompt), SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
    answer = tokens_of(drain(scheduler, executor), 0)
    scheduler.add(1, prompt_of(*prompt, *answer, 4, 5), SamplingParams(max_tokens=1))
    # 7 + 6 tokens, of which the last was never fed: three full pages.
    assert drain(scheduler, executor)[-1].num_cached_tokens == 12


def test_the_sampling_parameters_reach_the_row() -> None:
    scheduler, _, _ = build()
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, seed=-(2**63))
    scheduler.add(0, prompt_of(4), params)
    scheduler.add(1, prompt_of(5), SamplingParams(top_k=-1))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.row_inits[0][1:] == (0.5, 7, 0.8, 0.1, -(2**63))
    assert plan.row_inits[1].top_k == 0


def test_a_row_that_changes_hands_twice_before_a_step_is_set_up_for_the_last_only() -> None:
    scheduler, executor, _ = build(num_pages=5, prefix_cache=False, max_rows=2)
    scheduler.add(0, np.arange(4, 18, dtype=np.int32), SamplingParams())
    first = scheduler.plan()
    assert first is not None
    scheduler.abort(0)  # its step is in flight and keeps all pages
    for request_id, temperature in ((1, 0.5), (2, 0.25)):
        scheduler.add(request_id, prompt_of(4, 5), SamplingParams(temperature=temperature))
        assert scheduler.plan() is None  # it got a row, but there is no page
        if request_id == 1:
            scheduler.abort(1)
    scheduler.apply(first, executor.execute(first))
    plan = scheduler.plan()
    assert plan is not None
    assert [(init.row, init.temperature) for init in plan.row_inits] == [(plan.chunks[0].row, 0.25)]


def test_a_small_head_is_not_blocked_by_a_larger_request_with_a_better_prefix() -> None:
    scheduler, executor, _ = build(num_pages=41, page_size=4, max_rows=8, output_reserve_tokens=0)
    hot = list(range(4, 44))
    scheduler.add(0, prompt_of(*hot), SamplingParams(max_tokens=1))
    drain(scheduler, executor)
    scheduler.add(1, prompt_of(*[45] * 60), SamplingParams(max_tokens=60, ignore_eos=True))
    first = scheduler.plan()
    assert first is not None
    scheduler.add(2, prompt_of(46, 47), SamplingParams(max_tokens=2, ignore_eos=True))
    scheduler.add(3, prompt_of(*hot, *[48] * 80), SamplingParams(max_tokens=2, ignore_eos=True))
    second = scheduler.plan()
    scheduler.apply(first, executor.execute(first))
    second = second or scheduler.plan()
    assert second is not None
    fed = [np.frombuffer(chunk.token_ids, dtype="<i4")[0] for chunk in second.chunks]
    assert 46 in fed


def test_large_pages_admit_as_many_as_really_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "MAX_ADMISSIONS_PER_STEP", 256)
    scheduler, _, _ = build(
        num_pages=129, page_size=256, max_rows=256, max_step_tokens=8192, chunk_tokens=8192, vocab_size=1000
    )
    for request_id in range(200):
        scheduler.add(request_id, prompt_of(*[4 + request_id] * 40), SamplingParams(max_tokens=10))
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.chunks) == 128


def test_a_request_preempted_before_its_first_token_is_counted_once() -> None:
    scheduler, executor, _ = build(
        num_pages=12, page_size=4, max_rows=2, chunk_tokens=4, output_reserve_tokens=0
    )
    scheduler.add(0, prompt_of(*range(4, 20)), SamplingParams(max_tokens=25, ignore_eos=True))
    scheduler.add(1, prompt_of(*range(20, 44)), SamplingParams(max_tokens=2, ignore_eos=True))
    outputs = drain(scheduler, executor)
    assert {output.num_cached_tokens for output in outputs} == {0}
    assert scheduler.stats.num_prompt_tokens == 16 + 24


def test_higher_priority_is_admitted_first() -> None:
    scheduler, _, _ = build(max_rows=1)
    scheduler.add(0, prompt_of(1), SamplingParams(max_tokens=3), priority=0)
    scheduler.add(1, prompt_of(2), SamplingParams(max_tokens=3), priority=5)
    plan = scheduler.plan()
    assert plan is not None
    assert np.frombuffer(plan.chunks[0].token_ids, dtype="<i4").tolist() == [2]


def test_an_endless_stream_of_a_higher_priority_does_not_starve_a_lower_one() -> None:
    levels = 2
    scheduler, executor, _ = build(max_rows=1, prefix_cache=False)
    scheduler.add(0, prompt_of(1), SamplingParams(max_tokens=1), priority=1)
    order: list[int] = []
    for request_id in range(1, levels * ARRIVALS_PER_PRIORITY + 10):
        scheduler.add(request_id, prompt_of(2), SamplingParams(max_tokens=1), priority=1 + levels)
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
        order += [output.request_id for output in scheduler.take_outputs()]
    assert order.index(0) == levels * ARRIVALS_PER_PRIORITY - 1  # so many went before it
    order.remove(0)
    assert order == sorted(order), "not first come, first served within a priority"
    scheduler.check_invariants()


def test_who_waited_long_is_not_preempted_for_a_later_request_of_a_higher_priority() -> None:
    scheduler, executor, _ = build(num_pages=12, page_size=4, max_rows=2, output_reserve_tokens=0)
    long = SamplingParams(max_tokens=30, ignore_eos=True)
    scheduler.add(0, prompt_of(1), long, priority=0)
    for request_id in range(1, ARRIVALS_PER_PRIORITY):  # they only arrive and go
        scheduler.add(request_id, prompt_of(2), long, priority=1)
        scheduler.abort(request_id)
    scheduler.add(ARRIVALS_PER_PRIORITY, prompt_of(3), long, priority=1)
    outputs = drain(scheduler, executor)
    assert scheduler.stats.num_preemptions > 0
    ends = [output.request_id for output in outputs if output.finish_reason is FinishReason.LENGTH]
    assert ends == [0, ARRIVALS_PER_PRIORITY]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 0), (0, 1)),
        ((1, ARRIVALS_PER_PRIORITY - 1), (0, 0)),
        ((0, 0), (1, ARRIVALS_PER_PRIORITY)),
        ((-1, 0), (2**31 - 1, (MAX_PRIORITY + 1) * ARRIVALS_PER_PRIORITY)),
        ((-(2**31), 0), (0, MAX_PRIORITY * ARRIVALS_PER_PRIORITY)),
    ],
)
def test_a_level_of_priority_is_worth_a_number_of_arrivals(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    assert seniority(*first) < seniority(*second)


def test_a_request_with_the_longer_cached_prefix_may_pass_but_not_for_ever() -> None:
    scheduler, executor, _ = build(max_rows=1, num_pages=200)
    hot = prompt_of(*range(4, 24))
    scheduler.add(0, hot, SamplingParams(max_tokens=1))
    drain(scheduler, executor)
    scheduler.add(1, prompt_of(40, 41), SamplingParams(max_tokens=1))
    for request_id in range(2, 30):
        scheduler.add(request_id, hot, SamplingParams(max_tokens=1))
    order = [output.request_id for output in drain(scheduler, executor) if output.finish_reason is not None]
    assert 1 < order.index(1) <= 8
