"""Users share the engine: the order against a model of its own, the bound on service, and who makes room."""

from collections import Counter
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import build, drain, prompt_of

from minisgl.request import FinishReason, SamplingParams
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.queue.policy import ARRIVALS_PER_PRIORITY
from minisgl.scheduler.queue.shares import OUTPUT_COST
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulator import Arrival, FakeExecutor, simulate

QUIET, FLOOD = "quiet", "flood"


def params_for(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)


class Asked(NamedTuple):
    """A request of the model: its place is its arrival."""

    arrival: int
    user: str
    prompt: int
    output: int
    priority: int

    @property
    def seniority(self) -> int:
        return self.arrival - self.priority * ARRIVALS_PER_PRIORITY


class ModelQueue:
    """The rule in its plainest form: one request at a time, all counters written out."""

    def __init__(self) -> None:
        self.waiting: list[Asked] = []
        self.service: Counter[str] = Counter()
        self.last_left = ""

    def add(self, one: Asked) -> None:
        others = {other.user for other in self.waiting}
        if one.user not in others:
            floor = min((self.service[user] for user in others), default=self.service[self.last_left])
            self.service[one.user] = max(self.service[one.user], floor)
        self.waiting.append(one)

    def next(self) -> Asked:
        """Take out whose turn it is, and count what it costs to run it to its end."""
        firsts = [
            min((one for one in self.waiting if one.user == user), key=lambda one: one.seniority)
            for user in {one.user for one in self.waiting}
        ]
        priority = min(firsts, key=lambda one: one.seniority).priority
        rivals = [one for one in firsts if one.priority == priority]
        chosen = min(rivals, key=lambda one: (self.service[one.user], one.seniority))
        self.waiting.remove(chosen)
        if all(one.user != chosen.user for one in self.waiting):
            self.last_left = chosen.user
        self.service[chosen.user] += chosen.prompt + OUTPUT_COST * chosen.output
        return chosen


EVENT = st.one_of(
    st.tuples(
        st.sampled_from("abc"), st.integers(1, 20), st.integers(1, 6), st.sampled_from([0, 0, 0, 1, -1])
    ),
    st.none(),  # the request that runs ends, and the next one is admitted
)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENT, min_size=1, max_size=30))
def test_the_order_is_that_of_a_model_that_counts_service_one_request_at_a_time(events: list) -> None:
    scheduler, executor, _ = build(max_rows=1, num_pages=40, prefix_cache=False, chunk_tokens=32)
    model = ModelQueue()
    scheduler.add(999, prompt_of(1), params_for(1), user="b")  # from now on several users are known
    scheduler.add(998, prompt_of(1), params_for(1), user="c")
    drain(scheduler, executor)
    model.service.update(b=1 + OUTPUT_COST, c=1 + OUTPUT_COST)  # c was lifted to b, which came first
    model.service["c"] = model.service["b"]
    model.last_left = "c"
    order: list[int] = []
    expected: list[int] = []
    arrivals = count(2)

    def run_one() -> None:
        done = len(order)
        while len(order) == done:
            plan = scheduler.plan()
            assert plan is not None
            scheduler.apply(plan, executor.execute(plan))
            scheduler.check_invariants()
            order.extend(one.request_id for one in scheduler.take_outputs() if one.finish_reason)

    for event in [*events, *[None] * len(events)]:
        if event is not None:
            user, prompt, output, priority = event
            one = Asked(next(arrivals), user, prompt, output, priority)
            model.add(one)
            tokens = np.arange(prompt, dtype=np.int32)
            scheduler.add(one.arrival, tokens, params_for(output), priority, user=user)
        elif model.waiting:
            expected.append(model.next().arrival)
            run_one()
    assert order == expected


def run_backlog(
    scheduler: Scheduler, executor: FakeExecutor, owner: dict[int, str], prompts: dict[int, int], steps: int
) -> list[dict[str, int]]:
    """Run `steps` steps; after each, the service of every user as its client would count it."""
    service: Counter[str] = Counter()
    seen: set[int] = set()
    history = []
    for _ in range(steps):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
        for output in scheduler.take_outputs():
            user = owner[output.request_id]
            if output.request_id not in seen:  # its prompt was computed
                seen.add(output.request_id)
                service[user] += prompts[output.request_id]
            service[user] += OUTPUT_COST * len(output.token_ids)
        history.append(dict(service))
    scheduler.check_invariants()
    return history


