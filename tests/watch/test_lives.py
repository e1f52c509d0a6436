"""A life's phases follow each other and add up, whatever happens; and memory is bounded."""

import itertools
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from life_checks import check
from watched_scheduler import STEP_MS, WatchedScheduler

from minisgl.engine.watch.lives import MAX_EVENTS, Lives
from minisgl.engine.watch.moments import Moments
from minisgl.ipc.messages import AddRequest
from minisgl.ipc.questions import AskRequests
from minisgl.lives import MAX_ENDED, MAX_MOMENTS, REQUEST_BOUNDS_S, REQUEST_PARTS, LivesAnswer
from minisgl.request import FinishReason, SamplingParams
from minisgl.scheduler.journal import Added, Admitted, Computed, Ended, Held, Note, Preempted, Released
from minisgl.server.watch.words import causes_of

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 30), st.integers(-1, 2)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("wait"), st.integers(0, 500)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(
    actions=actions,
    overlap=st.booleans(),
    num_pages=st.integers(12, 30),
    max_rows=st.integers(1, 5),
    budget=st.integers(6, 32),
    arrived_ms=st.sampled_from([0.0, 400.0]),
)
def test_phases_are_contiguous_in_order_and_add_up_to_the_whole_life(
    actions: list[Any], overlap: bool, num_pages: int, max_rows: int, budget: int, arrived_ms: float
) -> None:
    watched = WatchedScheduler(
        overlap=overlap,
        num_pages=num_pages,
        page_size=4,
        max_rows=min(max_rows, budget),
        max_step_tokens=budget,
        chunk_tokens=budget,
        mixed_step_tokens=budget,
        output_reserve_tokens=4,
        max_context_tokens=40,
    )
    num_added = 0
    for action, *values in actions:
        if action == "add":
            prompt, output, priority = values
            prefix = 5 if prompt % 2 else None
            watched.add(
                num_added, prompt, output, priority=priority, first_token=prefix, arrived_ms=arrived_ms
            )
            num_added += 1
        elif action == "step":
            for _ in range(values[0]):
                watched.step()
        elif action == "wait":
            watched.wait(values[0])
        else:
            watched.scheduler.abort(values[0])
        told = watched.tell()
        for life in told:
            check(life)
        assert [life.number for life in told] == sorted(range(num_added), reverse=True)
    watched.run()
    told = watched.tell()
    assert {life.state for life in told} <= {"ended"}
    for life in told:
        check(life)
        assert life.end in ("stop", "length", "abort", "error")
    round_trip = msgspec.msgpack.decode(
        msgspec.msgpack.encode(LivesAnswer(requests=told, num_open=0, num_ended=num_added, moments=[])),
        type=LivesAnswer,
    )
    assert round_trip.requests == told


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.booleans()), min_size=1, max_size=8)
)
def test_times_of_requests_are_those_of_their_lives(lengths: list[tuple[int, int, bool]]) -> None:
    watched = WatchedScheduler(
        num_pages=14,
        page_size=4,
        max_rows=3,
        max_step_tokens=16,
        chunk_tokens=16,
        mixed_step_tokens=16,
        output_reserve_tokens=4,
        max_context_tokens=44,
    )
    for number, (prompt, output, leaves) in enumerate(lengths):
        watched.add(number, prompt, output)
        watched.step()
        if leaves:
            watched.scheduler.abort(number)
    watched.run()
    watched.record()
    spans: dict[str, list[float]] = {part: [] for part in REQUEST_PARTS}
    for life in watched.tell():
        row_ms = next((phase.begin_ms for phase in life.phases if phase.kind == "prompt"), None)
        if row_ms is not None:
            spans["queue"].append(row_ms)
            spans["inference"].append(life.total_ms - row_ms)
            if life.first_token_ms is not None:
                spans["prefill"].append(life.first_token_ms - row_ms)
                spans["decode"].append(life.total_ms - life.first_token_ms)
    times = watched.lives.times
    for part, counts, seconds in zip(REQUEST_PARTS, times.counts, times.seconds, strict=True):
        assert seconds == pytest.approx(sum(spans[part]) / 1e3, abs=1e-9), part
        for place, bound in enumerate(REQUEST_BOUNDS_S):
            assert sum(counts[: place + 1]) == sum(ms / 1e3 <= bound + 1e-12 for ms in spans[part]), part
        assert sum(counts) == len(spans[part])


def test_states_counts_and_filters_are_those_of_the_scheduler() -> None:
    watched = WatchedScheduler(max_rows=2, max_step_tokens=8, mixed_step_tokens=8, chunk_tokens=8)
    watched.add(0, 8, 20)
    watched.step()
    watched.add(1, 30, 3)
    watched.step()
    watched.add(2, 8, 3)
    watched.add(3, 8, 3)
    states = {life.number: life.state for life in watched.tell()}
    assert states == {0: "decoding", 1: "prompt", 2: "queued", 3: "queued"}
    assert [life.ahead for life in watched.tell(state="waiting")] == [1, 0]
    assert [life.number for life in watched.tell(state="running")] == [1, 0]
    assert [life.number for life in watched.tell(id="call-2")] == [2]
    assert [life.number for life in watched.tell(numbers=(1, 3, 99))] == [3, 1]
    assert [life.number for life in watched.tell(limit=1)] == [3]
    assert [life.number for life in watched.tell(limit=2, skip=1)] == [2, 1]
    assert watched.life(0).output_tokens == 2
    watched.run()
    ended_at = watched.now_ms / 1e3
    assert watched.tell(ended_after=ended_at + 1) == []
    assert len(watched.tell(state="ended")) == 4
    assert watched.tell(state="open") == []


