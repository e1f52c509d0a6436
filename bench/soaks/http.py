"""Clients of every kind against a server with a tiny model and the real engine, on few rows and pages.

`run_slices` starts one server. After each slice it waits until the server is idle, and counts what it holds:
requests, rows, pages, file descriptors, processes, memory. In some slices the engine is killed (SIGKILL) or
reloaded while the clients run; the others show what a long life costs.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from soaks.simulation import resident_bytes

from minisgl.benchmark.reports.report import Cell

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "server"))
from leaving_clients import NUM_AT_ONCE, held, info, leave_at_some_moment, served

IDLE_LIMIT_S = 60.0
ANSWER_LIMIT_S = 120.0
ADMIN = "soak"
FLAGS = ("--admin-key", ADMIN, "--engine-restarts", "100")
BLOCK = 50
"""So many slices with disturbances are followed by as many without."""
EVERY = 5
"""Of the slices with disturbances, each of these has one."""
SLACK_FDS = 4
"""Descriptors that a server may have more than after its first slice."""
VOCAB_SIZE = 300
LOGARITHM_OF_LONGEST = (4.1, 3.7)
"""Of the longest prompt (60 tokens) and output (40); lengths are uniform on a logarithmic scale."""
BAD = (
    b"{",
    b"[]",
    b'"prompt"',
    b"\xff\xfe",
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "max_tokens": "many"}',
    b'{"prompt": "a", "temperature": -2}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": [[1], "a"]}',
    b'{"prompt": [999999]}',
    b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "model": "another"}',
    b'{"prompt": ' + json.dumps([5] * 4000).encode() + b"}",
    b'{"messages": 7}',
)


def run_slices(first: int, end: int, seed: int, num_requests: int) -> Iterator[dict[str, Cell]]:
    """One line of the report's table for each slice."""
    if first >= end:
        return
    with tempfile.TemporaryDirectory() as name, served(Path(name) / "model", *FLAGS) as url:
        before: dict[str, int] | None = None
        for index in range(first, end):
            row, before = _slice(url, index, random.Random(f"{seed} {index}"), num_requests, before)
            yield row


