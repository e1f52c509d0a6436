"""Clients that leave at any moment, against the real engine: afterwards nothing is held."""

import asyncio
import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import LIMIT_S, eventually
from small_model import make_folder

NUM_REQUESTS = 250
NUM_AT_ONCE = 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
FLAGS = [
    *("--dummy-weights", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--port", "0"),
    # Few rows and pages, so that requests wait, and are preempted, when their client leaves.
    *("--max-running-requests", "8", "--num-pages", "60", "--page-size", "4", "--max-context-tokens", "128"),
    *("--max-step-tokens", "64", "--output-reserve-tokens", "1", "--api-workers", "2"),
]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "serve", "--model", str(folder), *FLAGS],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("curl "))
        yield line.split("/v1/")[0].removeprefix("curl ")
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        process.stdout.close()


async def leave_at_some_moment(port: int, rng: random.Random, ends: dict[str, int]) -> None:
    """One request; its client reads none, some, or all of the answer."""
    stream = rng.random() < 0.7
    body = json.dumps(
        {
            "prompt": [rng.randrange(3, 300) for _ in range(rng.randint(1, 60))],
            "max_tokens": rng.randint(1, 40),
            "ignore_eos": True,
            "n": rng.randint(1, 3),
            "stream": stream,
        }
    )
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = (head + body).encode()
    kind = rng.choice(("half a request", "at once", "after some bytes", "at the end"))
    writer.write(sent[: rng.randrange(1, len(sent))] if kind == "half a request" else sent)
    await writer.drain()
    if kind == "after some bytes":
        await reader.read(rng.randint(1, 4000))
    elif kind == "at the end":
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        assert (b"data: [DONE]" in answer) == stream
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()
    ends[kind] = ends.get(kind, 0) + 1


def info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/server_info", timeout=LIMIT_S) as answer:
        return json.load(answer)


def test_nothing_is_held_after_clients_left_at_random_moments(url: str) -> None:
    rng, ends = random.Random(7), dict[str, int]()
    port = int(url.rsplit(":", 1)[1])

    async def all_of_them() -> None:
        places = asyncio.Semaphore(NUM_AT_ONCE)

        async def one(seed: int) -> None:
            async with places:
                await leave_at_some_moment(port, random.Random(seed), ends)

        await asyncio.gather(*[one(rng.randrange(2**32)) for _ in range(NUM_REQUESTS)])

    asyncio.run(all_of_them())
    assert sum(ends.values()) == NUM_REQUESTS
    assert min(ends.values()) > NUM_REQUESTS / 8

    def held() -> dict[str, int]:
        now = info(url)
        figures = {**now["server"], **now["engine"]}
        names = ("num_open_requests", "num_running_requests", "num_queued_tokens", "num_upload_bytes")
        names += ("num_waiting", "num_running", "num_held_pages", "num_held_rows", "num_broken_counts")
        return {name: figures[name] for name in names}

    eventually(lambda: not any(held().values()), f"nothing is held, but {held()}")
    assert info(url)["engine"]["num_preemptions"] > 0
    assert info(url)["server"]["ended"]["abort"] > NUM_REQUESTS / 10
