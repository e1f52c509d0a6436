"""bench/soak.py on few requests, and that it notices what it is there to notice."""

import importlib
import json
import sys
from collections import deque
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from minisgl.benchmark.reports.report import read_report
from minisgl.ipc.messages import AddRequest
from minisgl.request import FinishReason, RequestOutput, SamplingParams

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module", autouse=True)
def _bench_folder() -> None:
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))  # last, so that none of its modules hides another one


@pytest.fixture
def soak() -> ModuleType:
    return importlib.import_module("soak")


@pytest.fixture
def requests() -> ModuleType:
    return importlib.import_module("soaks.requests")


@pytest.fixture
def simulation() -> ModuleType:
    return importlib.import_module("soaks.simulation")


class FaultyEngine:
    """Gives each request one token per step, and treats every third one as `fault` says."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._open: deque[tuple[int, int]] = deque()
        self._again: list[RequestOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._again)

    def add(self, request: AddRequest) -> None:
        num_tokens = request.params.max_tokens or 0
        if request.request_id % 3 == 2:
            if self._fault == "lost request":
                return
            num_tokens -= self._fault == "lost token"
        self._open.append((request.request_id, num_tokens))

    def abort(self, request_id: int) -> None:
        raise AssertionError("nobody leaves")

    def step(self) -> list[RequestOutput]:
        if self._again:
            return [self._again.pop()]
        request_id, num_left = self._open.popleft()
        if num_left > 1:
            self._open.append((request_id, num_left - 1))
        output = RequestOutput(request_id, [7], FinishReason.LENGTH if num_left <= 1 else None)
        if num_left == 1 and request_id % 3 == 2 and self._fault == "two ends":
            self._again.append(output)
        return [output]


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        ("lost token", ["request 2 of 3 tokens got 2", "request 5 of 3 tokens got 2"]),
        ("lost request", ["request 2 never ended", "request 5 never ended"]),
        ("two ends", ["request 2 got an output after its end", "request 5 got an output after its end"]),
        ("none", []),
    ],
)
def test_what_an_engine_loses_or_sends_twice_is_noticed(
    requests: ModuleType, fault: str, noticed: list[str]
) -> None:
    asked = requests.Asked(np.array([1, 2], np.int32), SamplingParams(max_tokens=3, seed=0), True, None)
    problems = requests.soak(FaultyEngine(fault), [asked] * 6, np.random.default_rng(0), 6)
    assert sorted(problem.split(" and ")[0] for problem in problems) == noticed


def test_a_wrong_token_is_noticed(requests: ModuleType) -> None:
    asked = requests.Asked(np.array([1, 2], np.int32), SamplingParams(max_tokens=3, seed=0), True, None)
    problems = requests.soak(
        FaultyEngine("none"), [asked], np.random.default_rng(0), 1, expected=lambda one: [7, 8, 7]
    )
    assert problems == ["request 0 got wrong tokens"]


@pytest.mark.parametrize("index", range(4))
def test_the_scheduler_serves_a_slice_in_each_pool(simulation: ModuleType, index: int) -> None:
    engine = simulation.SimulatedEngine(simulation.POOLS[index])
    row = simulation.run_slice(engine, 0, index, 300)
    assert row["problems"] == ""
    assert row["num_leaving"] > 0
    assert engine.held() == []


def test_a_page_that_is_held_is_noticed(simulation: ModuleType) -> None:
    engine = simulation.SimulatedEngine(simulation.POOLS[0])
    lease = engine.cache.admit([1, 2])
    engine.cache.grow(lease, 2)
    assert engine.held() == ["1 pages are held though nothing runs"]


def test_a_run_goes_on_after_the_slices_that_the_file_has(
    soak: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(soak.SLICES, "simulation", 50)
    out = tmp_path / "soak.json"
    assert soak.run("simulation", 100, 0, out) == 0
    first = read_report(out).tables["simulation"]
    assert soak.run("simulation", 200, 0, out) == 0
    report = read_report(out)
    rows = report.tables["simulation"]
    assert rows[:2] == first
    assert [(row["slice"], row["life"]) for row in rows] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert report.metrics["simulation_num_requests"] == 200
    assert json.loads(out.read_text())["kind"] == "soak"


def test_growth_is_that_of_the_second_half_of_each_life(soak: ModuleType) -> None:
    def row(life: int, rss: int) -> dict[str, object]:
        return {"life": life, "pool": 0, "num_requests": 1000, "rss_bytes": rss, "problems": ""}

    rows = [row(0, 5), *[row(0, 100)] * 5, *[row(1, 900)] * 3, row(1, 1000), row(1, 1010), row(1, 1020)]
    assert soak.summary("simulation", rows)["simulation_rss_bytes_per_1000_requests"] == 10


@pytest.fixture
def http() -> ModuleType:
    return importlib.import_module("soaks.http")


BODY = {"stream": True, "n": 2, "max_tokens": 3, "prompt": [1]}
USAGE = {"choices": [], "usage": {"completion_tokens": 6, "prompt_tokens": 1}}


def stream_of(*chunks: dict[str, object], done: int = 1) -> bytes:
    lines = [b"data: " + json.dumps(chunk).encode() for chunk in chunks] + [b"data: [DONE]"] * done
    return b"\n\n".join(lines) + b"\n\n"


def chunk_of(index: int, reason: str | None) -> dict[str, object]:
    return {"choices": [{"index": index, "text": "a", "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (stream_of(chunk_of(0, None), chunk_of(0, "length"), chunk_of(1, "length"), USAGE), ""),
        (stream_of(chunk_of(0, "length"), USAGE), "choices that ended"),
        (stream_of(chunk_of(0, "length"), chunk_of(0, None), chunk_of(1, "length"), USAGE), "after its end"),
        (stream_of(chunk_of(0, "length"), chunk_of(1, "length"), USAGE, done=2), r"2 times \[DONE\]"),
        (stream_of(chunk_of(0, "length"), chunk_of(1, "stop"), USAGE), "ended by stop"),
        (stream_of(chunk_of(0, "length"), chunk_of(1, "length")), "no usage"),
    ],
)
def test_an_answer_that_is_wrong_is_noticed(http: ModuleType, answer: bytes, wrong: str) -> None:
    if not wrong:
        http._check(BODY, 200, answer)
        return
    with pytest.raises(AssertionError, match=wrong):
        http._check(BODY, 200, answer)


def test_growth_of_an_engine_is_that_of_one_process(soak: ModuleType) -> None:
    rows = [
        {"life": 0, "engine_pid": pid, "num_requests": 1000, "problems": "", "disturbance": what}
        | {"engine_rss_bytes": engine, "server_rss_bytes": server}
        for pid, engine, server, what in (
            *[(1, 100, 10, "")] * 3,
            *((2, 500 + 2 * place, 10 + place, "kill" if place == 0 else "") for place in range(8)),
        )
    ]
    metrics = soak.summary("http", rows)
    assert metrics["http_engine_rss_bytes_per_1000_requests"] == 2
    assert metrics["http_server_rss_bytes_per_1000_requests"] == 1
    assert metrics["http_num_kills"] == 1


def test_half_of_the_slices_are_disturbed_now_and_then_in_every_way(http: ModuleType) -> None:
    found = [http._disturbance(index) for index in range(200)]
    assert not any(found[50:100] + found[150:])
    assert [found.count(one) for one in ("kill", "reload", "reload without room")] == [10, 6, 4]
