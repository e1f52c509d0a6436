"""The load client against a server that keeps to a timetable or misbehaves."""

import asyncio
import itertools
import json
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from minisgl.benchmark.load.datasets import Dialogue, Lengths, multi_turn_prompts, random_prompts
from minisgl.benchmark.load.latency import PERCENTILES
from minisgl.benchmark.load.load_client import ERROR_KINDS, Answer, Target, open_client
from minisgl.benchmark.load.load_run import Load, LoadRun, run_load
from minisgl.benchmark.load.serve_plan import Point
from minisgl.benchmark.load.serve_report import report_point
from minisgl.errors import ConfigError

FAKE = Path(__file__).with_name("fake_openai_server.py")


class FakeServer(NamedTuple):
    url: str

    def records(self, run: str) -> list[dict[str, Any]]:
        """What it recorded of the requests that bear the name `run`, in the order of their `seq`."""
        with urllib.request.urlopen(f"{self.url}/records", timeout=10) as answer:
            found = [one for one in json.loads(answer.read()) if one["body"].get("run") == run]
        return sorted(found, key=lambda one: one["body"].get("seq", 0))


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    process = subprocess.Popen([sys.executable, str(FAKE)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield FakeServer(f"http://127.0.0.1:{process.stdout.readline().strip()}")
    process.kill()
    process.wait()
    process.stdout.close()


def target(server: FakeServer, *, is_chat: bool = False, timeout_s: float = 60.0, **fields: Any) -> Target:
    return Target(url=server.url, is_chat=is_chat, model="fake", fields=fields, timeout_s=timeout_s)


def ask(to: Target, num_tokens: int = 4, **fake: Any) -> Answer:
    """One request."""

    async def send() -> Answer:
        async with open_client(to) as client:
            prompt: object = [{"role": "user", "content": "hi"}] if to.is_chat else [1, 2]
            body = json.loads(to.body(prompt, num_tokens)) | {"fake": fake}
            return await client.send(json.dumps(body).encode(), keep_text=True)

    return asyncio.run(send())


def run(to: Target, load: Load, num_requests: int, num_tokens: int = 3, num_turns: int = 1) -> LoadRun:
    """Made-up conversations of text."""
    lengths = Lengths((3, 6), (num_tokens, num_tokens))
    conversations = multi_turn_prompts(num_requests, lengths, 0, num_turns)

    async def go() -> LoadRun:
        async with open_client(to) as client:
            return await run_load(
                client, conversations, load, new_dialogue=lambda: Dialogue("text", (0,), 9000)
            )

    return asyncio.run(go())


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    "fake",
    [{}, {"crlf": True}, {"comments": True}, {"split": True}, {"no_done": True}, {"per_write": 3}],
    ids=str,
)
def test_an_answer_is_complete_with_the_servers_counts(server: FakeServer, is_chat: bool, fake: dict) -> None:
    answer = ask(target(server, is_chat=is_chat), num_tokens=7, **fake)
    assert (answer.error, answer.error_message) == (None, "")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 7)
    assert answer.usage.num_cached_tokens == 3
    assert sum(answer.stream.counts) == 7
    assert answer.stream.text == " a" * 7
    assert answer.stream.finish_reason == "length"


def test_tokens_are_usages_where_events_hold_several(server: FakeServer) -> None:
    answer = ask(target(server), num_tokens=10, per_event=4)
    assert (answer.usage.completion_tokens, sum(answer.stream.counts)) == (10, 3)


@pytest.mark.parametrize(
    ("fake", "kind", "words"),
    [
        ({"status": 429}, "http_429", "too many of you"),
        ({"status": 500}, "http_500", "too many of you"),
        ({"status": 307}, "http_307", "too many of you"),
        ({"html": True}, "not_a_stream", "text/html"),
        ({"no_answer": True}, "no_answer", ""),
        ({"fail_after": "error", "after": 2}, "stream_error", "the engine died"),
        ({"fail_after": "error", "after": 0}, "stream_error", "the engine died"),
        ({"fail_after": "cut", "after": 2}, "truncated", ""),
        ({"fail_after": "end", "after": 2}, "truncated", "without a finish reason"),
        ({"fail_after": "garbage", "after": 2}, "bad_event", "choices"),
        ({"fail_after": "hang", "after": 2}, "client_timeout", "--timeout-s"),
        ({"first_s": 30}, "client_timeout", "--timeout-s"),
        ({"no_usage": True}, "no_usage", "include_usage"),
        ({"no_finish": True}, "truncated", "without a finish reason"),
    ],
    ids=str,
)
def test_every_way_to_fail_has_its_kind(server: FakeServer, fake: dict, kind: str, words: str) -> None:
    answer = ask(target(server, timeout_s=0.5 if kind == "client_timeout" else 60), **fake)
    assert answer.error == kind
    assert words in answer.error_message
    assert ("http" if kind.startswith("http_") else kind) in ERROR_KINDS