def _slice(
    url: str, index: int, rng: random.Random, num_requests: int, before: dict[str, int] | None
) -> tuple[dict[str, Cell], dict[str, int]]:
    earlier, pid = info(url)["engine"], info(url)["engine_pid"]
    began = time.perf_counter()
    disturbance = _disturbance(index)
    kinds, problems = asyncio.run(_all_clients(url, rng, num_requests, disturbance))
    elapsed_s = time.perf_counter() - began
    deadline = time.monotonic() + IDLE_LIMIT_S
    while any((left := held(url)).values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    problems += [f"{name} is {value} though nothing runs" for name, value in left.items() if value]
    engine, is_other = info(url)["engine"], info(url)["engine_pid"] != pid
    if is_other != bool(disturbance):
        problems.append(
            f"after {disturbance or 'nothing'}, the engine is {'another' if is_other else 'the same'}"
        )
    if is_other:  # its counters began at 0
        earlier = dict.fromkeys(earlier, 0)
    now = _resources(info(url)["engine_pid"])
    before = before or now
    if now["num_processes"] != before["num_processes"]:
        problems.append(f"{now['num_processes']} processes instead of {before['num_processes']}")
    if now["num_fds"] > before["num_fds"] + SLACK_FDS:
        problems.append(f"{now['num_fds']} file descriptors instead of {before['num_fds']}")
    row: dict[str, Cell] = {
        "slice": index,
        "disturbance": disturbance,
        "num_requests": num_requests,
        "num_leaving": kinds["leave"],
        "num_slow": kinds["slow"],
        "num_bad": kinds["bad"],
        "num_steps": engine["num_steps"] - earlier["num_steps"],
        "num_preemptions": engine["num_preemptions"] - earlier["num_preemptions"],
        "num_output_tokens": engine["num_output_tokens"] - earlier["num_output_tokens"],
        "elapsed_s": round(elapsed_s, 2),
        **now,
        "problems": "; ".join(problems[:10]),
    }
    return row, before


def _disturbance(index: int) -> str:
    """What happens to the engine in this slice; empty = nothing."""
    if index // BLOCK % 2 or index % EVERY != EVERY - 1:
        return ""
    return ("kill", "reload", "kill", "reload without room")[index // EVERY % 4]


async def _disturb(url: str, disturbance: str) -> None:
    """Kill the engine, or have it reloaded.

    Raises:
        OSError: the server refused it.
    """
    if disturbance == "kill":
        os.kill((await asyncio.to_thread(info, url))["engine_pid"], signal.SIGKILL)
        return
    body = json.dumps({"beside": disturbance == "reload"}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"}
    request = urllib.request.Request(f"{url}/reload", body, headers)
    (await asyncio.to_thread(urllib.request.urlopen, request)).close()


async def _all_clients(
    url: str, rng: random.Random, num_requests: int, disturbance: str
) -> tuple[Counter[str], list[str]]:
    """Run the clients, some at once; returns how many there were of each kind, and what went wrong."""
    port = int(url.rsplit(":", 1)[1])
    kinds: Counter[str] = Counter()
    problems: list[str] = []
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def leave(port: int, rng: random.Random) -> None:
        await leave_at_some_moment(port, rng, {})

    clients: dict[str, Callable[[int, random.Random], Awaitable[None]]] = {
        "whole": _read_all,
        "slow": _read_slowly,
        "leave": leave,
        "bad": _send_bad_input,
    }

    disturbed_at = rng.randrange(num_requests // 4, num_requests // 2) if disturbance else -1

    async def one(kind: str, seed: int) -> None:
        async with places:
            kinds[kind] += 1
            try:
                if kinds.total() == disturbed_at:
                    await _disturb(url, disturbance)
                await asyncio.wait_for(clients[kind](port, random.Random(seed)), ANSWER_LIMIT_S)
            except Exception as error:
                problems.append(f"{kind}: {type(error).__name__}: {str(error)[:200]}")

    drawn = rng.choices(list(clients), weights=(55, 5, 30, 10), k=num_requests)
    await asyncio.gather(*[one(kind, rng.randrange(2**32)) for kind in drawn])
    return kinds, problems


async def _read_all(port: int, rng: random.Random) -> None:
    body = _random_body(rng)
    status, answer = await _call(port, json.dumps(body).encode())
    _check(body, status, answer)


async def _read_slowly(port: int, rng: random.Random) -> None:
    body = _random_body(rng)
    status, answer = await _call(port, json.dumps(body).encode(), piece=rng.randint(20, 400), pause_s=0.005)
    _check(body, status, answer)


async def _send_bad_input(port: int, rng: random.Random) -> None:
    status, answer = await _call(port, rng.choice(BAD))
    assert 400 <= status < 500, f"bad input got {status}"
    assert json.loads(answer)["error"]["message"]


def _random_body(rng: random.Random) -> dict[str, Any]:
    num_prompt, num_output = [int(2.718281828 ** rng.uniform(0, longest)) for longest in LOGARITHM_OF_LONGEST]
    stream = rng.random() < 0.6
    body = {
        "prompt": [rng.randrange(3, VOCAB_SIZE) for _ in range(num_prompt)],
        "max_tokens": num_output,
        "ignore_eos": True,
        "n": rng.randint(1, 3),
        "stream": stream,
        "temperature": rng.choice([0, 1]),
    }
    if rng.random() < 0.3:  # a prefix that others have, too
        body["prompt"] = [3 + place % 7 for place in range(num_prompt)]
    if rng.random() < 0.2:
        body["cache_salt"] = rng.choice(["a", "b"])
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


async def _call(port: int, body: bytes, *, piece: int = 1 << 16, pause_s: float = 0.0) -> tuple[int, bytes]:
    """POST /v1/completions; reads `piece` bytes at a time, with pauses. Returns status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    pieces = []
    while data := await reader.read(piece):
        pieces.append(data)
        if pause_s:
            await asyncio.sleep(pause_s)
    writer.close()
    head_bytes, _, answer = b"".join(pieces).partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), answer


def _check(body: dict[str, Any], status: int, answer: bytes) -> None:
    """Every choice has all of its tokens and one end; a stream has nothing after it.

    Raises:
        AssertionError: says what is wrong.
    """
    assert status == 200, f"status {status}: {answer[:200]!r}"
    ends: Counter[int] = Counter()
    if body["stream"]:
        events = [
            line.removeprefix(b"data: ") for line in answer.split(b"\n\n") if line.startswith(b"data: ")
        ]
        assert events.count(b"[DONE]") == 1, f"{events.count(b'[DONE]')} times [DONE]"
        assert events[-1] == b"[DONE]", "something follows [DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
    else:
        chunks = [json.loads(answer)]
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            assert not ends[choice["index"]], "a choice goes on after its end"
            if choice["finish_reason"] is not None:
                assert choice["finish_reason"] == "length", f"ended by {choice['finish_reason']}"
                ends[choice["index"]] += 1
    assert ends == Counter(range(body["n"])), f"choices that ended: {dict(ends)} of {body['n']}"
    wanted = body["n"] * body["max_tokens"]
    assert usage is not None, "no usage"
    assert usage["completion_tokens"] == wanted, f"{usage['completion_tokens']} tokens instead of {wanted}"
    assert usage["prompt_tokens"] == len(body["prompt"])


def _resources(engine_pid: int) -> dict[str, int]:
    """What the server's processes have now: this process's descendants (Linux)."""
    pids, parents = [], [os.getpid()]
    while parents:
        parent = parents.pop()
        for task in Path(f"/proc/{parent}/task").iterdir():
            children = [int(pid) for pid in (task / "children").read_text(encoding="ascii").split()]
            pids += children
            parents += children
    return {
        "num_processes": len(pids),
        "num_fds": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "engine_pid": engine_pid,
        "server_rss_bytes": sum(resident_bytes(pid) for pid in pids if pid != engine_pid),
        "engine_rss_bytes": resident_bytes(engine_pid),
    }
