"""Clients that leave at any moment, and a small server with the real engine for them to leave.

For the tests, and for bench/disconnects.py.
"""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from running_server import LIMIT_S
from small_model import make_folder

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


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """The server's URL; `folder` is where its model is made."""
    make_folder(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl", "serve", "--model", str(folder), *FLAGS, *flags],
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


def leave(url: str, num_requests: int, rng: random.Random) -> dict[str, int]:
    """So many requests; returns how many left in which way."""
    ends: dict[str, int] = {}
    port = int(url.rsplit(":", 1)[1])

    async def all_of_them() -> None:
        places = asyncio.Semaphore(NUM_AT_ONCE)

        async def one(seed: int) -> None:
            async with places:
                await leave_at_some_moment(port, random.Random(seed), ends)

        await asyncio.gather(*[one(rng.randrange(2**32)) for _ in range(num_requests)])

    asyncio.run(all_of_them())
    return ends


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
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
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


def held(url: str) -> dict[str, int]:
    """What the server and its engine hold now."""
    now = info(url)
    figures = {**now["server"], **now["engine"]}
    names = ("num_open_requests", "num_running_requests", "num_queued_tokens", "num_upload_bytes")
    names += ("num_waiting", "num_running", "num_held_pages", "num_held_rows", "num_broken_counts")
    return {name: figures[name] for name in names}
