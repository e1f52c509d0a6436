"""Prompts that come together: one computes what they share, the others begin with its snapshot."""

from typing import Any

import numpy as np
import pytest
from scheduler_rig import build, prompt_of, tokens_of
from snapshot_checks import WaitChecks, waiting

from minisgl.request import Request, RequestOutput, SamplingParams
from minisgl.scheduler.plan import Chunk, StepPlan
from minisgl.scheduler.simulator import Arrival, simulate

PARAMS = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
ROOM: dict[str, Any] = {
    "num_pages": 2000,
    "max_step_tokens": 4096,
    "chunk_tokens": 4096,
    "mixed_step_tokens": 4096,
}


class Counted:
    """A scheduler with states, whose every step is checked, and the prompt tokens that it computes."""

    def __init__(self, *, overlap: bool = False, **settings: Any) -> None:
        limits: dict[str, Any] = ROOM | {"num_snapshots": 20, "max_rows": 12} | settings
        self.scheduler, self.executor, self.cache = build(**limits)
        self.computed: list[int] = []
        """Prompt tokens of each step."""
        self.outputs: list[RequestOutput] = []
        self._waits = WaitChecks(self.scheduler)
        self._overlap = overlap
        self._num_added = 0
        self._launched: list[tuple[StepPlan, list[int]]] = []

    def add(self, *prompts: np.ndarray, params: SamplingParams = PARAMS, user: str = "") -> None:
        for prompt in prompts:
            self.scheduler.add(self._num_added, prompt, params, user=user)
            self._num_added += 1

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.computed.append(sum(chunk.num_new_tokens for chunk in plan.chunks))
            self._waits.check(plan)
            self._launched.append((plan, self.executor.execute(plan)))
        while len(self._launched) > (self._overlap and plan is not None):
            self.scheduler.apply(*self._launched.pop(0))
        self.scheduler.check_invariants()
        self.outputs += self.scheduler.take_outputs()

    def drain(self) -> int:
        """To the end; the prompt tokens that were computed."""
        for _ in range(1000):
            if not self.scheduler.has_work:
                return sum(self.computed)
            self.step()
        raise AssertionError("the scheduler does not come to an end")


def random_prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 50, length).astype(np.int32)


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_one_array", [False, True])
def test_choices_of_a_prompt_compute_it_once(overlap: bool, is_one_array: bool) -> None:
    rig = Counted(overlap=overlap)
    prompt = random_prompt(1000)
    rig.add(*[prompt if is_one_array else prompt.copy() for _ in range(8)])
    assert rig.drain() == 996 + 8 * 4
    assert rig.computed[:2] == [1000, 7 * 4], "the others end their prompts in the next step"
    ended = [output for output in rig.outputs if output.finish_reason is not None]
    assert sorted(output.num_cached_tokens for output in ended) == [0, *[996] * 7]
    assert rig.scheduler.stats.num_cached_tokens == 7 * 996
    for number in range(8):
        expected = rig.executor.model.expected_tokens(prompt.tolist(), 4, 1, stops=False)
        assert tokens_of(rig.outputs, number) == expected


def test_a_model_without_states_has_no_such_rule() -> None:
    each: list[dict[str, Any]] = [{"num_snapshots": None}, {"num_snapshots": 0}, {"prefix_cache": False}]
    for settings in each:
        rig = Counted(**settings)
        assert rig.scheduler._prompts._waits is None


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("users", ["", "abcdefgh"])
def test_prompts_that_begin_alike_compute_the_beginning_once(overlap: bool, users: str) -> None:
    """The first one is saved where the others, which wait in the queue, branch off, and at its last page end.

    A step saves one state inside of a chunk, so its chunk ends at the second.
    """
    rig = Counted(overlap=overlap)
    system = random_prompt(600)
    for number in range(8):
        user = users[number] if users else ""
        prompt = joined(system, prompt_of(4 + number), random_prompt(99, number))
        rig.scheduler.add(number, prompt, PARAMS, user=user)
    assert rig.drain() == 600 + 8 * 100
    assert rig.computed[:2] == [696, 4 + 7 * 100]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [104, 105, 600])
def test_a_snapshot_stays_for_those_that_wait_although_others_are_worth_more(
    length: int, overlap: bool
) -> None:
    """Of 104 tokens, the prompt's own first decode step saves a state; of 105, a hit could end behind it."""
    rig = Counted(overlap=overlap, num_snapshots=3)
    for seed in (1, 2, 3):
        rig.add(random_prompt(2000, seed))
        rig.drain()
    before = sum(rig.computed)
    rig.add(*[random_prompt(length)] * 8)
    last = (length - 2) // 4 * 4
    assert rig.drain() - before == length + 7 * (length - last)


