"""Figures from times: the definitions, against counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.benchmark.load.latency import (
    MAX_ITL_SAMPLES,
    evenly_spaced_quantiles,
    interval_samples,
    meets,
    parse_slo,
    summary,
    time_answer,
    timeline,
    weighted_quantiles,
)
from minisgl.benchmark.load.load_client import Answer
from minisgl.benchmark.load.sse import AnswerStream, Usage
from minisgl.errors import ConfigError


def answer(arrivals: list[tuple[float, int]], num_tokens: int, sent_at: float = 10.0) -> Answer:
    """Events at seconds after `sent_at`."""
    stream = AnswerStream(is_chat=False)
    for after, count in arrivals:
        stream.times.append(sent_at + after)
        stream.counts.append(count)
    stream.ended_at = sent_at + arrivals[-1][0]
    stream.usage = Usage(5, num_tokens)
    return Answer(sent_at, stream)


def test_one_token_at_a_time() -> None:
    timing = time_answer(answer([(0.5, 1), (0.6, 1), (0.9, 1)], 3))
    assert timing.ttft_ms == pytest.approx(500)
    assert timing.e2e_ms == pytest.approx(900)
    assert timing.tpot_ms == pytest.approx(200)
    assert timing.stall_ms == pytest.approx(300)
    assert timing.intervals_ms == pytest.approx([100, 300])
    assert timing.weights.tolist() == [1, 1]


def test_events_with_several_tokens_are_divided() -> None:
    timing = time_answer(answer([(0.5, 1), (0.6, 1), (1.0, 1)], 9))
    assert timing.tpot_ms == pytest.approx(500 / 8)
    assert timing.intervals_ms == pytest.approx([25, 100])
    assert timing.weights == pytest.approx([4, 4])
    assert timing.stall_ms == pytest.approx(400)


def test_reads_with_several_events_are_divided() -> None:
    timing = time_answer(answer([(0.5, 1), (0.6, 1), (0.9, 3)], 5))
    assert timing.intervals_ms == pytest.approx([100, 100])
    assert timing.weights == pytest.approx([1, 3])


def test_a_read_without_a_token_is_no_arrival() -> None:
    one = answer([(0.1, 0), (0.5, 1), (0.6, 0), (0.7, 1), (0.8, 0)], 2)
    timing = time_answer(one)
    assert (timing.ttft_ms, timing.tpot_ms) == (pytest.approx(500), pytest.approx(200))
    assert timing.e2e_ms == pytest.approx(800)


def test_a_single_token_has_no_interval_and_tokens_that_come_at_once_have_intervals_of_nothing() -> None:
    single = time_answer(answer([(0.5, 1)], 1))
    assert (single.tpot_ms, single.stall_ms, len(single.intervals_ms)) == (None, None, 0)
    together = time_answer(answer([(0.5, 4)], 4))
    assert (together.tpot_ms, together.intervals_ms.tolist(), together.weights.tolist()) == (0, [0], [3])


@given(
    st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 4)), min_size=2, max_size=20), st.integers(1, 8)
)
def test_intervals_number_n_minus_one_and_their_mean_is_the_tpot(gaps: list, per_event: int) -> None:
    times = np.cumsum([gap for gap, _ in gaps])
    arrivals = [(float(at), count) for at, (_, count) in zip(times, gaps, strict=True)]
    num_tokens = max(2, per_event * sum(count for _, count in gaps))
    timing = time_answer(answer(arrivals, num_tokens))
    assert timing.weights.sum() == pytest.approx(num_tokens - 1)
    assert np.average(timing.intervals_ms, weights=timing.weights) == pytest.approx(timing.tpot_ms)


def test_a_summary_names_mean_percentiles_and_maximum() -> None:
    found = summary("ttft", list(range(101)))
    assert found == {
        "ttft_mean_ms": 50,
        "ttft_p50_ms": 50,
        "ttft_p90_ms": 90,
        "ttft_p95_ms": 95,
        "ttft_p99_ms": 99,
        "ttft_max_ms": 100,
    }
    assert summary("ttft", []) == {}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=30))
def test_weighted_quantiles_are_those_of_repeated_values(pairs: list[tuple[int, int]]) -> None:
    repeated = sorted(value for value, weight in pairs for _ in range(weight))
    values, weights = (np.array(column, float) for column in zip(*pairs, strict=True))
    for share in (0.01, 0.25, 0.5, 0.9, 0.99, 1.0):
        expected = next(
            value for place, value in enumerate(repeated, 1) if place >= share * len(repeated) - 1e-9
        )
        assert weighted_quantiles(values, weights, [share])[0] == expected


def test_many_intervals_are_kept_as_quantiles_with_the_same_distribution() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.exponential(20, 50_000), rng.uniform(0.5, 4, 50_000)
    kept = evenly_spaced_quantiles(values, weights)
    assert len(kept) == MAX_ITL_SAMPLES
    for share in (0.1, 0.5, 0.9, 0.99):
        exact = weighted_quantiles(values, weights, [share])[0]
        assert np.quantile(kept, share) == pytest.approx(exact, rel=0.01)
    assert evenly_spaced_quantiles(*interval_samples([])) == []
    assert evenly_spaced_quantiles(np.array([3.0, 1.0]), np.array([1.0, 1.0])) == [1.0, 3.0]


def test_goodput_needs_every_limit() -> None:
    timing = time_answer(answer([(0.5, 1), (0.6, 1)], 2))
    assert meets(timing, parse_slo("ttft:500.1,tpot:101"))
    assert not meets(timing, parse_slo("ttft:499"))
    assert not meets(timing, parse_slo("ttft:501, tpot:99"))
    assert not meets(timing, parse_slo("e2e:599"))
    assert meets(time_answer(answer([(0.5, 1)], 1)), parse_slo("tpot:1"))


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:x", "ttft:-1", "itl:5", "ttft:1,ttft:2", "ttft=5"]
)
def test_limits_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)


def test_the_timeline_adds_up_to_tokens_and_open_time() -> None:
    answers = [answer([(0.5, 1), (3.0, 2)], 6), answer([(1.0, 1), (7.5, 1)], 2, sent_at=12.0)]
    rows = timeline(answers, 10.0, 19.5)
    width = rows[1]["time_s"] - rows[0]["time_s"]
    assert width == pytest.approx(9.5 / 20)
    assert sum(row["output_tokens_per_s"] * width for row in rows) == pytest.approx(8)
    assert sum(row["open_requests"] * width for row in rows) == pytest.approx(3.0 + 7.5)


@pytest.mark.parametrize(("span_s", "most"), [(5.0, 20), (30.0, 30), (1000.0, 200)])
def test_a_timeline_is_never_long(span_s: float, most: int) -> None:
    rows = timeline([answer([(span_s, 1)], 1)], 10.0, 10.0 + span_s)
    assert len(rows) == most
    assert timeline([answer([(0.0, 1)], 1)], 10.0, 10.0) == []
