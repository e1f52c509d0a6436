"""What an engine tells of its steps, and the profiles it writes."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.engine.watch import profiler
from minisgl.engine.watch.profiler import (
    MAX_PART_STEPS,
    PAUSE_S,
    StepProfiler,
    join_traces,
    steps_of_next_part,
)
from minisgl.engine.watch.step_timeline import StepTimeline, UsedGraphs
from minisgl.errors import ConfigError
from minisgl.ipc.messages import AddRequest
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import StepPlan

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
LENGTHS = (5, 30, 17)
NUM_OUTPUTS = 6


def started(folder: Path, model: dict[str, Any] = MODEL, **settings: Any) -> Engine:
    (folder / "config.json").write_text(json.dumps(model))
    settings = {"num_pages": 40, "chunk_tokens": 16} | settings
    config = EngineConfig(device="cpu", dtype="float32", dummy_weights=True, **settings)
    return build_engine(config, folder, lambda name, duration_ms: None)


@pytest.fixture(params=[False, True], ids=["no-overlap", "overlap"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    made = started(tmp_path, overlap=request.param, profile_dir=str(tmp_path / "profiles"))
    yield made
    made.close()


def serve(engine: Engine, after_each_step: Callable[[], None] = lambda: None) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUTS, ignore_eos=True)
    for index, length in enumerate(LENGTHS):
        engine.add(AddRequest(index, np.arange(index, index + length, dtype="<i4").tobytes(), params))
    while engine.has_work:
        engine.step()
        after_each_step()


def test_every_step_has_a_record_and_the_records_add_up(engine: Engine) -> None:
    serve(engine)
    records = engine.timeline.records
    assert [record.step_id for record in records] == list(range(engine.status(0).num_steps))
    assert sum(record.num_prompt_tokens for record in records) == sum(LENGTHS)
    assert sum(record.num_chunks for record in records) >= len(LENGTHS) + 2  # chunks of 16
    assert sum(record.num_decodes for record in records) >= len(LENGTHS) * (NUM_OUTPUTS - 1)
    assert {record.graphs for record in records} == {UsedGraphs()}
    for record in records:
        times = (record.begin_s, record.planned_s, record.launched_s)
        times += (record.waiting_s, record.collected_s, record.applied_s)
        assert times == tuple(sorted(times))
    overlapped = [a.waiting_s > b.launched_s for a, b in itertools.pairwise(records)]
    assert any(overlapped) == engine.config.overlap


def test_the_trace_is_what_perfetto_reads(engine: Engine) -> None:
    serve(engine)
    events = json.loads(engine.timeline.to_trace())["traceEvents"]
    steps = engine.status(0).num_steps
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["ph"], []).append(event)
    assert {kind: len(found) for kind, found in by_kind.items()} == {
        "M": 3, "X": 4 * steps, "b": steps, "e": steps, "C": steps,
    }  # fmt: skip
    assert all(event["dur"] >= 0 for event in by_kind["X"])
    host = sorted(by_kind["X"], key=lambda event: event["ts"])
    ends = [event["ts"] + event["dur"] for event in host]
    assert all(b["ts"] >= end - 1e-2 for end, b in zip(ends, host[1:], strict=False)), (
        "the host has one thread"
    )
    assert {event["name"] for event in by_kind["b"]} == {"prefill", "decode", "decode + prefill"}


def test_the_ring_keeps_the_last_steps() -> None:
    timeline = StepTimeline(capacity=3)
    for step in range(5):
        plan = StepPlan(step, (), (), (0, 1), (), (0, 1))
        timeline.record_launch(plan, UsedGraphs(decode_rows=2), step, step + 0.1, step + 0.2)
        timeline.record_end(step + 0.3, step + 0.4, step + 0.5)
    assert [record.step_id for record in timeline.records] == [2, 3, 4]
    assert timeline.records[-1].graphs == UsedGraphs(decode_rows=2)


def test_a_profile_of_the_next_steps_is_written_where_the_operator_said(
    engine: Engine, tmp_path: Path
) -> None:
    path = engine.profiler.start(4)
    assert path.parent == tmp_path / "profiles"
    with pytest.raises(ConfigError, match="a profile of 4 more steps runs already"):
        engine.profiler.start(1)
    assert not path.exists()
    serve(engine)
    engine.profiler.close()  # waits until it is written
    assert json.loads(path.read_text())["traceEvents"]
    for steps in (0, 1001):
        with pytest.raises(ConfigError, match="steps must be between 1 and 1000"):
            engine.profiler.start(steps)


def windows_of(path: Path) -> int:
    """How often torch's profiler was on for the trace."""
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event["name"].startswith("aten::") for event in events)
    return sum(event["name"] == "Record Window End" for event in events)