@settings(max_examples=12, deadline=None)
@given(
    max_rows=st.integers(1, 8),
    shapes=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 25)), min_size=3, max_size=3
    ),  # prompt and output tokens of each user's requests
    num_pages=st.sampled_from([200, 45]),
    seed=st.integers(0, 100),
)
def test_users_with_a_backlog_get_the_same_service_up_to_the_bound_of_the_paper(
    max_rows: int, shapes: list[tuple[int, int]], num_pages: int, seed: int
) -> None:
    """Theorem 4.4 of Sheng et al.: the difference stays under twice what one user may hold at a time."""
    scheduler, executor, _ = build(
        max_rows=max_rows, num_pages=num_pages, max_step_tokens=64, chunk_tokens=64, prefix_cache=False
    )
    rng = np.random.default_rng(seed)
    owner: dict[int, str] = {}
    prompts: dict[int, int] = {}
    for number in range(90 * max_rows):
        user = number % 3
        most_prompt, most_output = shapes[user]
        prompts[number] = int(rng.integers(1, most_prompt + 1))
        owner[number] = "abc"[user]
        output = int(rng.integers(1, most_output + 1))
        tokens = rng.integers(0, 50, prompts[number]).astype(np.int32)
        scheduler.add(number, tokens, params_for(output), user=owner[number])
    longest_prompt = max(prompt for prompt, _ in shapes)
    longest_output = max(output for _, output in shapes)
    held = longest_prompt + max_rows * (longest_prompt + OUTPUT_COST * longest_output)
    history = []
    while all(
        any(request.account.user == user for request in scheduler._waiting) for user in "abc"
    ):  # all of them have a backlog
        history += run_backlog(scheduler, executor, owner, prompts, 1)
    for first, second in ("ab", "bc", "ac"):
        gaps = [service.get(first, 0) - service.get(second, 0) for service in history]
        # Over every interval, not only from the start.
        assert max(gaps, default=0) - min(gaps, default=0) <= 2 * held


def test_a_flood_of_one_user_does_not_delay_the_others_next_request() -> None:
    scheduler, executor, _ = build(max_rows=1)
    for number in range(50):
        scheduler.add(number, prompt_of(number % 40, 1), params_for(2), user=FLOOD)
    scheduler.add(100, prompt_of(9), params_for(1), user=QUIET)
    ends = [one.request_id for one in drain(scheduler, executor) if one.finish_reason is not None]
    assert ends.index(100) <= 1


def test_a_user_saves_up_nothing_while_it_asks_for_nothing() -> None:
    scheduler, executor, _ = build(max_rows=1, prefix_cache=False)
    scheduler.add(0, prompt_of(1), params_for(1), user=QUIET)
    drain(scheduler, executor)
    for number in range(1, 40):
        scheduler.add(number, prompt_of(1, 2), params_for(2), user=FLOOD)
    for _ in range(30):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
    for number in range(100, 120):
        scheduler.add(number, prompt_of(1, 2), params_for(2), user=QUIET)
    scheduler.take_outputs()
    ends = [one.request_id for one in drain(scheduler, executor) if one.finish_reason is not None]
    owners = ["q" if number >= 100 else "f" for number in ends[:20]]
    assert 9 <= owners.count("q") <= 11, "they take turns from now on"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_user_with_nothing_running_gets_a_row_from_a_user_that_has_them_all(overlap: bool) -> None:
    scheduler, executor, _ = build(max_rows=4, num_pages=200)
    arrivals = [Arrival(0.0, prompt_of(5, number), params_for(100), 0, FLOOD) for number in range(12)]
    arrivals += [Arrival(200.0, prompt_of(7), params_for(3), 0, QUIET)]
    served = simulate(scheduler, executor, arrivals, overlap=overlap)
    step_ms = 10.0
    assert served[-1].token_ms[0] - 200.0 < 4 * step_ms, "it waited for a request of the other to end"
    assert scheduler.stats.num_preemptions == 1
    for one, arrival in zip(served, arrivals, strict=True):
        expected = executor.model.expected_tokens(arrival.prompt.tolist(), arrival.params.max_tokens or 0, 0)
        assert one.token_ids[: len(expected)] == expected, "who was preempted goes on where it was"


