"""A real engine's watch: lives of its requests, its pace, and slow moments with their reasons."""

import gc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fake_grammar import FakeCompiler, use_fake_grammars
from life_checks import check
from test_no_token import ask
from test_step_timeline import LENGTHS, MODEL, NUM_OUTPUTS, serve, started

from minisgl.engine.engine import Engine
from minisgl.engine.watch.moments import Moments
from minisgl.engine.watch.pace import GcClock, Pace, StepCounts, slow_reason
from minisgl.engine.watch.running_median import RunningMedian
from minisgl.engine.watch.step_timeline import StepRecord, UsedGraphs
from minisgl.grammar.spec import GrammarSpec
from minisgl.ipc.messages import AddRequest
from minisgl.ipc.questions import AskRequests
from minisgl.lives import STEP_BOUNDS_MS, STEP_PARTS, Life, LivesAnswer
from minisgl.request import SamplingParams


@pytest.fixture(params=[False, True], ids=["no-overlap", "overlap"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = started(tmp_path, MODEL | {"eos_token_id": 2}, overlap=request.param)
    yield made
    made.close()


def told(engine: Engine, question: AskRequests | None = None) -> list[Life]:
    data = engine.watch.answer(question or AskRequests(0))
    return msgspec.msgpack.decode(data, type=LivesAnswer).requests


def test_every_request_has_a_life_that_adds_up(engine: Engine) -> None:
    def check_all() -> None:
        for life in told(engine):
            check(life)

    serve(engine, after_each_step=check_all)
    lives = told(engine)
    assert [life.prompt_tokens for life in reversed(lives)] == list(LENGTHS)
    for life in lives:
        check(life)
        assert (life.state, life.end, life.output_tokens) == ("ended", "length", NUM_OUTPUTS)
        assert [phase.kind for phase in life.phases] == ["queued", "prompt", "decoding"]
        assert life.first_token_ms == life.phases[1].end_ms
        assert sum(tokens for _, tokens in life.phases[1].chunks) == life.prompt_tokens
    assert engine.watch.lives.num_ended == len(LENGTHS)


def test_steps_are_counted_by_their_length_and_parts(engine: Engine) -> None:
    serve(engine)
    status = engine.status(0)
    assert sum(status.step_counts) == status.num_steps
    assert len(status.step_counts) == len(STEP_BOUNDS_MS) + 1
    assert len(status.step_part_s) == len(STEP_PARTS)
    records = engine.timeline.records
    waited_s = sum(one.collected_s - one.waiting_s for one in records)
    assert status.step_part_s[STEP_PARTS.index("wait")] == pytest.approx(waited_s, abs=1e-9)
    busy_s = records[-1].applied_s - records[0].begin_s
    assert sum(status.step_part_s) == pytest.approx(busy_s, rel=0.05), "steps follow each other without a gap"
    assert status.num_ended == len(LENGTHS)


def test_a_request_that_waits_for_its_grammar_says_so(engine: Engine) -> None:
    compiler = FakeCompiler(MODEL["vocab_size"], 2, at_once=False)
    use_fake_grammars(engine, compiler)
    engine.add(ask(0, [5, 6, 7], ignore_eos=False, grammar=GrammarSpec("lark", "one")))
    engine.step()
    assert [life.state for life in told(engine)] == ["grammar"]
    compiler.finish()
    while engine.has_work:
        engine.step()
    (life,) = told(engine)
    check(life)
    assert [phase.kind for phase in life.phases] == ["grammar", "queued", "prompt", "decoding"]


def test_a_refused_request_has_a_life_of_its_call(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    prompt = np.arange(60, dtype="<i4") % 50
    call = AddRequest(4, np.tile(prompt, 2).tobytes(), params, call_id="too-long")
    engine.add(call)
    engine.step()
    (life,) = told(engine, AskRequests(0, id="too-long"))
    assert (life.end, life.error_code) == ("error", "context_length_exceeded")
    assert [phase.kind for phase in life.phases] == ["server"]


def test_the_watch_of_a_closed_engine_counts_no_more(tmp_path: Path) -> None:
    before = len(gc.callbacks)
    engine = started(tmp_path)
    assert len(gc.callbacks) == before + 1
    engine.close()
    engine.close()
    assert len(gc.callbacks) == before


def record(begin_s: float, length_s: float, **fields: float) -> StepRecord:
    """A step that waits for the device for all of its time."""
    end_s = begin_s + length_s
    whole = StepRecord(0, begin_s, begin_s, begin_s, 3, 0, 0, UsedGraphs(), begin_s, end_s, end_s)
    return whole._replace(**fields)


def test_steps_far_beyond_the_median_are_moments_and_close_ones_are_one_moment() -> None:
    moments = Moments()
    pace = Pace(moments, StepCounts)
    pace.gc.close()  # this process's own collections are no part of these steps
    now_s = 100.0
    lengths = [0.01] * 100 + [0.2, 0.3, 0.2] + [0.01] * 200 + [0.25] + [0.01] * 5
    for length_s in lengths:
        pace.count(record(now_s, length_s), None)
        now_s += length_s
    first, second = moments.told(1000.0)
    assert (first.kind, first.reason, first.count) == ("step", "device", 3)
    assert first.worst_ms == pytest.approx(300)
    assert first.usual_ms == pytest.approx(10, rel=0.2)
    assert first.at == pytest.approx(1101.0, abs=0.01)
    assert first.until == pytest.approx(1101.7, abs=0.01)
    assert first.figures["wait_ms"] == pytest.approx(300)
    assert second.count == 1
    assert sum(pace.step_counts) == len(lengths)


def test_time_without_requests_is_no_slow_step() -> None:
    moments = Moments()
    pace = Pace(moments, StepCounts)
    pace.gc.close()  # this process's own collections are no part of these steps
    for begin_s in (0.0, 10.0, 20.0):
        for place in range(50):
            pace.count(record(1 + begin_s + 0.01 * place, 0.01), None)
        pace.rest()
    assert moments.told(0.0) == []
    assert sum(pace.part_s) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("reason", "parts", "more"),
    [
        ("recompile", {"launch": 90}, {"now": StepCounts(num_recompiles=3)}),
        ("gc", {"apply": 90}, {"gc_ms": 50.0}),
        ("graph_recording", {"other": 90}, {"was_recording": True}),
        ("grammar", {"masks": 60, "wait": 30}, {}),
        ("profile", {"wait": 90}, {"now": StepCounts(is_profiling=True)}),
        ("planning", {"plan": 90}, {}),
        ("preemption", {"plan": 90}, {"now": StepCounts(num_preemptions=1)}),
        ("messages", {"other": 90}, {}),
        ("prompt", {"wait": 90}, {"tokens": 512}),
        ("graph_miss", {"wait": 90}, {"now": StepCounts(num_graph_misses=1)}),
        ("preemption", {"wait": 90}, {"now": StepCounts(num_preemptions=1)}),
        ("device", {"wait": 90}, {}),
    ],
)
def test_the_reason_of_a_slow_step(reason: str, parts: dict[str, int], more: dict[str, object]) -> None:
    one = record(0, 0.1, num_prompt_tokens=more.pop("tokens", 0))  # pyright: ignore[reportArgumentType] an int
    given = {"gc_ms": 0.0, "was_recording": False, "before": StepCounts(), "now": StepCounts()} | more
    parts_ms = [float(parts.get(name, 2)) for name in STEP_PARTS]
    assert slow_reason(one, parts_ms, **given) == reason  # pyright: ignore[reportArgumentType] by name


def test_garbage_collections_are_timed() -> None:
    clock = GcClock()
    gc.collect()
    clock.close()
    assert clock.seconds > 0
    assert clock.seconds_since(0.0) <= clock.seconds
    before = clock.seconds
    gc.collect()
    assert clock.seconds == before


@pytest.mark.parametrize("seed", range(3))
def test_the_running_median_comes_close_to_the_median(seed: int) -> None:
    rng = np.random.default_rng(seed)
    median = RunningMedian()
    values = rng.lognormal(2.0, 0.5, 5000)
    for value in values:
        median.add(float(value))
    assert median.value == pytest.approx(float(np.median(values)), rel=0.2)
