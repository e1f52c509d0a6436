"""`minisgl serve --replicas 2` with the built-in model: each answer is that of its request alone."""

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
import test_real_engine
from running_server import eventually

START_S = 120.0
NUM_TOKENS = 20
ASKS = [
    {"prompt": f"{number} days ago, a {who} walked into", "seed": number, "temperature": 0.8 * (number % 2)}
    for number, who in enumerate(("king", "cat", "nurse", "cook", "bear", "judge"))
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    flags = [flag for flag in test_real_engine.FLAGS if flag not in ("--engine-restarts", "0")]
    flags = [*("--port", "0"), *flags[1:], "--replicas", "2"]
    tmp = tmp_path_factory.mktemp("r")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_real_engine, "FLAGS", flags)
        started = test_real_engine.Served(tmp)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait(10)
        assert started.process.stdout is not None
        started.process.stdout.close()


def told(served: Any, path: str) -> Any:
    with urllib.request.urlopen(served.url + path, timeout=30) as answer:
        return json.load(answer)


async def texts(served: Any, at_token: Callable[[int], None], num_tokens: int = NUM_TOKENS) -> list[str]:
    """The answers of all calls at once; `at_token` is told how many events have come."""
    num_events = 0

    async def read(session: aiohttp.ClientSession, ask: dict[str, Any]) -> str:
        nonlocal num_events
        body = {**ask, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        text = ""
        async with session.post(f"{served.url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    num_events += 1
                    at_token(num_events)
        return text

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(START_S)) as session:
        return list(await asyncio.gather(*[read(session, ask) for ask in ASKS]))


@pytest.fixture(scope="module")
def alone(served: Any) -> list[str]:
    found = []
    for ask in ASKS:
        body = json.dumps({**ask, "max_tokens": NUM_TOKENS, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"{served.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append(json.load(answer)["choices"][0]["text"])
    return found


def test_answers_beside_others_are_those_of_the_request_alone(served: Any, alone: list[str]) -> None:
    assert asyncio.run(texts(served, lambda _: None)) == alone
    steps = [one["status"]["num_ended"] for one in told(served, "/server_info")["engines"]]
    assert min(steps) > 0


def test_kill_9_of_one_engine_changes_no_answer(served: Any, alone: list[str]) -> None:
    before = told(served, "/health")["engines"]
    killed = False

    def kill(num_events: int) -> None:
        nonlocal killed
        if num_events >= 30 and not killed:
            killed = True
            os.kill(before[0]["pid"], signal.SIGKILL)

    assert asyncio.run(texts(served, kill)) == alone
    assert killed
    eventually(lambda: all(one["up"] for one in told(served, "/health")["engines"]), "it is back", START_S)
    after = told(served, "/health")["engines"]
    assert [one["restarts"] for one in after] == [1, 0]
    assert after[1]["pid"] == before[1]["pid"]
    assert asyncio.run(texts(served, lambda _: None)) == alone
    idle = [one["status"]["num_held_rows"] for one in told(served, "/server_info")["engines"]]
    assert idle == [0, 0]
