"""Every reason has words, and every flag and error code that they name exists. Slow readers of events."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from watched_scheduler import WatchedScheduler

from minisgl.commands.flags import fields_of
from minisgl.config import EngineConfig, ServerConfig
from minisgl.ipc.questions import AskRequests
from minisgl.lives import LivesAnswer, Moment, PhaseKind, StepReason, WaitReason
from minisgl.server.engines.engines import Engines
from minisgl.server.processes.siblings import Siblings
from minisgl.server.watch import advice, words
from minisgl.server.watch.advice import FIRST_TOKENS, REFUSALS, STEPS, advice_on
from minisgl.server.watch.routes import ASKED_AT_ONCE, Watch
from minisgl.server.watch.ticker import MAX_SKIPPED, Ticker

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {field.flag for kind in (EngineConfig, ServerConfig) for field in fields_of(kind)}
NOTHING: Any = None


def moment(kind: Any, reason: str, **figures: float) -> Moment:
    return Moment(
        number=1,
        kind=kind,
        reason=reason,
        at=0,
        until=0,
        count=1,
        worst_ms=400.0,
        usual_ms=20.0,
        figures=figures,
    )


@pytest.mark.parametrize("reason", get_args(StepReason))
def test_every_reason_of_a_slow_step_has_words(reason: str) -> None:
    assert reason in STEPS
    figures = {"decodes": 3, "prompt_tokens": 512, "wait_ms": 390}
    found = advice_on(moment("step", reason, **figures))
    assert found.words.startswith("a step took 400 ms, usually 20 ms: ")
    assert "{" not in found.words


BEFORE_THE_FIRST_TOKEN = {*get_args(WaitReason), *get_args(PhaseKind)} - {"queued", "decoding", "folded"}


@pytest.mark.parametrize("reason", sorted(BEFORE_THE_FIRST_TOKEN))
def test_every_reason_of_a_late_first_token_has_words(reason: str) -> None:
    assert reason in FIRST_TOKENS
    found = advice_on(moment("first_token", reason, reason_ms=300))
    assert found.words.startswith("a first token took 400 ms, usually 20 ms: 300 ms of it ")


def test_an_unknown_reason_has_words_too() -> None:
    assert "some_code" in advice_on(moment("refused", "some_code")).words
    assert advice_on(moment("step", "unknown")).words.startswith("a step took 400 ms")


def test_the_codes_of_refusals_are_codes_of_the_server() -> None:
    files = [path for path in (ROOT / "minisgl").rglob("*.py") if path.name != "advice.py"]
    source = "".join(path.read_text() for path in files)
    assert [code for code in REFUSALS if f'"{code}"' not in source] == []


def test_every_flag_that_is_named_exists() -> None:
    source = Path(advice.__file__).read_text() + Path(words.__file__).read_text()
    named = set(re.findall(r"--[a-z][a-z-]+[a-z]", source))
    assert len(named) > 10
    assert named - FLAGS == set()


class Transport:
    """Of a client that reads nothing, until `unsent` is 0."""

    def __init__(self) -> None:
        self.unsent = 100
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.is_aborted = True


def test_a_slow_reader_of_events_is_skipped_and_in_the_end_dropped() -> None:
    async def main() -> None:
        ticker = Ticker(Engines([]), Siblings(NOTHING, NOTHING, NOTHING), NOTHING, 0, lambda _: "serving")
        slow, quick = Transport(), Transport()
        quick.unsent = 0
        written: dict[str, list[bytes]] = {"slow": [], "quick": []}

        def response(name: str) -> Any:
            async def write(data: bytes) -> None:
                written[name].append(data)

            return SimpleNamespace(write=write)

        tasks = [
            asyncio.ensure_future(ticker._send(SimpleNamespace(transport=transport), response(name)))  # pyright: ignore[reportArgumentType] as far as it is used
            for name, transport in (("slow", slow), ("quick", quick))
        ]
        for number in range(MAX_SKIPPED):
            await asyncio.sleep(0)
            if number == 5:
                slow.unsent = 0  # it reads again, once
            elif number == 6:
                slow.unsent = 100
            ticker._publish(b"%d" % number)
        for number in range(MAX_SKIPPED, 2 * MAX_SKIPPED):
            await asyncio.sleep(0)
            ticker._publish(b"%d" % number)
        await asyncio.sleep(0)
        assert slow.is_aborted
        assert tasks[0].done()
        assert len(written["slow"]) == 1
        assert written["quick"] == [b"%d" % number for number in range(2 * MAX_SKIPPED)]
        assert not tasks[1].done()
        await ticker.close()
        await asyncio.wait_for(tasks[1], 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("there", "limit"), [(0, 10), (99, 100), (100, 100), (250, 1000), (250, 201), (3, 0)]
)
def test_a_long_list_comes_whole_though_the_engine_answers_in_parts(there: int, limit: int) -> None:
    watched = WatchedScheduler(num_pages=4000)
    for number in range(there):
        watched.add(number, 3)
    asked: list[int] = []

    async def ask_requests(which: AskRequests, limit_s: float) -> LivesAnswer:
        asked.append(which.limit)
        requests, queue = watched.scheduler.open_requests()
        return watched.lives.tell(which, int(watched.now_ms * 1e3), 0.0, requests, queue)

    link = SimpleNamespace(is_up=True, ask_requests=ask_requests)
    engine: Any = SimpleNamespace(is_restarting=False, link=link)
    siblings = Siblings(NOTHING, NOTHING, NOTHING)
    watch = Watch(NOTHING, NOTHING, Engines([]), siblings, NOTHING, 0)
    answer = asyncio.run(watch._ask(engine, AskRequests(0, limit=limit)))
    assert answer is not None
    numbers = [life.number for life in answer.requests]
    assert numbers == sorted(range(there), reverse=True)[:limit]
    assert max(asked) <= ASKED_AT_ONCE