def test_a_user_with_half_of_the_rows_leaves_the_last_one_to_others() -> None:
    scheduler, executor, _ = build(max_rows=16, num_pages=400, max_step_tokens=64)
    for user in (QUIET, FLOOD):  # both are known, and idle
        scheduler.add(0, prompt_of(1), params_for(1), user=user)
        drain(scheduler, executor)

    def run(steps: int) -> Counter[str]:
        for _ in range(steps):
            plan = scheduler.plan()
            assert plan is not None
            scheduler.apply(plan, executor.execute(plan))
            scheduler.check_invariants()
        return Counter(request.account.user for request in scheduler._running)

    for number in range(1, 40):
        scheduler.add(number, prompt_of(1, number), params_for(80), user=FLOOD)
    assert run(3) == {FLOOD: 15}
    scheduler.add(100, prompt_of(9), params_for(3), user=QUIET)
    assert run(1) == {FLOOD: 15, QUIET: 1}
    assert run(3) == {FLOOD: 15}
    assert scheduler.stats.num_preemptions == 0


def test_rows_move_until_both_users_have_as_many_and_never_back() -> None:
    scheduler, executor, _ = build(max_rows=8, num_pages=400)
    for number in range(20):
        scheduler.add(number, prompt_of(number), params_for(150), user=FLOOD)
    for _ in range(5):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
    for number in range(20, 40):
        scheduler.add(number, prompt_of(number), params_for(150), user=QUIET)
    for _ in range(60):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
        scheduler.check_invariants()
    users = Counter(request.account.user for request in scheduler._running)
    assert users == {FLOOD: 4, QUIET: 4}
    assert scheduler.stats.num_preemptions == 4


def test_pages_too_are_taken_from_the_user_that_has_more_requests() -> None:
    scheduler, executor, _ = build(max_rows=8, num_pages=41, page_size=4, output_reserve_tokens=8)
    for number in range(20):
        scheduler.add(number, prompt_of(*range(10), number), params_for(100), user=FLOOD)
    for _ in range(12):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
    scheduler.add(50, prompt_of(*range(20, 45)), params_for(2), user=QUIET)
    scheduler.take_outputs()
    first_outputs: list[int] = []
    for _ in range(8):
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
        scheduler.check_invariants()
        first_outputs += [output.request_id for output in scheduler.take_outputs()]
    assert 50 in first_outputs
    assert scheduler.stats.num_preemptions > 0


def test_a_long_prompt_of_one_user_does_not_hold_up_the_prompt_of_another() -> None:
    scheduler, executor, _ = build(num_pages=300, max_step_tokens=16, chunk_tokens=16, max_rows=4)
    scheduler.add(0, np.arange(400, dtype=np.int32) % 50, params_for(1), user=FLOOD)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, executor.execute(plan))
    scheduler.add(1, prompt_of(1, 2, 3), params_for(1), user=QUIET)
    plan = scheduler.plan()
    assert plan is not None
    assert [chunk.num_new_tokens for chunk in plan.chunks] == [3, 13]
    scheduler.apply(plan, executor.execute(plan))
    assert [one.request_id for one in scheduler.take_outputs()] == [1]


def decoding_beside(num_streams: int, user: str = FLOOD) -> tuple[Scheduler, FakeExecutor]:
    """A scheduler whose steps have 60 tokens, 16 of them beside streams; so many requests decode."""
    scheduler, executor, _ = build(
        num_pages=300, max_step_tokens=60, chunk_tokens=60, mixed_step_tokens=16, max_rows=8
    )
    for number in range(num_streams):
        scheduler.add(number, prompt_of(number + 1), params_for(200), user=user)
    run_step(scheduler, executor)
    return scheduler, executor


def run_step(scheduler: Scheduler, executor: FakeExecutor) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.apply(plan, executor.execute(plan))
    scheduler.check_invariants()
    return plan


def prompt_tokens(plan: StepPlan) -> list[int]:
    return [chunk.num_new_tokens for chunk in plan.chunks]


