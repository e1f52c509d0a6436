"""Minisgl on a real Ray (`make test-ray`): two engines with the built-in model, a kill, upgrades, scaling.

Each answer must be, token for token, the one that its request gets alone.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest

pytest.importorskip("ray.serve", reason="needs minisgl[ray]; see make test-ray")

import ray
from ray import serve

from minisgl.ray_serve import app

pytestmark = pytest.mark.timeout(1200)

PORT = 18621
URL = f"http://127.0.0.1:{PORT}"
MODEL = "smollm2-135m"
LIMIT_S = 300.0
"""For everything that a busy machine makes slow."""
NUM_TOKENS = 24
ASKS: list[dict[str, Any]] = [
    {"prompt": f"{number} days ago, a {who} walked into", "seed": number, "temperature": 0.8 * (number % 2)}
    for number, who in enumerate(("king", "cat", "nurse", "cook", "bear", "judge"))
]
SETTINGS: dict[str, Any] = {
    "model": MODEL,
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 128,
    "max_running_requests": 4,
    "cpu_threads": 1,
    "engine_cpus": 0.5,
    "ingress_cpus": 0.5,
    "drain_timeout_s": 5,
    "heartbeat_timeout_s": 20,
}
QUICK = {"upscale_delay_s": 1, "downscale_delay_s": 5, "look_back_s": 10.5, "waiting_per_replica": 2}


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ray with few processes. All of them are gone afterwards."""
    if not request.config.option.ray:
        pytest.skip("it takes minutes; see make test-ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
        patch.setenv("RAY_worker_niceness", "0")  # else other work of this machine starves the engines
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init(num_cpus=2, object_store_memory=150_000_000, include_dashboard=False)
        try:
            serve.start(http_options={"port": PORT})
            yield
        finally:
            try:
                serve.shutdown()
            finally:
                ray.shutdown()


def run_app(**arguments: Any) -> None:
    """Start or upgrade the application, and wait until it is there."""
    serve.run(app({**SETTINGS, **arguments}), name="llm", route_prefix="/")


@pytest.fixture(scope="module")
def two_engines(cluster: None) -> None:
    run_app(min_replicas=2, max_replicas=2)


@pytest.fixture(scope="module")
def alone(two_engines: None) -> list[str]:
    """The answer of each of ASKS, one after the other."""
    with openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        return [
            client.completions.create(
                model=MODEL, max_tokens=NUM_TOKENS, extra_body={"ignore_eos": True}, **ask
            )
            .choices[0]
            .text
            for ask in ASKS
        ]


def call(path: str, body: Any = None, **headers: str) -> tuple[int, Any, list[tuple[str, str]]]:
    """Status, decoded body and headers of one HTTP call."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(URL + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read()), answer.headers.items()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), list(error.headers.items())


def client() -> openai.AsyncOpenAI:
    """The client as it is, without the retries that would hide a failure."""
    return openai.AsyncOpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


def engines() -> list[dict[str, Any]]:
    """What the server says of its engines, those that are up."""
    with contextlib.suppress(OSError, ValueError):
        return [one for one in call("/health")[1].get("engines", []) if one["up"]]
    return []


def pids() -> set[int]:
    """The processes of the engines that are up."""
    return {one["pid"] for one in engines()}


def num_running(deployment: str) -> int:
    found = serve.status().applications["llm"].deployments[deployment]
    return sum(num for state, num in found.replica_states.items() if state == "RUNNING")


async def eventually(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.2)


class Load:
    """Clients that ask again and again, until `stop` or for ever more of them."""

    def __init__(self, alone: list[str]) -> None:
        self._alone = alone
        self._client = client()
        self._tasks: list[asyncio.Task[None]] = []
        self._most = 0
        self.num_events = 0
        self.num_whole = 0
        self.longest_pause_s = 0.0
        self.wrong: list[str] = []

    def set_clients(self, num: int) -> None:
        """So many clients ask from now on; those that are too many finish what they ask."""
        self._most = num
        self._tasks = [task for task in self._tasks if not task.done()]
        for number in range(len(self._tasks), num):
            self._tasks.append(asyncio.create_task(self._ask(number)))

    async def stop(self) -> None:
        self._most = 0
        await asyncio.gather(*self._tasks)
        await self._client.close()
        assert self.wrong == []

    async def events(self, num: int) -> None:
        """Wait for so many further events."""
        target = self.num_events + num
        await eventually(lambda: self.num_events >= target or bool(self.wrong), f"{num} further events")

    async def _ask(self, number: int) -> None:
        turn = number
        while number < self._most:
            which = turn % len(ASKS)
            turn += 1
            try:
                text = await self._stream(ASKS[which])
            except Exception as error:
                self.wrong.append(f"request {which} failed: {error!r}")
                return
            if text == self._alone[which]:
                self.num_whole += 1
            else:
                self.wrong.append(f"request {which}: {text!r} instead of {self._alone[which]!r}")

    async def _stream(self, ask: dict[str, Any]) -> str:
        text, last_s = "", time.monotonic()
        stream = await self._client.completions.create(
            model=MODEL, max_tokens=NUM_TOKENS, stream=True, extra_body={"ignore_eos": True}, **ask
        )
        async for event in stream:
            text += event.choices[0].text
            self.num_events += 1
            now_s = time.monotonic()
            self.longest_pause_s, last_s = max(self.longest_pause_s, now_s - last_s), now_s
        return text


def under_load(alone: list[str], num_clients: int, what: Callable[[Load], Awaitable[None]]) -> None:
    """Do something while clients ask; every answer must be whole and right."""

    async def run() -> None:
        load = Load(alone)
        load.set_clients(num_clients)
        await load.events(2 * num_clients)
        try:
            await what(load)
        finally:
            await load.stop()
        pause = f"the longest pause in one was {load.longest_pause_s:.1f} s"
        sys.stdout.write(f"{what.__name__}: {load.num_whole} answers, all right; {pause}\n")

    asyncio.run(run())


def test_answers_ids_and_errors_are_those_of_the_server_without_ray(two_engines: None) -> None:
    status, answer, headers = call("/v1/models", **{"X-Request-Id": "mine"})
    assert (status, answer["data"][0]["id"]) == (200, MODEL)
    assert [value for name, value in headers if name.lower() == "x-request-id"] == ["mine"]
    status, answer, headers = call("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": -1})
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert len([name for name, _ in headers if name.lower() == "x-request-id"]) == 1
    assert call("/v1/completions", {"model": "another", "prompt": "a"})[0] == 404
    with openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        messages: Any = [{"role": "user", "content": "Say hello."}]
        events = list(
            client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        usage = events[-1].usage
        assert usage is not None
        assert usage.completion_tokens == 4
        assert len(events) >= 5  # each token came alone


def test_a_client_that_leaves_ends_its_request(two_engines: None) -> None:
    async def leave() -> None:
        async with client() as asking:
            stream = await asking.completions.create(
                model=MODEL, prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()
            await eventually(lambda: call("/health")[1]["open_requests"] == 0, "the request has ended")

    asyncio.run(leave())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_of_a_lost_engine_go_on_in_the_other_and_it_is_replaced(
    alone: list[str], how: signal.Signals
) -> None:
    async def lose(load: Load) -> None:
        before = pids()
        assert len(before) == 2
        os.kill(min(before), how)
        await load.events(40)

        def is_replaced() -> bool:
            after = pids()
            return len(after) == 2 and len(before & after) == 1

        await eventually(is_replaced, "a new engine has come for it")
        await load.events(10)

    under_load(alone, 6, lose)


def test_an_upgrade_of_ingress_and_engines_loses_no_request(alone: list[str]) -> None:
    async def upgrade(load: Load) -> None:
        before = pids()
        await asyncio.to_thread(run_app, min_replicas=2, max_replicas=2, output_reserve_tokens=32)
        await eventually(lambda: len(engines()) == 2 and not before & pids(), "only new engines serve")
        await load.events(20)

    under_load(alone, 4, upgrade)


def test_a_lost_ingress_is_replaced_and_the_engines_keep_their_models(two_engines: None) -> None:
    async def lose() -> None:
        await eventually(lambda: len(engines()) == 2, "both engines serve")
        before = pids()
        replica = serve.get_deployment_handle("ingress", "llm")
        os.kill(await replica.server_pid.remote(), signal.SIGKILL)
        await eventually(lambda: not engines(), "it is gone")
        await eventually(lambda: pids() == before, "the same engines serve another ingress")

    asyncio.run(lose())


def test_engines_come_and_go_with_the_load_and_no_request_fails(alone: list[str]) -> None:
    run_app(min_replicas=1, max_replicas=2, **QUICK)

    async def scale(load: Load) -> None:
        await eventually(lambda: num_running("engines") == 1 and len(engines()) == 1, "one engine serves")
        load.set_clients(12)
        await eventually(lambda: num_running("engines") == 2 and len(engines()) == 2, "a second one has come")
        await load.events(50)
        load.set_clients(1)
        await eventually(lambda: num_running("engines") == 1 and len(engines()) == 1, "it has gone")
        await load.events(10)

    under_load(alone, 2, scale)