def test_an_answer_without_a_token_is_an_error(server: FakeServer) -> None:
    assert ask(target(server, is_chat=True), num_tokens=0).error == "empty_answer"


def test_nobody_there_is_a_connect_error_and_named_when_the_model_is_asked_for() -> None:
    nowhere = Target(url="http://127.0.0.1:9", fields={})
    assert ask(nowhere).error == "connect"

    async def find(url: str) -> str:
        async with open_client(Target(url=url, fields={})) as client:
            return await client.find_model()

    with pytest.raises(ConfigError, match=r"no server answers at http://127.0.0.1:9 .*--url"):
        asyncio.run(find("http://127.0.0.1:9"))


def test_the_model_is_the_servers_first_and_wrong_paths_are_explained(server: FakeServer) -> None:
    async def find(url: str) -> str:
        async with open_client(Target(url=url, fields={})) as client:
            return await client.find_model()

    assert asyncio.run(find(server.url)) == "fake-model"
    with pytest.raises(ConfigError, match=r"HTTP status 404.*no route.*without a path"):
        asyncio.run(find(f"{server.url}/v2"))


def test_reported_percentiles_are_those_of_what_the_server_did(server: FakeServer) -> None:
    """Within 1 %, against the server's own times on the same clock. A busy machine may delay one process and
    not the other, so each figure must be right in one of four runs; a mistake would be in all."""
    nearest = [1.0]
    for number in range(4):
        errors = list(_percentile_errors(server, f"timing {number}"))
        nearest = list(map(min, nearest, errors)) if number else errors
        if max(nearest) <= 0.01:
            break
    assert max(nearest) <= 0.01, nearest


def _percentile_errors(server: FakeServer, name: str) -> Iterator[float]:
    """How far TTFT, ITL, TPOT and E2E are from those that follow from the server's records."""
    num = 12
    rng = np.random.default_rng(0)

    async def go() -> LoadRun:
        async with open_client(target(server)) as client:
            plans = [
                {"first_s": float(first), "gap_s": float(gap)}
                for first, gap in zip(rng.uniform(0.3, 0.8, num), rng.uniform(0.09, 0.15, num), strict=True)
            ]
            conversations = random_prompts(num, Lengths((3, 3), (4, 7)), 0)
            bodies = iter(
                json.dumps({**_body(one.turns[0].num_output_tokens), "run": name, "seq": seq, "fake": plan})
                for seq, (one, plan) in enumerate(zip(conversations, plans, strict=True))
            )
            send = client.send
            client.send = lambda body, *_: send(next(bodies).encode())  # type: ignore[method-assign]
            load = Load([0.004 * place for place in range(num)], None)
            return await run_load(client, conversations, load, new_dialogue=lambda: Dialogue("text", (0,), 9))

    found = report_point(Point("request_rate", 1, Load([], None)), asyncio.run(go()), {}).metrics
    records = server.records(name)
    times = [np.array([at for at, _ in one["writes"]]) for one in records]
    received = [one["received_at"] for one in records]
    truth = {
        "ttft": [at[0] - since for at, since in zip(times, received, strict=True)],
        "e2e": [at[-1] - since for at, since in zip(times, received, strict=True)],
        "tpot": [(at[-1] - at[0]) / (len(at) - 1) for at in times],
        "itl": np.concatenate([np.diff(at) for at in times]),
    }
    assert found["num_complete"] == num
    assert found["num_output_tokens"] == sum(map(len, times))
    for kind, values in truth.items():
        for percent in PERCENTILES:
            method = "inverted_cdf" if kind == "itl" else "linear"
            wanted = 1000 * np.percentile(values, percent, method=method)
            yield abs((found[f"{kind}_p{percent}_ms"] or 0.0) - wanted) / wanted