def test_a_prompt_of_a_user_below_its_share_owes_no_pace_to_the_streams_of_a_flood() -> None:
    prompt = np.arange(100, dtype=np.int32) % 50
    scheduler, executor = decoding_beside(3)
    scheduler.add(10, prompt, params_for(9), user=QUIET)
    scheduler.add(11, prompt[::-1].copy(), params_for(9), user=FLOOD)
    assert prompt_tokens(run_step(scheduler, executor)) == [57]
    # What the prompt cost changes whose turn it is, and no more: the flood's own prompt minds its streams.
    assert prompt_tokens(run_step(scheduler, executor)) == [13, 43]
    # Now the quiet user has a stream itself, whose pace the flood's prompt minds.
    assert prompt_tokens(run_step(scheduler, executor)) == [12]


@pytest.mark.parametrize(
    ("num_streams", "user", "why"),
    [
        (2, FLOOD, "as many rows but one are no flood"),
        (3, QUIET, "its own streams"),
    ],
)
def test_other_prompts_leave_streams_their_pace(num_streams: int, user: str, why: str) -> None:
    scheduler, executor = decoding_beside(num_streams, user)
    scheduler.add(9, prompt_of(1), params_for(1), user="a third one")
    run_step(scheduler, executor)
    scheduler.add(10, np.arange(100, dtype=np.int32) % 50, params_for(9), user=QUIET)
    assert prompt_tokens(run_step(scheduler, executor)) == [16 - num_streams], why


def test_a_user_with_more_service_leaves_the_streams_of_others_their_pace() -> None:
    scheduler, executor = decoding_beside(3)
    scheduler.add(10, np.arange(400, dtype=np.int32) % 50, params_for(1), user=QUIET)
    plans = [run_step(scheduler, executor) for _ in range(9)]
    assert not plans[-1].chunks
    scheduler.add(11, np.arange(100, dtype=np.int32)[::-1] % 50, params_for(9), user=QUIET)
    assert prompt_tokens(run_step(scheduler, executor)) == [13]


def test_a_long_prompt_is_not_held_up_for_ever_by_short_ones_of_another_user() -> None:
    scheduler, executor, _ = build(num_pages=400, max_step_tokens=16, chunk_tokens=16, prefix_cache=False)
    scheduler.add(0, np.arange(300, dtype=np.int32) % 50, params_for(1), user="long")
    ends: list[int] = []
    number = 0
    for number in range(1, 200):
        scheduler.add(number, np.arange(16, dtype=np.int32), params_for(1), user="short")
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
        ends += [one.request_id for one in scheduler.take_outputs() if one.finish_reason is not None]
        if 0 in ends:
            break
    assert 0 in ends
    assert number < 45, "the long prompt got half of the steps at least"


def test_a_higher_priority_goes_before_a_user_with_less_service() -> None:
    scheduler, executor, _ = build(max_rows=1)
    scheduler.add(0, prompt_of(1), params_for(1), user=QUIET)
    drain(scheduler, executor)
    scheduler.add(1, prompt_of(2, 3), params_for(9), user=FLOOD, priority=1)
    scheduler.add(2, prompt_of(2, 4), params_for(9), user=FLOOD, priority=1)
    scheduler.add(3, prompt_of(4), params_for(1), user=QUIET, priority=0)
    ends = [one.request_id for one in drain(scheduler, executor) if one.finish_reason is not None]
    assert ends == [1, 2, 3]


def test_when_pages_run_out_the_user_with_the_most_service_makes_room() -> None:
    scheduler, executor, _ = build(num_pages=17, page_size=4, max_rows=4, output_reserve_tokens=0)
    for number in range(3):
        scheduler.add(number, prompt_of(1, 2, number), params_for(40), user=FLOOD)
    scheduler.add(3, prompt_of(9), params_for(25), user=QUIET)
    preempted: Counter[int] = Counter()
    ends: list[int] = []
    for _ in range(400):
        if not scheduler.has_work:
            break
        before = {request.request_id for request in scheduler._running}
        plan = scheduler.plan()
        assert plan is not None
        gone = before - {request.request_id for request in scheduler._running}
        preempted.update(gone)
        scheduler.apply(plan, executor.execute(plan))
        scheduler.check_invariants()
        ends += [one.request_id for one in scheduler.take_outputs() if one.finish_reason is not None]
    assert sum(preempted.values()) > 0
    assert preempted[3] == 0, "the youngest request is of the user with the least service"
    assert ends[0] == 3