def test_time_in_the_server_process_is_the_first_phase() -> None:
    watched = WatchedScheduler()
    watched.add(0, 8, arrived_ms=960.0)
    watched.run()
    first, second, *_ = watched.life(0).phases
    assert (first.kind, first.begin_ms, first.end_ms) == ("server", 0, 40)
    assert second.kind == "queued"
    assert watched.life(0).first_token_ms == 40 + STEP_MS


def test_a_prompt_of_many_chunks_has_few_in_its_life() -> None:
    watched = WatchedScheduler(num_pages=600, max_step_tokens=4, mixed_step_tokens=4, chunk_tokens=4)
    watched.add(0, 2000)
    watched.run()
    (prompt,) = [phase for phase in watched.life(0).phases if phase.kind == "prompt"]
    assert sum(tokens for _, tokens in prompt.chunks) == 2000
    assert len(prompt.chunks) <= MAX_EVENTS
    check(watched.life(0))


def notes_of(number: int) -> list[list[Note]]:
    """Notes of a request that is preempted often, in the order of the engine's calls."""
    again: list[list[Note]] = [
        [Preempted(number, 1, 5, 3)],
        [Held(number, 0, "pages", {"needed_pages": 3})],
        [Admitted(number, 4)],
        [Computed(number, 10, True)],
    ]
    return [
        [Added(number, 10, 0, False)],
        [Held(number, 0, "rows", {"rows": 1})],
        [Admitted(number, 0)],
        [Computed(number, 10, True)],
        *itertools.chain.from_iterable([again] * 100),
        [Released()],
        [Ended(number, FinishReason.STOP, 20, "")],
    ]


def test_a_life_of_many_preemptions_is_folded() -> None:
    lives = Lives(Moments())
    for now_us, notes in enumerate(notes_of(7)):
        lives.record(notes, 1000 * now_us)
    (life,) = lives.tell(AskRequests(0), 10**9, 0.0, {}, ()).requests
    check(life)
    assert life.num_preemptions == 100
    assert "folded" in {phase.kind for phase in life.phases}
    assert len(life.phases) <= MAX_EVENTS


@pytest.mark.parametrize("arrived_s", [2.0, 5.0], ids=["before the crash", "during the restart"])
def test_a_life_from_an_engine_that_has_ended_says_how_long_it_waited(arrived_s: float) -> None:
    lives = Lives(Moments())
    call = AddRequest(
        7, b"", SamplingParams(temperature=0), call_id="a", arrived_s=arrived_s, waiting_since_s=5.0
    )
    num_output = 4 if arrived_s < 5 else 0
    lives.record([Added(7, 10, 0, False, num_output)], 9_000_000, call)
    lives.record([Admitted(7, 0)], 9_500_000)
    lives.record([Computed(7, 10 + num_output, True)], 9_600_000)
    lives.record([Ended(7, FinishReason.STOP, 20, "")], 9_900_000)
    (life,) = lives.tell(AskRequests(0), 10**7, 0.0, {}, ()).requests
    kinds = [phase.kind for phase in life.phases]
    assert kinds == [*(["earlier"] if num_output else []), "restart", "queued", "prompt", "decoding"]
    (restart,) = [phase for phase in life.phases if phase.kind == "restart"]
    assert (restart.begin_ms, restart.end_ms) == (1e3 * (5 - arrived_s), 1e3 * (9 - arrived_s))
    assert life.phases[-1].figures == {"tokens": 20 - num_output}
    assert "--engine-restarts" in causes_of(life)[0].words


def size_of(thing: Any, seen: set[int]) -> int:
    """Bytes of an object and of all that it refers to."""
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    parts = [getattr(thing, name) for name in getattr(thing, "__slots__", ()) if hasattr(thing, name)]
    parts += vars(thing).values() if hasattr(thing, "__dict__") else []
    if isinstance(thing, dict):
        parts += [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset) or type(thing).__name__ == "deque":
        parts += list(thing)
    return sys.getsizeof(thing) + sum(size_of(part, seen) for part in parts)


def test_memory_is_the_same_after_ten_thousand_and_after_a_hundred_thousand_requests() -> None:
    moments = Moments()
    lives = Lives(moments)
    sizes = []
    for number in range(100_000):
        at_us = number * 1_000_000
        slow_us = 30_000_000 if number % 50 == 49 else 1000
        lives.record([Added(number, 10, number % 3, False)], at_us)
        lives.record([Held(number, number % 3, "rows", {"rows": 1})], at_us + 5)
        lives.record([Admitted(number, 0)], at_us + slow_us)
        lives.record([Computed(number, 10, True)], at_us + slow_us + 100)
        lives.record([Ended(number, FinishReason.STOP, 3, "")], at_us + slow_us + 200)
        if number in (9_999, 99_999):
            sizes.append(size_of(lives, set()))
    assert moments.num > MAX_MOMENTS
    answer = lives.tell(AskRequests(0, limit=5000), 10**12, 0.0, {}, ())
    assert len(answer.requests) == MAX_ENDED
    assert len(answer.moments) == MAX_MOMENTS
    assert answer.num_ended == 100_000
    assert sizes[1] < 1.05 * sizes[0], sizes
    assert sizes[1] < 4_000_000


def test_a_prompt_that_waited_for_a_snapshot_tells_what_it_found() -> None:
    watched = WatchedScheduler(num_pages=200, num_snapshots=8, max_step_tokens=200, chunk_tokens=50)
    for number in range(4):
        watched.add(number, 200, first_token=5)
    watched.run()
    for number, cached in enumerate((0, 196, 196, 196)):
        life = watched.life(number)
        check(life)
        assert life.cached_tokens == cached
        (prompt,) = [phase for phase in life.phases if phase.kind == "prompt"]
        assert prompt.figures == {"cached_tokens": cached, "tokens": 200 - cached}
