"""Ten minutes of figures: differences of counters, quantiles, and a fixed size. Refusals and slow clients."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl.ipc.messages import Ready
from minisgl.ipc.questions import Status
from minisgl.lives import MAX_MOMENTS, STEP_BOUNDS_MS, STEP_PARTS
from minisgl.server.stats import ServerStats
from minisgl.server.watch.clients import MIN_UNSENT_BYTES, slow_clients
from minisgl.server.watch.history import CAPACITY, NAMES, Counted, History, quantile
from minisgl.server.watch.refusals import Refusals

READY = Ready(256, 100, 16, 8, "fake", {})


def status(second: int) -> Status:
    """Of an engine that makes 50 tokens a second in 10 steps of 2 ms."""
    counts = [0] * (len(STEP_BOUNDS_MS) + 1)
    counts[7] = 10 * second
    return Status(
        second,
        num_steps=10 * second,
        num_running=3,
        num_waiting=second,
        num_free_pages=60,
        num_held_pages=30,
        num_prompt_tokens=200 * second,
        num_cached_tokens=50 * second,
        num_output_tokens=50 * second,
        step_counts=counts,
        step_part_s=[0.001 * second] * len(STEP_PARTS),
        num_ended=second,
    )


def counted(second: int, stats: ServerStats | None = None, answers: bool = True) -> Counted:
    return Counted(
        time=1000.0 + second,
        clock_s=5.0 + second,
        status=status(second) if answers else None,
        ready=READY,
        stats=stats or ServerStats(num_open_requests=4),
    )


def test_a_sample_has_the_differences_to_the_last_one() -> None:
    history = History()
    history.add(counted(1))
    sample = history.add(counted(2))
    assert (sample.output_tokens_per_s, sample.prompt_tokens_per_s, sample.hit_rate) == (50, 200, 0.25)
    assert (sample.running, sample.waiting, sample.open_requests) == (3, 2, 4)
    assert (sample.pages_free, sample.pages_running, sample.pages_cached) == (60, 30, 10)
    assert sample.steps_per_s == 10
    assert STEP_BOUNDS_MS[6] < (sample.step_p50_ms or 0) < (sample.step_p99_ms or 0) <= STEP_BOUNDS_MS[7]
    assert [getattr(sample, f"{name}_ms") for name in STEP_PARTS] == [0.1] * 6
    assert (sample.ended, sample.recompiles) == (1, 0)
    assert history.last == sample


def test_a_second_without_an_answer_is_unknown_and_the_next_makes_up_for_it() -> None:
    history = History()
    history.add(counted(1))
    silent = history.add(counted(2, answers=False))
    assert silent.output_tokens_per_s is None
    assert silent.running is None
    assert silent.open_requests == 4
    assert history.add(counted(3)).output_tokens_per_s == 50


def test_first_tokens_pauses_and_refusals_come_from_the_servers_statistics() -> None:
    history = History()
    stats = ServerStats(responses={"POST /v1/completions 429": 1, "GET /health 503": 5})
    history.add(counted(1, stats))
    later = ServerStats(responses={"POST /v1/completions 429": 4, "POST /x 503": 1, "GET /health 503": 9})
    later.first_token_s.observe(0.09, 100)
    later.inter_token_s.observe(0.012, 99)
    later.inter_token_s.observe(0.9)
    sample = history.add(counted(2, later))
    assert sample.refused == 4
    assert 80 < (sample.first_token_p50_ms or 0) < (sample.first_token_p99_ms or 0) <= 100
    assert 10 < (sample.token_p50_ms or 0) < (sample.token_p99_ms or 0) <= 15
    assert history.add(counted(3, later)).token_p50_ms is None, "nothing came in this second"
    restarted = history.add(counted(4, ServerStats()))
    assert (restarted.refused, restarted.token_p50_ms) == (0, None), "a process did not answer"


def test_ten_minutes_are_kept_in_the_same_memory() -> None:
    def size(history: History) -> int:
        return sum(sys.getsizeof(column) for column in history._columns.values())

    history = History()
    empty = size(history)
    for second in range(1, 3 * CAPACITY):
        history.add(counted(second))
    assert size(history) == empty < 200_000
    columns = history.columns(10_000)
    assert columns.keys() == set(NAMES)
    assert columns["time"] == [1000.0 + second for second in range(2 * CAPACITY, 3 * CAPACITY)]
    assert history.columns(3)["waiting"] == [3 * CAPACITY - 3, 3 * CAPACITY - 2, 3 * CAPACITY - 1]


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99])
def test_quantiles_of_buckets_are_near_those_of_the_values(share: float) -> None:
    values = np.random.default_rng(0).lognormal(2.0, 0.7, 4000)
    edges = [0.0, *STEP_BOUNDS_MS, float("inf")]
    counts = np.histogram(values, edges)[0].tolist()
    assert quantile(STEP_BOUNDS_MS, counts, share) == pytest.approx(np.quantile(values, share), rel=0.2)


def test_quantiles_of_nothing_and_beyond_the_last_bound() -> None:
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None
    assert quantile((1.0, 2.0), [0, 0, 9], 0.5) == 2.0


def test_refusals_of_a_burst_are_one_moment_and_their_number_is_bounded() -> None:
    now = 50.0
    refusals = Refusals(1, lambda: now)
    for _ in range(1000):
        refusals.add("too_many_requests")
        now += 0.01
    (burst,) = refusals.told()
    assert (burst.count, burst.at, burst.until) == (1000, 50.0, pytest.approx(59.99))
    for second in range(500):
        now = 100.0 + 2 * second
        refusals.add("loading")
    told = refusals.told()
    assert len(told) == MAX_MOMENTS
    assert len({one.number for one in told}) == MAX_MOMENTS


def stream(unsent: int | None, unread: int, taken_at: float) -> Any:
    transport = None if unsent is None else SimpleNamespace(get_write_buffer_size=lambda: unsent)
    return SimpleNamespace(
        name=f"{unsent}-{unread}", transport=transport, num_unread=unread, taken_at=taken_at
    )


def test_clients_are_slow_if_much_is_unsent_or_if_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    streams = [
        stream(MIN_UNSENT_BYTES, 0, 99.9),
        stream(500, 3, 90.0),
        stream(500, 3, 99.9),  # it just took something
        stream(500, 0, 90.0),  # nothing waits
        stream(0, 3, 90.0),  # all was sent: the answer is not streamed yet
        stream(None, 3, 0.0),
    ]
    found = slow_clients(streams)
    assert [one.id for one in found] == [f"{MIN_UNSENT_BYTES}-0", "500-3"]
    assert found[1].stalled_ms == 10_000
