"""The whole engine on the real model: greedy answers equal transformers', token for token, in float32.

Driven through the server as a client would, over the settings that must not change a token: batch,
prefix cache, chunk size, page size, overlap, preemption.
"""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.ipc.messages import AddRequest
from minisgl.request import FinishReason, SamplingParams
from minisgl.weights.sources import resolve_model_folder

DATA = Path(__file__).parent / "data"
STARTUP_LIMIT_S = 120
pytestmark = pytest.mark.timeout(900)  # a minute each on two idle cores, on a busy machine many times that


def load_cases() -> list[dict[str, Any]]:
    """Each with prompt_text, prompt_ids, messages or None, ids, text, finish."""
    first = json.loads((DATA / "smollm2_golden.json").read_text(encoding="utf-8"))
    more = json.loads((DATA / "smollm2_more_golden.json").read_text(encoding="utf-8"))
    cases = [case | case["float32"] | {"limit": first["max_new_tokens"]} for case in first["cases"]]
    cases += [case | {"limit": more["max_new_tokens"]} for case in more["cases"]]
    return cases


CASES = load_cases()


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """`minisgl serve` with the built-in model in float32; yields its base URL."""
    command = [sys.executable, "-m", "minisgl", "serve", "--port", "0", "--dtype", "float32", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("curl "):
                break
        address = re.search(r"http://[^/ ]+", seen[-1]) if seen else None
        assert address is not None, "".join(seen)
        yield address[0]
    finally:
        process.terminate()
        assert process.wait(STARTUP_LIMIT_S) == 0


async def ask(session: aiohttp.ClientSession, url: str, case: dict[str, Any]) -> dict[str, Any]:
    """One greedy, non-streamed answer; the chat endpoint where the case has messages."""
    body: dict[str, Any] = {"model": "smollm2-135m", "temperature": 0, "max_tokens": case["limit"]}
    if case.get("messages"):
        path, body["messages"] = "/v1/chat/completions", case["messages"]
    else:
        path, body["prompt"] = "/v1/completions", case["prompt_text"]
    async with session.post(url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def ask_all(url: str, at_a_time: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases' answers, checked against transformers."""

    async def run() -> list[dict[str, Any]]:
        gate = asyncio.Semaphore(at_a_time)

        async def one(case: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                return await ask(session, url, case)

        async with aiohttp.ClientSession() as session:
            return list(await asyncio.gather(*[one(case) for case in cases]))

    answers = asyncio.run(run())
    for case, answer in zip(cases, answers, strict=True):
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text == case["text"], case["prompt_text"][-60:]
        assert answer["usage"]["prompt_tokens"] == len(case["prompt_ids"])
        assert answer["usage"]["completion_tokens"] == len(case["ids"])
        expected = "length" if len(case["ids"]) == case["limit"] else "stop"
        assert choice["finish_reason"] == expected
    return answers


def cached_tokens(answers: list[dict[str, Any]]) -> int:
    return sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)


async def engine_status(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(url + "/health") as response:
        return (await response.json())["engine"]


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        (("--page-size", "16", "--overlap"), 0),
        (("--page-size", "1", "--chunk-tokens", "16", "--no-overlap"), 1),
        (("--page-size", "256", "--chunk-tokens", "64", "--overlap"), 2),
        (("--page-size", "16", "--chunk-tokens", "16", "--overlap", "--no-prefix-cache"), 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_many_at_a_time_with_the_prefix_cache_cold_and_warm(flags: tuple[str, ...], first: int) -> None:
    cases = CASES[first::8]  # each case with one of the settings, or preempted
    with serving(*flags) as url:
        cold = cached_tokens(ask_all(url, at_a_time=12, cases=cases))
        warm = cached_tokens(ask_all(url, at_a_time=12, cases=cases))
    page_size = int(flags[1])
    reusable = sum((len(case["prompt_ids"]) - 1) // page_size * page_size for case in cases)
    assert warm == (0 if "--no-prefix-cache" in flags else reusable)
    assert cold < warm or warm == 0


def test_one_at_a_time() -> None:
    with serving("--overlap") as url:
        ask_all(url, at_a_time=1, cases=CASES[::9])


def test_after_forced_preemption() -> None:
    # Sixteen rows want far more than the pool's 50 pages, and nothing is reserved for outputs.
    flags = ("--num-pages", "51", "--output-reserve-tokens", "0", "--max-running-requests", "16")
    with serving(*flags, "--overlap") as url:
        ask_all(url, at_a_time=16, cases=[case for index, case in enumerate(CASES) if index % 8 >= 4])
        status = asyncio.run(engine_status(url))
    assert status["num_preemptions"] > 0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(dtype="float32", overlap=True, max_running_requests=8, chunk_tokens=48)
    engine = build_engine(config, resolve_model_folder("smollm2-135m"), lambda name, ms: None)
    yield engine
    engine.close()


def test_the_engine_gives_the_golden_token_ids(engine: Engine) -> None:
    got: dict[int, list[int]] = {}
    cases = CASES[:8]
    for index, case in enumerate(cases):
        got[index] = []
        prompt_ids = np.asarray(case["prompt_ids"], dtype="<i4").tobytes()
        engine.add(AddRequest(index, prompt_ids, SamplingParams(temperature=0, max_tokens=case["limit"])))
    while engine.has_work:
        for output in engine.step():
            got[output.request_id] += output.token_ids
    assert got == {index: case["ids"] for index, case in enumerate(cases)}


def test_a_seeded_request_gets_the_same_tokens_alone_and_in_a_batch(engine: Engine) -> None:
    def run(request_ids: list[int]) -> dict[int, list[int]]:
        got: dict[int, list[int]] = {request_id: [] for request_id in request_ids}
        for request_id in request_ids:
            prompt = np.arange(100 + request_id % 100, 120, dtype="<i4").tobytes()
            params = SamplingParams(temperature=0.8, top_p=0.95, seed=request_id % 100, max_tokens=12)
            engine.add(AddRequest(request_id, prompt, params))
        while engine.has_work:
            for output in engine.step():
                got[output.request_id] += output.token_ids
        return got

    together = run([1000, 1001, 1002, 1003])
    alone = run([1102])
    assert alone[1102] == together[1002]
    assert len({tuple(tokens) for tokens in together.values()}) > 1


def test_a_lost_page_is_noticed_at_idle_and_the_engine_goes_on(engine: Engine) -> None:
    engine.check_at_idle()
    assert engine.num_broken_counts == 0
    engine.cache.admit(np.arange(50, dtype=np.int32))  # a lease that nobody gives back
    engine.cache.grow(engine.cache.admit(np.arange(50, dtype=np.int32)), 50)
    engine.check_at_idle()
    assert engine.num_broken_counts == 1
    assert engine.status(0).num_free_pages == engine.num_pages
    case = CASES[0]
    prompt_ids = np.asarray(case["prompt_ids"], dtype="<i4").tobytes()
    engine.add(AddRequest(3000, prompt_ids, SamplingParams(temperature=0, max_tokens=case["limit"])))
    got = []
    while engine.has_work:
        got += [token for output in engine.step() for token in output.token_ids]
    assert got == case["ids"]
    engine.check_at_idle()
    assert engine.num_broken_counts == 1


def test_an_abort_in_the_middle_leaves_the_engine_as_it_was(engine: Engine) -> None:
    engine.flush_prefix_cache()
    free = engine.status(0).num_free_pages
    prompt = np.arange(200, 300, dtype="<i4").tobytes()
    for request_id in range(2000, 2006):
        engine.add(AddRequest(request_id, prompt, SamplingParams(max_tokens=50, ignore_eos=True, seed=0)))
    finals = {}
    for step in range(10_000):
        if not engine.has_work:
            break
        if step in (1, 2, 3):
            engine.abort(2000 + step)
        for output in engine.step():
            if output.finish_reason is not None:
                assert output.request_id not in finals
                finals[output.request_id] = output.finish_reason
    aborted = [request_id for request_id, reason in finals.items() if reason is FinishReason.ABORT]
    assert sorted(aborted) == [2001, 2002, 2003]
    assert len(finals) == 6
    engine.flush_prefix_cache()
    assert engine.status(0).num_free_pages == free