def _body(num_tokens: int) -> dict[str, Any]:
    return {"max_tokens": num_tokens, "stream": True}


def test_the_open_loop_does_not_wait_for_answers(server: FakeServer) -> None:
    slow = target(server, run="open", fake={"first_s": 0.6})
    done = run(slow, Load([0.05 * place for place in range(10)], None), 10)
    received = [one["received_at"] for one in server.records("open")]
    assert len(received) == 10
    assert max(received) - min(received) == pytest.approx(0.45, abs=0.3)
    assert done.max_open == 10
    lags = [one.answer.sent_at - one.due_at for one in done.sent if one.due_at is not None]
    assert len(lags) == 10
    assert 0 <= min(lags) <= max(lags) < 0.3


def test_the_closed_loop_keeps_so_many_open(server: FakeServer) -> None:
    done = run(target(server, run="closed", fake={"first_s": 0.05}), Load(None, 3), 9)
    assert (done.max_open, len(done.sent)) == (3, 9)
    spans = [(one["received_at"], one["writes"][-1][0]) for one in server.records("closed")]
    most = max(sum(start <= at < end for start, end in spans) for at, _ in spans)
    assert most <= 3


def test_more_requests_may_be_open_than_the_usual_limit_of_files(server: FakeServer) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, before[1]))
    try:
        done = run(target(server, fake={"first_s": 2.0}), Load([0.0] * 100, None), 100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert {one.answer.error for one in done.sent} == {None}
    assert done.max_open == 100


def test_turns_follow_one_another_and_remember_the_answers(server: FakeServer) -> None:
    done = run(target(server, run="turns", fake={"first_s": 0.02}), Load([0.0, 0.0], None), 2, num_turns=3)
    assert [one.answer.error for one in done.sent] == [None] * 6
    records = server.records("turns")
    for own in _conversations(records):
        assert len(own) == 3
        for earlier, later in itertools.pairwise(own):
            assert later["received_at"] > earlier["writes"][-1][0]
            assert later["body"]["prompt"].startswith(earlier["body"]["prompt"] + " a a a ")


def _conversations(records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    firsts = sorted(records, key=lambda one: len(one["body"]["prompt"]))[:2]
    return [
        sorted(
            (one for one in records if one["body"]["prompt"].startswith(first["body"]["prompt"])),
            key=lambda one: one["received_at"],
        )
        for first in firsts
    ]


def test_a_failed_turn_ends_its_conversation_and_the_others_go_on(server: FakeServer) -> None:
    done = run(target(server, fake={"status": 503}), Load(None, 2), 4, num_turns=3)
    assert (len(done.sent), done.num_skipped) == (4, 8)
    point = report_point(Point("concurrency", 2, Load(None, 2)), done, {"ttft": 100})
    assert point.metrics["num_errors"] == 4
    assert point.metrics["slo_attainment"] == 0
    assert point.errors == [
        {
            "error": "http_503",
            "count": 4,
            "meaning": ERROR_KINDS["http"],
            "first": "too many of you",
        }
    ]
    assert "ttft_p50_ms" not in point.metrics


def test_a_client_that_is_too_slow_says_so(server: FakeServer) -> None:
    async def go() -> LoadRun:
        async with open_client(target(server, fake={"first_s": 0.1, "gap_s": 0.1})) as client:
            burn = asyncio.get_running_loop().create_task(_burn(1.6))
            conversations = random_prompts(3, Lengths((3, 3), (14, 14)), 0)
            load = Load([0.0, 0.4, 0.8], None)
            done = await run_load(client, conversations, load, new_dialogue=lambda: Dialogue("text", (0,), 9))
            await burn
            return done

    async def _burn(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            turn_end = time.monotonic() + 0.05
            while time.monotonic() < turn_end:
                pass
            await asyncio.sleep(0)

    done = asyncio.run(go())
    point = report_point(Point("request_rate", 1, Load([], None)), done, {})
    assert any("this client was" in warning for warning in point.warnings)


def test_a_client_at_ease_does_not_complain(server: FakeServer) -> None:
    done = run(target(server, fake={"first_s": 0.3}), Load([0.0, 0.1], None), 2)
    assert done.watch.peak_cpu_share < 0.9
    assert report_point(Point("request_rate", 1, Load([], None)), done, {}).metrics["num_errors"] == 0