def test_where_a_prompt_takes_several_steps_the_last_one_begins_at_its_snapshot() -> None:
    """So that its bits do not depend on where else it was cut."""
    rig = Counted(chunk_tokens=64)
    rig.add(random_prompt(131))
    rig.drain()
    assert rig.computed[:3] == [64, 64, 3]
    rig = Counted(chunk_tokens=130)
    rig.add(random_prompt(131))
    rig.drain()
    assert rig.computed[:2] == [128, 3]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_branch_that_is_found_late_is_computed_twice_and_then_waited_for(overlap: bool) -> None:
    rig = Counted(overlap=overlap)
    system = random_prompt(600)
    prompts = [joined(system, prompt_of(4 + number), random_prompt(99, number)) for number in range(8)]
    rig.add(prompts[0])
    rig.step()
    rig.add(*prompts[1:])
    assert rig.drain() == 700 + 600 + 7 * 100


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_wait_although_other_pages_hold_the_tokens_without_a_snapshot(overlap: bool) -> None:
    """The snapshot is of a page that gives way to the tree's when its step is applied."""
    rig = Counted(overlap=overlap, num_snapshots=2)
    prompt = random_prompt(1000)
    rig.add(prompt)
    rig.drain()
    for seed in (1, 2, 3):
        rig.add(random_prompt(1500, seed))
        rig.drain()
    assert rig.cache.match_length(prompt) == 0, "the test needs pages whose snapshot is gone"
    before = sum(rig.computed)
    rig.add(*[prompt] * 8)
    assert rig.drain() - before == 996 + 8 * 4


def test_long_prompts_are_waited_for_as_long_as_they_take() -> None:
    rig = Counted(max_step_tokens=128, chunk_tokens=64, max_rows=5)
    prompt, other = random_prompt(1000), random_prompt(300, 1)
    rig.add(*[prompt] * 4)
    rig.step()
    assert waiting(rig.scheduler) == {1: 0, 2: 0, 3: 0}
    rig.add(other)
    rig.step()
    assert rig.computed == [64, 128], "a prompt behind them goes on beside the one that they wait for"
    assert rig.drain() == 996 + 4 * 4 + 300


def test_it_waits_only_for_what_saves_enough() -> None:
    for length, least, expected in (
        (80, 512, 76 + 8 * 4),  # seven save 76 tokens each, which is enough together
        (70, 512, 8 * 70),
        (60, 400, 8 * 60),
        (70, 400, 68 + 8 * 2),
    ):
        rig = Counted(least_saved_tokens=least)
        rig.add(*[random_prompt(length)] * 8)
        assert rig.drain() == expected
    for number, shared, expected in ((2, 508, 1216), (2, 512, 512 + 2 * 100), (6, 128, 128 + 6 * 100)):
        rig = Counted()
        system = random_prompt(shared)
        ends = [joined(prompt_of(4 + one), random_prompt(99, one)) for one in range(number)]
        rig.add(*[joined(system, end) for end in ends])
        assert rig.drain() == expected, (number, shared)


@pytest.mark.parametrize("overlap", [False, True])
def test_when_the_prompt_that_others_wait_for_ends_they_go_on_at_once(overlap: bool) -> None:
    rig = Counted(overlap=overlap, chunk_tokens=128)
    prompt = random_prompt(1000)
    rig.add(*[prompt] * 5)
    rig.step()
    rig.step()
    assert waiting(rig.scheduler) == {1: 0, 2: 0, 3: 0, 4: 0}
    rig.scheduler.abort(0)
    rig.step()
    assert rig.computed == [128, 128, 128]
    assert waiting(rig.scheduler) == {2: 1, 3: 1, 4: 1}
    rig.scheduler.abort(1)
    rig.step()
    assert waiting(rig.scheduler) == {}, "nobody waits for a third one"
    assert rig.computed[3] == 3 * 128
    rig.drain()
    for number in (2, 3, 4):
        expected = rig.executor.model.expected_tokens(prompt.tolist(), 4, 1, stops=False)
        assert tokens_of(rig.outputs, number) == expected


def test_a_request_that_waits_can_be_aborted() -> None:
    rig = Counted(chunk_tokens=128)
    rig.add(*[random_prompt(1000)] * 3)
    rig.step()
    rig.scheduler.abort(1)
    rig.step()
    assert waiting(rig.scheduler) == {2: 0}
    rig.drain()
    assert rig.scheduler.stats.num_prompt_tokens == 2000, "it was not admitted as far as counts go"


