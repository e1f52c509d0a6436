"""The scheduler with the real KV manager and a fake engine whose tokens betray any wrong page."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler, SchedulerConfig
from minisgl.scheduler.simulator import Arrival, FakeExecutor, FakeModel, StepCost, simulate

EOS = 3


def prompt_of(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def build(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_rows: int = 8,
    max_step_tokens: int = 32,
    chunk_tokens: int = 32,
    mixed_step_tokens: int = 16,
    max_context_tokens: int | None = None,
    prefix_cache: bool = True,
    eos_one_in: int = 0,
    output_reserve_tokens: int = 64,
    vocab_size: int = 50,
) -> tuple[Scheduler, FakeExecutor, KVCacheManager]:
    cache = KVCacheManager(num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache)
    config = SchedulerConfig(
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        chunk_tokens=chunk_tokens,
        mixed_step_tokens=mixed_step_tokens,
        max_context_tokens=max_context_tokens or (num_pages - 1) * page_size,
        vocab_size=vocab_size,
        output_reserve_tokens=output_reserve_tokens,
        eos_token_ids=(EOS,),
    )
    model = FakeModel(vocab_size=vocab_size, eos_token_id=EOS, eos_one_in=eos_one_in)
    executor = FakeExecutor(model, num_pages=num_pages, page_size=page_size, max_rows=max_rows)
    return Scheduler(config, cache), executor, cache


def drain(scheduler: Scheduler, executor: FakeExecutor, max_steps: int = 10_000) -> list[RequestOutput]:
    """Run serially to the end."""
    outputs = scheduler.take_outputs()
    for _ in range(max_steps):
        if not scheduler.has_work:
            return outputs
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
        scheduler.check_invariants()
        outputs += scheduler.take_outputs()
    raise AssertionError("the scheduler does not come to an end")


def tokens_of(outputs: list[RequestOutput], request_id: int) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.token_ids]


class OverlappedScheduler(RuleBasedStateMachine):
    """Arrivals, aborts and EOS at any moment, with up to two steps in flight, in a tiny pool.

    Prompts come from three letters so that prefixes collide. Every token is checked against a model
    that knows neither pages nor rows.
    """

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        pool_tokens=st.integers(24, 96),
        max_rows=st.integers(1, 6),
        max_step_tokens=st.integers(5, 40),
        chunk_tokens=st.integers(1, 40),
        mixed_step_tokens=st.integers(1, 16),
        output_reserve_tokens=st.sampled_from([0, 0, 4, 64]),
        prefix_cache=st.booleans(),
        eos_one_in=st.sampled_from([0, 3, 12]),
    )
    def start(
        self, page_size: int, pool_tokens: int, prefix_cache: bool, eos_one_in: int, **limits: int
    ) -> None:
        limits["max_rows"] = min(limits["max_rows"], limits["max_step_tokens"])
        limits["chunk_tokens"] = min(limits["chunk_tokens"], limits["max_step_tokens"])
        limits["mixed_step_tokens"] = min(limits["mixed_step_tokens"], limits["max_step_tokens"])
        self.scheduler, self.executor, self.cache = build(
            num_pages=max(pool_tokens // page_size, 3) + 1,
            page_size=page_size,
            prefix_cache=prefix_cache,
            eos_one_in=eos_one_in,
            vocab_size=8,
            **limits,
        )
        self.launched: list[tuple[StepPlan, list[int]]] = []
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.got: dict[int, list[int]] = {}
        self.final: dict[int, FinishReason] = {}
        self.aborted: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=0, max_size=30),
        max_tokens=st.one_of(st.none(), st.integers(1, 60)),
        priority=st.sampled_from([0, 0, 0, 1]),
        streamed=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int | None, priority: int, streamed: bool) -> None:
        request_id = len(self.asked)
        params = SamplingParams(max_tokens=max_tokens, seed=request_id)
        self.asked[request_id] = (prompt, params)
        self.got[request_id] = []
        self.scheduler.add(request_id, prompt_of(*prompt), params, priority, streamed)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def add_the_same_prompt_again(self, data: st.DataObject) -> None:
        prompt, params = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        self.add(prompt, params.max_tokens, 0, True)

    @rule(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=3, max_size=8))
    def add_several_with_long_outputs(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.add(prompt, 40, 0, True)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        if request_id not in self.final:
            self.aborted.add(request_id)
        self.scheduler.abort(request_id)

    @precondition(lambda self: len(self.launched) < 2)
    @rule()
    def launch(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.launched.append((plan, self.executor.execute(plan)))

    @precondition(lambda self: self.launched)
    @rule()
    def apply(self) -> None:
        self.scheduler.apply(*self.launched.pop(0))

    @rule(steps=st.integers(1, 30))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.launch()
            if self.launched:
                self.apply()
                self.outputs_are_right()

    @invariant()
    def outputs_are_right(self) -> None:
        self.scheduler.check_invariants()
        limit = self.scheduler.config.max_context_tokens
        for output in self.scheduler.take_outputs():
            request_id = output.request_id
            assert request_id not in self.final, "an output after the final one"
            prompt, params = self.asked[request_id]
            self.got[request_id] += output.token_ids
            got = self.got[request_id]
            room = limit - len(prompt)
            max_new = min(params.max_tokens or room, room)
            if output.finish_reason is None:
                assert output.token_ids
                continue
            self.final[request_id] = output.finish_reason
            if output.finish_reason is FinishReason.ERROR:
                assert len(prompt) == 0 or room <= 0
                continue
            expected = self.executor.model.expected_tokens(prompt, max_new, params.seed or 0)
            if output.finish_reason is FinishReason.ABORT:
                assert request_id in self.aborted
                assert got == expected[: len(got)]
            else:
                assert got == expected, "wrong tokens: a page, row or position was wrong"
                assert (got[-1] == EOS) == (output.finish_reason is FinishReason.STOP)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.scheduler.has_work:
                break
            self.launch()
            if self.launched:
                self.apply()
            self.outputs_are_right()
        assert not self.scheduler.has_work, "starvation: requests never end"
        assert set(self.final) == set(self.asked), "a request without a final answer"
        assert self.cache.num_free_pages + self.cache.num_cached_pages == self.cache.num_usable_pages
        assert self.cache.num_evictable_pages == self.cache.num_cached_pages


OverlappedScheduler.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestOverlappedScheduler = OverlappedScheduler.TestCase


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_workload_gets_the_tokens_of_the_model_with_and_without_overlap(
    overlap: bool, page_size: int
) -> None:
    scheduler, executor, _ = build(num_pages=400 // page_size, page_size=page_size, eos_one_in=20)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 50, 30)
    arrivals = []
    for index in range(60):
        own = rng.integers(0, 50, int(rng.integers(1, 40)))
        prompt = np.concatenate([shared[: int(rng.integers(0, 30))], own]).astype(np.int32)
        params = SamplingParams(max_tokens=int(rng.integers(1, 50)), seed=index)
        arrivals.append(Arrival(float(rng.uniform(0, 500)), prompt, params))
    served = simulate(scheduler, executor, arrivals, overlap=overlap)
    for arrival, result in zip(arrivals, served, strict=True):
        room = min(scheduler.config.max_context_tokens - len(arrival.prompt), arrival.params.max_tokens or 0)
        expected = executor.model.expected_tokens(arrival.prompt.tolist(), room, arrival.params.seed or 0)
        assert result.token_ids == expected
    scheduler.check_invariants()


@pytest.mark.parametrize("overlap", [False, True])
def test_simulated_time_is_the_sum_of_the_steps_and_of_waiting(overlap: bool) -> None:
    scheduler, executor, _ = build(num_pages=100, page_size=4)
    cost = StepCost(
        decode_ms=10.0,
        per_decode_row_ms=1.0,
        per_context_token_ms=0.5,
        prefill_ms=100.0,
        per_prompt_token_ms=2.0,
        per_attended_token_ms=0.25,
    )
    arrivals = [
        Arrival(5000.0, prompt_of(1, 2, 3), SamplingParams(max_tokens=1)),
        Arrival(50.0, prompt_of(4, 5), SamplingParams(max_tokens=3)),
    ]
    late, early = simulate(scheduler, executor, arrivals, cost=cost, overlap=overlap)
    prefill_ms = 100 + 2 * 2 + 0.25 * 3  # tokens 1 and 2 attend to 1 and 2
    first_ms = 50 + prefill_ms
    assert early.token_ms == [first_ms, first_ms + 11 + 0.5 * 3, first_ms + 2 * 11 + 0.5 * (3 + 4)]
    assert late.token_ms == [5000 + 100 + 2 * 3 + 0.25 * 6]
    assert late.finished_ms == late.token_ms[-1]


def test_the_chunks_of_a_step_take_a_least_time_together() -> None:
    scheduler, executor, _ = build(num_pages=100, page_size=4)
    cost = StepCost(prefill_ms=1.0, per_prompt_token_ms=2.0, per_attended_token_ms=0.0, least_prefill_ms=9.0)
    two = [Arrival(0.0, prompt_of(1, 2), SamplingParams(max_tokens=1)) for _ in range(2)]
    assert [one.finished_ms for one in simulate(scheduler, executor, two, cost=cost)] == [9.0, 9.0]
    five = [Arrival(0.0, prompt_of(4, 5, 6, 7, 8), SamplingParams(max_tokens=1))]
    assert simulate(scheduler, executor, five, cost=cost)[0].finished_ms == 11.0


def test_abort_while_the_prefill_is_in_flight_retires_once() -> None:  # trap 1
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


def test_abort_in_the_step_that_gives_eos_answers_once() -> None:  # trap 2
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


def test_two_equal_prompts_in_one_prefill_share_pages_and_decode_rightly() -> None:  # trap 3
    scheduler, executor, cache = build()
    prompt = prompt_of(*range(10, 30))
    for request_id in range(2):
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=20, seed=7))
    first = scheduler.plan()
    assert first is not None
    results = executor.execute(first)
    second = scheduler.plan()  # feeds the second prompt, before anything is known of the first
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


def test_admission_counts_pages_so_large_pages_do_not_overcommit() -> None:  # trap 4
    scheduler, executor, _ = build(
        num_pages=129, page_size=256, max_rows=256, max_step_tokens=8192, chunk_tokens=8192, vocab_size=1000
    )
    rng = np.random.default_rng(1)
    for request_id in range(200):
        prompt = rng.integers(4, 1000, 40).astype(np.int32)
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=10, ignore_eos=True))
    outputs = drain(scheduler, executor)
    assert sum(output.finish_reason is FinishReason.LENGTH for output in outputs) == 200


def test_no_token_follows_the_end_when_the_next_step_is_already_launched() -> None:  # trap 5
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


def test_admission_does_not_reserve_the_whole_max_tokens() -> None:  # trap 6
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
    ("streamed", "num_prompt_tokens"), [([True], 8), ([False], 31), ([False, True], 8), ([False, False], 30)]
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


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:  # trap 9
    scheduler, executor, _ = build(page_size=4)
    prompt = prompt_of(*range(4, 20))
    scheduler.add(0, prompt, SamplingParams(max_tokens=2, seed=1))
    drain(scheduler, executor)
    scheduler.add(1, prompt, SamplingParams(max_tokens=2, seed=1))
    outputs = drain(scheduler, executor)
    assert outputs[-1].num_cached_tokens == 12
    assert tokens_of(outputs, 1) == executor.model.expected_tokens(prompt.tolist(), 2, 1)


def test_rows_of_one_length_are_ordered_by_seniority_not_by_identity() -> None:  # trap 13
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
def test_a_bad_prompt_is_answered_and_the_rest_goes_on(prompt: np.ndarray, code: str) -> None:  # trap 23
    scheduler, executor, _ = build()
    scheduler.add(0, prompt_of(4, 5), SamplingParams(max_tokens=3))
    scheduler.add(1, prompt, SamplingParams(max_tokens=3))
    outputs = drain(scheduler, executor)
    (refusal,) = [output for output in outputs if output.request_id == 1]
    assert refusal.finish_reason is FinishReason.ERROR
    assert (refusal.error_status, refusal.error_code) == (400, code)
    assert len(tokens_of(outputs, 0)) == 3


def test_prompt_and_max_tokens_beyond_the_context_are_clamped() -> None:  # trap 28
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


def test_a_low_priority_request_with_a_long_prefix_does_not_pass_a_higher_one() -> None:
    scheduler, executor, _ = build(max_rows=1, num_pages=200)
    hot = prompt_of(*range(4, 24))
    scheduler.add(0, hot, SamplingParams(max_tokens=1))
    drain(scheduler, executor)
    scheduler.add(1, hot, SamplingParams(max_tokens=1), priority=0)
    scheduler.add(2, prompt_of(40, 41), SamplingParams(max_tokens=1), priority=1)
    order = [output.request_id for output in drain(scheduler, executor) if output.finish_reason is not None]
    assert order == [2, 1]


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
    scheduler.add(2, prompt_of(6), SamplingParams())
    plan = scheduler.plan()
    assert plan is not None
    assert plan.row_inits[0][1:] == (0.5, 7, 0.8, 0.1, -(2**63), None)
    assert plan.row_inits[1].top_k == 0
    assert plan.row_inits[1].seed != plan.row_inits[2].seed


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


def test_large_pages_admit_as_many_as_really_fit() -> None:
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