def test_a_long_profile_is_written_a_few_steps_at_a_time_and_becomes_one_trace(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "PAUSE_S", float("inf"))  # parts of 1, 2, 3 and 1 steps
    monkeypatch.setattr(profiler, "MAX_PART_STEPS", 3)
    path = engine.profiler.start(7)
    seen: set[tuple[str, ...]] = set()

    def look() -> None:
        seen.add(tuple(sorted(one.suffix for one in path.parent.iterdir())))

    serve(engine, look)
    assert {(".part-1",), (".part-1", ".part-2")} <= seen, "not written between the steps"
    engine.profiler.close()
    assert list(path.parent.iterdir()) == [path]
    assert windows_of(path) == 4


@pytest.mark.parametrize(
    ("pause_s", "sizes"), [(0.0, [1] * 14), (float("inf"), [1, 2, 4, 7])], ids=["slow", "fast"]
)
def test_a_pause_writes_the_steps_of_one_part_and_no_more(
    pause_s: float, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: list[int] = []  # steps, by pause
    steps_before = 0
    export = torch.profiler.profile.export_chrome_trace

    def counted(self: torch.profiler.profile, path: str) -> None:
        nonlocal steps_before
        exported.append(num_steps - steps_before)
        steps_before = num_steps
        export(self, path)

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", counted)
    monkeypatch.setattr(profiler, "PAUSE_S", pause_s)
    profiled = StepProfiler(tmp_path)
    profiled.start(14)
    for num_steps in range(1, 20):  # noqa: B007, counted() reads it
        torch.ones(2).sum()
        profiled.count_step()
    profiled.close()
    assert exported == sizes


def test_the_next_part_has_the_steps_that_fit_into_the_pause() -> None:
    assert steps_of_next_part(4, PAUSE_S) == 4
    assert steps_of_next_part(4, PAUSE_S * 2) == 2
    assert steps_of_next_part(4, PAUSE_S * 0.6) == 6
    assert steps_of_next_part(4, PAUSE_S / 100) == 8, "at most twice as many"
    assert steps_of_next_part(4, PAUSE_S * 100) == 1
    assert steps_of_next_part(MAX_PART_STEPS, 0.0) == MAX_PART_STEPS


def test_steps_go_on_while_a_trace_is_joined(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_join = threading.Event()

    def join_later(parts: list[Path], path: Path) -> None:
        assert may_join.wait(10)
        join_traces(parts, path)

    monkeypatch.setattr(profiler, "join_traces", join_later)
    path = engine.profiler.start(1)
    serve(engine)  # to the end
    with pytest.raises(ConfigError, match="is still being written"):
        engine.profiler.start(1)
    assert not path.exists()
    may_join.set()
    engine.profiler.close()
    assert windows_of(path) == 1


def test_a_profile_that_torch_does_not_go_on_with_stops_no_steps(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: torch.profiler.profile) -> None:
        raise RuntimeError("the profiler is in use")

    engine.profiler.start(1000)
    monkeypatch.setattr(torch.profiler.profile, "start", refuse)
    serve(engine)
    assert list((tmp_path / "profiles").iterdir()) == []
    with pytest.raises(ConfigError, match="can't begin: the profiler is in use"):
        engine.profiler.start(1)


def test_an_engine_that_ends_in_the_middle_of_a_profile_leaves_no_file(tmp_path: Path) -> None:
    engine = started(tmp_path, profile_dir=str(tmp_path / "profiles"))
    engine.profiler.start(1000)
    serve(engine)
    assert list((tmp_path / "profiles").iterdir()) != []
    engine.close()
    assert list((tmp_path / "profiles").iterdir()) == []
    assert not torch.autograd.profiler._is_profiler_enabled


def test_what_is_no_trace_is_not_joined_and_stays(tmp_path: Path) -> None:
    parts = [tmp_path / "a.part-1", tmp_path / "a.part-2"]
    parts[0].write_text('{"traceEvents": [{}],"traceName": "a" }')
    parts[1].write_text("something else")
    join_traces(parts, tmp_path / "a.json")
    assert sorted(tmp_path.iterdir()) == parts


def test_without_a_folder_there_are_no_profiles(tmp_path: Path) -> None:
    engine = started(tmp_path)
    with pytest.raises(ConfigError, match="--profile-dir"):
        engine.profiler.start(3)
    engine.close()


def test_a_folder_that_cannot_be_made_is_an_answer_and_no_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = started(tmp_path, profile_dir=str(tmp_path / "file" / "profiles"))
    with pytest.raises(ConfigError, match=r"--profile-dir .* can't be used: Not a directory"):
        engine.profiler.start(3)
    serve(engine)
    engine.close()