def test_others_wait_for_no_preempted_prompt() -> None:
    rig = Counted(chunk_tokens=128)
    rig.add(*[random_prompt(1000)] * 3)
    rig.step()
    leader = rig.scheduler._running[0]
    rig.scheduler._preempt(leader, leader)
    rig.step()
    assert 0 not in waiting(rig.scheduler).values()
    assert rig.computed[1] >= 128
    assert rig.drain() < 2 * 1000


def test_salts_and_prompt_log_probabilities_keep_prompts_apart() -> None:
    rig = Counted()
    prompt = random_prompt(1000)
    for number, salt in enumerate("ab"):
        rig.scheduler.add_call(number, [prompt], PARAMS, 1, 0, True, cache_salt=salt)
    assert rig.drain() == 2 * 1000
    rig = Counted()
    rig.add(prompt)
    rig.scheduler.add(1, prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    plan = rig.scheduler.plan()
    assert plan is not None
    assert sum(chunk.num_new_tokens for chunk in plan.chunks) == 2 * 1000


def test_others_wait_for_no_prompt_that_has_no_room_or_shares_nothing() -> None:
    rig = Counted(chunk_tokens=128)
    rig.add(*[random_prompt(1000)] * 2)
    leader = next(iter(rig.scheduler._waiting))
    leader.is_isolated = True
    rig.step()
    assert rig.computed == [2 * 128], "an isolated one leaves no snapshot to others"
    rig = Counted(chunk_tokens=128)
    rig.add(*[random_prompt(1000)] * 2)
    rig.step()
    leader = rig.scheduler._running[0]
    plan_chunk = rig.scheduler._prompts._next_chunk

    def without_room(request: Request, most_tokens: int) -> Chunk | None:
        return plan_chunk(request, 0 if request is leader else most_tokens)

    rig.scheduler._prompts._next_chunk = without_room
    rig.step()
    assert rig.computed == [128, 128], "the other one goes on"
    assert not waiting(rig.scheduler)


def test_a_prompt_with_a_hit_waits_for_none_that_is_behind_it() -> None:
    """A prompt whose log probabilities are asked for is computed from its first token on."""
    rig = Counted(chunk_tokens=128)
    prompt = random_prompt(1000)
    rig.add(prompt[:602])
    rig.drain()
    del rig.computed[:]
    rig.scheduler.add(10, prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    plan = rig.scheduler.plan()
    assert plan is not None
    rig.scheduler.apply(plan, rig.executor.execute(plan))
    rig.scheduler.add(11, prompt, PARAMS)
    plan = rig.scheduler.plan()
    assert plan is not None
    assert [chunk.num_computed_tokens for chunk in plan.chunks] == [128, 600]


def test_a_senior_request_that_waits_takes_its_leader_along() -> None:
    """The one with the higher priority comes first in every step, and gives its turn to the other."""
    rig = Counted(max_step_tokens=64, chunk_tokens=64, mixed_step_tokens=64)
    prompt, between = random_prompt(1000), random_prompt(900, 1)
    rig.scheduler.add(0, prompt, PARAMS)
    rig.step()
    rig.scheduler.add(1, between, PARAMS, priority=1)
    rig.scheduler.add(2, prompt, PARAMS, priority=2)
    ended = []
    while rig.scheduler.has_work:
        rig.step()
        ended += [output.request_id for output in rig.outputs if output.finish_reason is not None]
        rig.outputs.clear()
    assert ended.index(2) < ended.index(1)
    assert sum(rig.computed) == 996 + 2 * 4 + 900


def test_users_pay_for_what_their_prompts_compute() -> None:
    rig = Counted()
    prompt = random_prompt(1000)
    rig.scheduler.add(0, prompt, PARAMS, user="a")
    rig.scheduler.add(1, prompt, PARAMS, user="b")
    first, second = (request.account for request in rig.scheduler.open_requests()[0].values())
    rig.step()
    assert (first.service, second.service) == (1000 + 4, 0)
    rig.step()
    assert (first.service, second.service) == (1000 + 2 * 4, 4 + 4)
    rig.drain()


@pytest.mark.parametrize("overlap", [False, True])
def test_random_families_of_prompts_get_their_tokens_and_compute_less(overlap: bool) -> None:
    """Trees of prompts, at random times, with few or many snapshots; every answer as if alone."""
    saved = total = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        stems = [random_prompt(int(rng.integers(8, 90)), 100 * seed + number) for number in range(3)]
        arrivals = []
        for index in range(24):
            parts = [stems[number] for number in range(int(rng.integers(1, 4)))]
            own = random_prompt(int(rng.integers(0, 12)), index)
            params = SamplingParams(max_tokens=int(rng.integers(1, 12)), seed=index)
            at_ms = float(rng.choice([0, 0, 0, 5, 20, 60]))
            user = str(rng.choice(["", "a", "b"])) if seed % 2 else ""
            arrivals.append(Arrival(at_ms, joined(*parts, own), params, int(rng.integers(0, 2)), user))
        counts = []
        limits: dict[str, Any] = {
            "num_pages": int(rng.integers(100, 400)),
            "max_step_tokens": int(rng.choice([40, 400])),
            "chunk_tokens": int(rng.choice([30, 40])),
            "num_snapshots": int(rng.choice([3, 30])),
        }
        for least in (8, 10**9):
            scheduler, executor, cache = build(**limits, least_saved_tokens=least)
            served = simulate(scheduler, executor, arrivals, overlap=overlap)
            for arrival, result in zip(arrivals, served, strict=True):
                seed_of_it, count = arrival.params.seed or 0, arrival.params.max_tokens or 0
                expected = executor.model.expected_tokens(arrival.prompt.tolist(), count, seed_of_it)
                assert result.token_ids == expected
            scheduler.check_invariants()
            cache.check_invariants()
            counts.append(scheduler.stats.num_cached_tokens)
        saved += counts[0] - counts[1]
        total += counts[0]
    assert saved > 0.2 * total


@pytest.mark.parametrize("seed", range(25))
def test_any_history_of_prompts_that_begin_alike_ends_with_the_right_tokens(seed: int) -> None:
    """Several users and priorities, aborts, preemption, two steps in flight; every plan is checked."""
    rng = np.random.default_rng(seed)

    def one_of(*values: int) -> int:
        return int(rng.choice(values))

    scheduler, executor, cache = build(
        num_pages=int(rng.integers(40, 200)),
        page_size=one_of(1, 4, 8),
        max_rows=int(rng.integers(2, 18)),
        max_step_tokens=one_of(20, 64, 200),
        chunk_tokens=one_of(8, 20),
        num_snapshots=one_of(1, 2, 5, 40),
        least_saved_tokens=one_of(1, 8, 30),
        output_reserve_tokens=one_of(0, 8),
    )
    limit, waits = scheduler.config.max_context_tokens, WaitChecks(scheduler)
    stems = [random_prompt(int(rng.integers(4, 60)), 10 * seed + number) for number in range(3)]
    asked: list[tuple[np.ndarray, int]] = []
    got: list[list[int]] = []
    aborted: set[int] = set()
    launched: list[tuple[StepPlan, list[int]]] = []
    for _ in range(4000):
        if len(asked) < 60 and rng.random() < 0.3:
            for _ in range(one_of(1, 2, 3, 4, 5)):
                stem = stems[one_of(0, 1, 2)][: int(rng.integers(1, 61))]
                prompt = joined(stem, rng.integers(4, 50, one_of(0, 1, 3, 7)))[: limit - 2]
                params = SamplingParams(max_tokens=int(rng.integers(1, 10)), seed=len(asked))
                user, streamed = "ab"[: one_of(0, 1, 2)], bool(one_of(0, 1))
                scheduler.add(len(asked), prompt, params, one_of(0, 1, 2), streamed, user)
                asked.append((prompt, params.max_tokens or 0))
                got.append([])
        if asked and rng.random() < 0.1:
            number = int(rng.integers(len(asked)))
            aborted.add(number)
            scheduler.abort(number)
        plan = scheduler.plan()
        waits.check(plan)
        if plan is not None:
            launched.append((plan, executor.execute(plan)))
        while len(launched) > (plan is not None):
            scheduler.apply(*launched.pop(0))
        scheduler.check_invariants()
        for output in scheduler.take_outputs():
            got[output.request_id] += output.token_ids
        if len(asked) >= 60 and not scheduler.has_work:
            break
    assert not scheduler.has_work, "starvation: requests never end"
    for number, (prompt, num_tokens) in enumerate(asked):
        room = min(num_tokens, limit - len(prompt))
        expected = executor.model.expected_tokens(prompt.tolist(), room, number)
        assert got[number] == expected or (number in aborted and got[number] == expected[: len(got[number])])
    cache.check_invariants()
