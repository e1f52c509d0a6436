"""The scheduler under anything that may come, and under whole workloads, against a model of its own."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_rig import EOS, build, prompt_of

from minisgl.request import FinishReason, SamplingParams, TokenLogprobs
from minisgl.scheduler.plan import Chunk, StepPlan
from minisgl.scheduler.simulator import Arrival, StepCost, simulate


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
            notes_changes=False,
            keeps_all=True,
            windows=(),
            num_snapshots=None,
            eos_one_in=eos_one_in,
            vocab_size=8,
            **limits,
        )
        self.launched: list[tuple[StepPlan, list[int], None, list[np.ndarray]]] = []
        self.asked: dict[int, tuple[list[int], SamplingParams]] = {}
        self.got: dict[int, list[int]] = {}
        self.final: dict[int, FinishReason] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.aborted: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=0, max_size=30),
        max_tokens=st.one_of(st.none(), st.integers(1, 60)),
        priority=st.sampled_from([0, 0, 0, 1]),
        streamed=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        user=st.sampled_from(["", "", "a", "b"]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int | None,
        priority: int,
        streamed: bool,
        prompt_logprobs: int | None = None,
        user: str = "",
    ) -> None:
        request_id = len(self.asked)
        params = SamplingParams(max_tokens=max_tokens, seed=request_id, prompt_logprobs=prompt_logprobs)
        self.asked[request_id] = (prompt, params)
        self.got[request_id] = []
        self.scheduler.add(request_id, prompt_of(*prompt), params, priority, streamed, user)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def add_the_same_prompt_again(self, data: st.DataObject) -> None:
        prompt, params = self.asked[data.draw(st.sampled_from(sorted(self.asked)))]
        self.add(prompt, params.max_tokens, 0, True, params.prompt_logprobs)

    @rule(
        prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=3, max_size=8),
        user=st.sampled_from(["", "a", "b"]),
    )
    def add_several_with_long_outputs(self, prompts: list[list[int]], user: str) -> None:
        for prompt in prompts:
            self.add(prompt, 40, 0, True, user=user)

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
            self.launched.append((plan, self.executor.execute(plan), None, prompt_lines(plan)))

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
            if output.prompt_logprobs is not None:
                assert request_id not in self.prompt_logprobs, "the prompt's log probabilities came twice"
                self.prompt_logprobs[request_id] = output.prompt_logprobs.unpack()
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
            if got and params.prompt_logprobs is not None:
                found = self.prompt_logprobs[request_id]
                assert [(one.token_id, one.logprob) for one in found] == [
                    (token, -float(position)) for position, token in enumerate(prompt[1:])
                ]

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


def prompt_lines(plan: StepPlan) -> list[np.ndarray]:
    """Log probabilities of a plan's targets that tell where they come from: minus the position before."""
    if not any(chunk.targets for chunk in plan.chunks):
        return []
    lines = []
    for chunk in plan.chunks:
        packed = np.zeros((len(chunk.targets) // 4, 2), dtype=np.int32)
        positions = np.arange(chunk.num_computed_tokens, chunk.num_computed_tokens + len(packed))
        packed[:, 0] = (-positions.astype(np.float32)).view(np.int32)
        lines.append(packed)
    return lines


OverlappedScheduler.TestCase.settings = settings(max_examples=140, stateful_step_count=40)
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


def test_decodes_that_go_with_chunks_are_tokens_of_the_prefill_where_that_takes_less_time() -> None:
    cost = StepCost(4.0, 0.5, 0.01, prefill_ms=3.0, per_prompt_token_ms=2.0, least_prefill_ms=9.0)
    chunks = (Chunk(0, 0, bytes(4 * 2), True),)

    def both(num_decodes: int) -> tuple[float, float]:
        rows = tuple(range(1, 1 + num_decodes))
        plan = StepPlan(0, (), (), rows, chunks, (*rows, 0), decode_lengths=(50,) * num_decodes)
        return cost.step_ms(plan, 100), cost.step_ms(plan, 100, join_decodes=True)

    assert both(1) == (4 + 0.5 + 1 + 9, 3 + 2 * 3 + 1)
    assert both(6) == (4 + 3 + 1 + 9, 17)  # 3 + 2 * 8 + 1 = 20 would be more
    assert cost.step_ms(StepPlan(0, (), (), (1,), (), (1,)), 100, join_decodes=True) == 5.5


def test_the_chunks_of_a_step_take_a_least_time_together() -> None:
    scheduler, executor, _ = build(num_pages=100, page_size=4)
    cost = StepCost(prefill_ms=1.0, per_prompt_token_ms=2.0, per_attended_token_ms=0.0, least_prefill_ms=9.0)
    two = [Arrival(0.0, prompt_of(1, 2), SamplingParams(max_tokens=1)) for _ in range(2)]
    assert [one.finished_ms for one in simulate(scheduler, executor, two, cost=cost)] == [9.0, 9.0]
    five = [Arrival(0.0, prompt_of(4, 5, 6, 7, 8), SamplingParams(max_tokens=1))]
    assert simulate(scheduler, executor, five, cost=cost)[0].finished_ms == 11.0


@pytest.mark.parametrize("overlap", [False, True])
def test_log_probabilities_of_prompts_come_whole_and_once_whatever_is_preempted(overlap: bool) -> None:
    """Histories in pools so small that requests are preempted while their prompts are fed."""
    num_preemptions = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        scheduler, executor, _ = build(
            num_pages=int(rng.integers(6, 12)),
            max_rows=5,
            max_step_tokens=int(rng.integers(6, 20)),
            chunk_tokens=int(rng.integers(3, 20)),
            mixed_step_tokens=6,
            output_reserve_tokens=0,
        )
        limit = scheduler.config.max_context_tokens
        prompts = [rng.integers(0, 50, int(rng.integers(2, limit // 2))).astype(np.int32) for _ in range(6)]
        for index, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=int(rng.integers(1, 12)), prompt_logprobs=0, seed=index)
            scheduler.add(index, prompt, params)
        found: dict[int, list[TokenLogprobs]] = {}
        launched: list[tuple[StepPlan, list[int], None, list[np.ndarray]]] = []
        while scheduler.has_work:
            plan = scheduler.plan()
            if plan is not None:
                launched.append((plan, executor.execute(plan), None, prompt_lines(plan)))
            while len(launched) > (1 if overlap and plan is not None else 0):
                scheduler.apply(*launched.pop(0))
            for output in scheduler.take_outputs():
                if output.prompt_logprobs is not None:
                    assert output.request_id not in found
                    found[output.request_id] = output.prompt_logprobs.unpack()
        for index, prompt in enumerate(prompts):
            assert [(one.token_id, one.logprob) for one in found[index]] == [
                (token, -float(position)) for position, token in enumerate(prompt[1:].tolist())
            ]
        num_preemptions += scheduler.stats.num_preemptions
    assert num_preemptions > 60