def requests_of_a_workload(rng: np.random.Generator, users: str) -> list[Arrival]:
    return [
        Arrival(
            float(rng.integers(0, 400)),
            rng.integers(0, 3, rng.integers(1, 40)).astype(np.int32),
            SamplingParams(max_tokens=int(rng.integers(1, 40)), seed=number),
            int(rng.integers(0, 2)),
            str(rng.choice(list(users))),
        )
        for number in range(60)
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_with_one_user_every_plan_is_as_without_users(overlap: bool) -> None:
    plans: dict[str, list[StepPlan]] = {"": [], "alice": []}
    for user, found in plans.items():
        scheduler, executor, _ = build(num_pages=25, max_rows=4, output_reserve_tokens=0, eos_one_in=40)
        real = executor.execute

        def execute(plan: StepPlan, found: list[StepPlan] = found, real=real) -> list[int]:
            found.append(plan)
            return real(plan)

        executor.execute = execute
        arrivals = requests_of_a_workload(np.random.default_rng(3), "x")
        simulate(scheduler, executor, [one._replace(user=user) for one in arrivals], overlap=overlap)
        assert scheduler.stats.num_preemptions > 0
        assert {account.service for account in scheduler._shares._accounts.values()} == {0}
    assert plans[""] == plans["alice"]


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_of_competing_users_get_the_tokens_of_the_model(overlap: bool) -> None:
    scheduler, executor, cache = build(num_pages=40, max_rows=4, output_reserve_tokens=4, eos_one_in=12)
    arrivals = requests_of_a_workload(np.random.default_rng(5), "abc")
    served = simulate(scheduler, executor, arrivals, overlap=overlap)
    for one, arrival in zip(served, arrivals, strict=True):
        seed = arrival.params.seed or 0
        assert one.token_ids == executor.model.expected_tokens(
            arrival.prompt.tolist(), arrival.params.max_tokens or 0, seed
        )
        assert one.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert cache.num_free_pages + cache.num_cached_pages == cache.num_usable_pages


def first_token_p99_ms(with_flood: bool, flood_user: str = FLOOD, mixed_step_tokens: int = 1024) -> float:
    """The quiet user's 99th percentile of the time to the first token, in the simulator's virtual time."""
    rng = np.random.default_rng(1)
    scheduler, executor, _ = build(
        max_rows=16,
        num_pages=1500,
        page_size=16,
        max_step_tokens=1024,
        chunk_tokens=1024,
        mixed_step_tokens=mixed_step_tokens,
    )
    arrivals = [
        Arrival(
            100.0 + 250.0 * number + float(rng.integers(0, 120)),
            rng.integers(0, 50, int(rng.integers(200, 800))).astype(np.int32),
            params_for(20),
            0,
            QUIET,
        )
        for number in range(20)
    ]
    if with_flood:
        for _ in range(250):
            prompt = rng.integers(0, 50, int(rng.integers(50, 150))).astype(np.int32)
            arrivals.append(Arrival(0.0, prompt, params_for(int(rng.integers(40, 120))), 0, flood_user))
    served = simulate(scheduler, executor, arrivals, join_decodes=True)
    if with_flood:
        assert max(one.finished_ms for one in served[20:]) > arrivals[19].at_ms, "the flood ended too early"
    return float(np.percentile([one.token_ms[0] - one.arrived_ms for one in served[:20]], 99))


@pytest.mark.parametrize("mixed_step_tokens", [1024, 128])
def test_beside_a_flood_a_quiet_users_first_tokens_take_less_than_twice_their_time(
    mixed_step_tokens: int,
) -> None:
    alone = first_token_p99_ms(False)
    assert first_token_p99_ms(True, mixed_step_tokens=mixed_step_tokens) < 2 * alone
    assert first_token_p99_ms(True, flood_user=QUIET) > 10 * alone, "without users the flood would be felt"
