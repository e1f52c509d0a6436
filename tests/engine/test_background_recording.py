"""Graphs that are recorded after the start: when, which one next, and what runs until they are there."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fake_recorder import Recorder
from test_decode_graphs import BUCKETS, CPU, Graphs, Step
from test_step_timeline import started

from minisgl.config import ResolvedConfig, resolve_engine_config
from minisgl.engine.engine import Engine
from minisgl.engine.graphs import background_recording, decode_graphs, recording
from minisgl.engine.graphs.background_recording import BackgroundRecorder
from minisgl.engine.graphs.buckets import decode_buckets, prefill_buckets, startup_sizes
from minisgl.engine.graphs.decode_graphs import DecodeGraphs, KernelCompilations
from minisgl.engine.graphs.graph_table import GraphTable
from minisgl.engine.graphs.prefill_graphs import PrefillGraphs
from minisgl.engine.start import build
from minisgl.engine.worker import IDLE_WAIT_MS, serve
from minisgl.ipc.messages import AddRequest, Shutdown
from minisgl.ipc.questions import Ping
from minisgl.models.decoder import call_block
from minisgl.request import SamplingParams


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def slow_table(clock: Clock, num_missing: int, error: Exception | None = None) -> GraphTable[int, int]:
    """Some graphs that take a second each to be recorded."""

    def record(size: int) -> int:
        assert torch.is_inference_mode_enabled()
        clock.now_s += 1
        if error is not None:
            raise error
        return size

    return GraphTable(record, range(num_missing))


def test_recording_takes_no_more_than_a_twentieth_of_the_time_while_requests_run() -> None:
    clock = Clock()
    background = BackgroundRecorder([slow_table(clock, 10)], None, strict=True, clock=clock)
    began_s, times_s = clock.now_s, []
    while background.num_missing:
        if background.is_due:
            times_s.append(clock.now_s - began_s)
            background.record_one()
        clock.now_s += 0.25  # a step
    assert times_s == [20.0 * n for n in range(10)]
    assert not background.is_due


def test_at_idle_nothing_is_waited_for_and_the_first_kind_comes_first() -> None:
    clock = Clock()
    first, second = slow_table(clock, 1), slow_table(clock, 2)
    background = BackgroundRecorder([first, second], None, strict=True, clock=clock)
    background.record_one()
    assert (first.num_missing, second.num_missing) == (0, 2)
    background.record_all()
    assert background.num_missing == 0
    assert clock.now_s == 103


def test_a_table_records_what_is_wanted_first_and_the_rest_in_its_order() -> None:
    recorded: list[int] = []
    table: GraphTable[int, int] = GraphTable(lambda size: recorded.append(size) or 10 * size, [8, 4, 2, 16])
    table.record(32)  # at the start
    table.want(2)
    table.want(None)
    table.want(64)  # no size of this table
    table.record_next()
    table.want(2)
    table.add(4, 40)  # recorded elsewhere
    table.record_next()
    assert recorded == [32, 2, 8]
    assert (table.sizes, table.num_missing) == ((2, 4, 8, 32), 1)
    assert [table[size] for size in table.sizes] == [20, 40, 80, 320]
    table.give_up(lambda size: size > 100)
    assert table.num_missing == 1
    table.give_up()
    assert (table.sizes, table.num_missing) == ((2, 4, 8, 32), 0)


def test_what_cannot_be_recorded_later_is_given_up_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    broken, sound = slow_table(clock, 3, RuntimeError("stream is capturing")), slow_table(clock, 2)
    background = BackgroundRecorder([broken, sound], None, strict=False, clock=clock)
    background.record_all()
    assert (broken.num_missing, sound.num_missing) == (0, 0)
    assert (len(broken.sizes), len(sound.sizes)) == (0, 2)
    assert caplog.text.count("can't be recorded") == 1
    assert "stream is capturing" in caplog.text
    strict = BackgroundRecorder([slow_table(clock, 1, RuntimeError("no"))], None, strict=True, clock=clock)
    with pytest.raises(RuntimeError, match="no"):
        strict.record_one()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> KernelCompilations:
    for part in ("runtime.jit_post_compile_hook", "compilation.listener"):
        monkeypatch.setattr(f"triton.knobs.{part}", None, raising=False)
    return KernelCompilations()


def test_what_recording_compiles_is_no_recompilation(kernels: KernelCompilations) -> None:
    def record(size: int) -> None:
        kernels.count += 7

    kernels.count = 2
    BackgroundRecorder([GraphTable(record, [1])], kernels, strict=True).record_one()
    assert kernels.count == 2


def test_kernels_read_from_disk_were_not_compiled(kernels: KernelCompilations) -> None:
    from triton import knobs

    listener: Any = knobs.compilation.listener
    launched: Any = knobs.runtime.jit_post_compile_hook
    for cache_hit, is_launch in ((True, True), (False, True), (False, False), (True, True)):
        listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)
        if is_launch:  # and not torch.compile
            launched(is_manual_warmup=False)
    launched(is_manual_warmup=True)
    assert (kernels.count, kernels.num_compiled) == (3, 2)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 20, 100, 256, 300])
def test_until_a_bucket_is_recorded_a_larger_one_serves_and_nothing_is_missed(max_batch: int) -> None:
    buckets = decode_buckets(max_batch)
    graphs, step = Graphs(), Step(max_batch)
    decode = DecodeGraphs(step, graphs, buckets, CPU, strict=True)  # pyright: ignore[reportArgumentType] (stand-ins)
    decode.warm_up(startup_sizes(buckets), lambda bucket, duration_ms: None)
    assert decode.table.num_missing == len(buckets) - len(startup_sizes(buckets))
    while True:
        for batch in range(1, max_batch + 1):
            bucket = decode.bucket_of(batch)
            assert bucket == min(size for size in graphs.recorded if size >= batch)
            assert bucket in (2, buckets[-1], *range(batch, 2 * batch))
            rows = tuple(range(batch))
            assert decode(rows)[:batch].tolist() == [10 * row for row in rows]
        if not decode.table.num_missing:
            break
        decode.table.record_next()
    assert tuple(sorted(graphs.recorded)) == buckets
    assert (decode.num_recompiles, decode.num_graph_misses) == (0, 0)


def test_the_size_that_runs_is_recorded_next() -> None:
    graphs = Graphs()
    decode = DecodeGraphs(Step(), graphs, (2, 4, 8, 12, 16, 20), CPU, strict=True)  # pyright: ignore[reportArgumentType] (stand-ins)
    decode.warm_up([2, 20], lambda bucket, duration_ms: None)
    decode(tuple(range(7)))
    for _ in range(4):
        decode.table.record_next()
    assert list(graphs.recorded) == [20, 2, 8, 16, 12, 4]


def test_after_giving_up_the_graphs_that_are_there_serve() -> None:
    graphs = Graphs()
    decode = DecodeGraphs(Step(), graphs, BUCKETS, CPU, strict=True)  # pyright: ignore[reportArgumentType] (stand-ins)
    decode.warm_up([4, 16], lambda bucket, duration_ms: None)
    decode.table.give_up()
    assert decode.table.num_missing == 0
    assert [decode.bucket_of(batch) for batch in (1, 4, 5, 16, 17)] == [4, 4, 16, 16, None]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[Engine, Graphs]]:
    """On a CPU, with stand-ins for decode graphs that nothing replays."""
    engine = started(tmp_path)
    graphs = Graphs()
    decode = DecodeGraphs(Step(), graphs, BUCKETS, CPU, strict=True)  # pyright: ignore[reportArgumentType] (stand-ins)
    decode.warm_up([16], lambda bucket, duration_ms: None)
    background = BackgroundRecorder([decode.table], None, strict=True)
    engine._recorded = engine._recorded._replace(background=background)
    yield engine, graphs
    engine.close()


def test_an_engine_records_between_its_steps_until_nothing_is_missing(engine: tuple[Engine, Graphs]) -> None:
    it, graphs = engine
    prompt_ids = torch.arange(4, dtype=torch.int32).numpy().tobytes()
    it.add(AddRequest(request_id=1, prompt_ids=prompt_ids, params=SamplingParams(max_tokens=3, seed=0)))
    assert it.num_missing_graphs == 3
    it.step()
    assert it.num_missing_graphs == 2
    while it.has_work:
        it.step()
    it.record_graphs()
    assert it.num_missing_graphs == 0
    assert list(graphs.recorded) == [16, 8, 4, 2]


def test_a_cpu_has_nothing_to_record(tmp_path: Path) -> None:
    engine = started(tmp_path)
    assert engine.num_missing_graphs == 0
    engine.close()


def test_a_server_records_while_it_has_nothing_to_do_and_answers_in_between() -> None:
    timeouts_ms: list[int] = []
    received: list[list[Any]] = [[], [Ping(7, 0)], [], [], [Shutdown()]]
    socket = Mock()

    def receive(timeout_ms: int) -> list[Any]:
        timeouts_ms.append(timeout_ms)
        return received.pop(0)

    socket.receive = receive
    it = Mock(has_work=False, num_missing_graphs=2)

    def record_graph() -> None:
        it.num_missing_graphs -= 1

    it.record_graph.side_effect = record_graph
    it.step.return_value = []
    serve(it, socket)
    assert timeouts_ms == [0, 0, 0, IDLE_WAIT_MS, IDLE_WAIT_MS]
    assert it.record_graph.call_count == 2
    it.status.assert_called_once_with(7)


def tokens_of(engine: Engine) -> list[list[int]]:
    """Of requests of many lengths that come in over time, some with penalties or log probabilities."""
    source = random.Random(1)
    tokens: list[list[int]] = [[] for _ in range(24)]
    waiting = list(range(len(tokens)))
    while waiting or engine.has_work:
        for number in waiting[: source.randrange(3)]:
            prompt = np.array([source.randrange(64) for _ in range(source.randrange(1, 50))], dtype="<i4")
            asked = {0: {"frequency_penalty": 0.7}, 1: {"logprobs": 2}}.get(number % 5, {})
            params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, **asked)  # pyright: ignore[reportArgumentType] (a mixed dict)
            engine.add(AddRequest(number, prompt.tobytes(), params))
            waiting.remove(number)
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_the_same_with_graphs_that_come_later_and_without(
    overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"overlap": overlap, "max_running_requests": 16, "max_step_tokens": 128}
    plain = started(tmp_path, **settings)
    expected = tokens_of(plain)
    plain.close()

    def resolve(*arguments: Any) -> ResolvedConfig:
        return replace(
            resolve_engine_config(*arguments), max_graph_batch=16, max_graph_tokens=128, join_decodes=True
        )

    warm_up = PrefillGraphs.warm_up
    monkeypatch.setattr(build, "resolve_engine_config", resolve)
    monkeypatch.setattr(recording, "GraphRecorder", Recorder)
    monkeypatch.setattr(recording, "startup_sizes", lambda sizes: {max(sizes)})
    monkeypatch.setattr(recording, "startup_prefills", lambda buckets: buckets[-2:-1])
    monkeypatch.setattr(PrefillGraphs, "warm_up", partialmethod(warm_up, clock=lambda: 0.0))
    monkeypatch.setattr(background_recording, "PAUSE", 0)
    engine = started(tmp_path, **settings)
    num_missing = engine.num_missing_graphs
    assert num_missing == len(decode_buckets(16)) - 1 + len(prefill_buckets(128, 16, 16)) - 2
    assert tokens_of(engine) == expected
    assert engine.num_missing_graphs == 0
    assert tokens_of(engine) == expected
    assert engine.status(0).num_graph_misses == 0
    engine.close()


class FailingRecorder(Recorder):
    """Can't record the second graph, and nothing beside what that leaves behind."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_kept = self.num_released = 0

    def record(self, run: Callable[[], Any], **options: Any) -> Callable[[], Any]:
        if self.num_kept and not self.num_released:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_kept += 1
        return super().record(run)

    def release(self) -> None:
        self.num_kept, self.num_released = 0, self.num_released + 1


def test_a_step_that_cant_be_recorded_compiled_is_recorded_uncompiled_and_nothing_else_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def resolve(*arguments: Any) -> ResolvedConfig:
        return replace(resolve_engine_config(*arguments), max_graph_batch=4, compile_mode="layers")

    monkeypatch.setattr(build, "resolve_engine_config", resolve)
    monkeypatch.setattr(decode_graphs, "compiled_block", lambda max_batch, keep: call_block)
    monkeypatch.setattr(recording, "GraphRecorder", FailingRecorder)
    engine = started(tmp_path, max_running_requests=4)
    assert "this torch can't compile the decode step" in caplog.text
    recorder: Any = engine._recorded.recorder
    assert (recorder.num_kept, recorder.num_released) == (len(decode_buckets(4)), 1)
    engine.close()
