"""How much more do several engines behind one server do than one? On as many GPUs.

    python bench/dummy_model.py qwen3-14b /tmp/qwen3-14b
    python bench/replicas.py --model /tmp/qwen3-14b --replicas 1 2 --out bench/results/h200/replicas.json

For each number of engines it starts `minisgl serve --dummy-weights --replicas N` and sends N times --requests
calls at once, each with its own prompt, in --rounds rounds after one that is not counted. Each engine has
a client process, so that the clients grow with what they measure. The figure is output tokens per second of
the median round. The exit code is 1 if an answer is not whole.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from restart_pause import LIMIT_S, start

from minisgl.benchmark.reports.report import format_table, make_report, write_report


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    """Send one call; returns the tokens of its answer. A stream is read to its end."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        if not body["stream"]:
            return (await response.json())["usage"]["completion_tokens"]
        tokens = 0
        async for line in response.content:
            if line.startswith(b"data: {") and b'"usage":{' in line:
                tokens = int(line.split(b'"completion_tokens":')[1].split(b",")[0].rstrip(b"}\n"))
        return tokens


async def send(url: str, arguments: argparse.Namespace, seed: str) -> dict[str, Any]:
    """One client's calls of one round. Times are of the clock that all processes share."""
    source = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        bodies = [
            {
                "prompt": [source.randrange(1000, 30000) for _ in range(arguments.prompt)],
                "max_tokens": arguments.tokens,
                "ignore_eos": True,
                "stream": arguments.stream,
            }
            | ({"stream_options": {"include_usage": True}} if arguments.stream else {})
            for _ in range(arguments.requests)
        ]
        began = time.monotonic()
        counts = await asyncio.gather(*(ask(session, url, body) for body in bodies))
        return {"began": began, "ended": time.monotonic(), "counts": counts}


def client(url: str, arguments: argparse.Namespace, seed: str) -> dict[str, Any]:
    """What a client process does in one round."""
    return asyncio.run(send(url, arguments, seed))


def one_round(pool: Any, url: str, clients: int, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    done = pool.starmap(client, [(url, arguments, f"{seed} {each}") for each in range(clients)], chunksize=1)
    elapsed = max(one["ended"] for one in done) - min(one["began"] for one in done)
    counts = [count for one in done for count in one["counts"]]
    whole = sum(count == arguments.tokens for count in counts)
    return {"elapsed_s": elapsed, "tokens_per_s": sum(counts) / elapsed, "whole": whole}


def measure(replicas: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A server with so many engines, from its start to its end."""
    flags = [f"--replicas={replicas}", f"--max-running-requests={arguments.requests}", *arguments.flag]
    # The client processes start here, so that no call waits for their start.
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Pool(replicas) as pool:
        url, process = start(arguments.model, Path(folder) / "log", flags)
        try:
            rounds = [
                one_round(pool, url, replicas, arguments, seed) for seed in range(arguments.rounds + 1)
            ][1:]
        finally:
            process.terminate()
            process.wait(60)
    return {
        "engines": replicas,
        "calls": replicas * arguments.requests,
        "whole": min(one["whole"] for one in rounds),
        "tokens_per_s": round(statistics.median(one["tokens_per_s"] for one in rounds), 1),
        "rounds": " ".join(f"{one['tokens_per_s']:.0f}" for one in rounds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=256, help="at once, for each engine")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream", action="store_true", help="read the answers as streams")
    parser.add_argument("--flag", action="append", default=[], help="for the server, as --flag=--tp=2")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [measure(replicas, arguments) for replicas in arguments.replicas]
    for row in rows:
        row["times_one"] = round(row["tokens_per_s"] / rows[0]["tokens_per_s"] * rows[0]["engines"], 3)
    print(format_table(rows))
    if arguments.out:
        options = {name: value for name, value in vars(arguments).items() if name != "out"}
        report = make_report(
            "replicas",
            arguments=options | {"model": Path(arguments.model).name, "flag": " ".join(arguments.flag)},
            metrics={f"times_one_{row['engines']}": row["times_one"] for row in rows},
            tables={"engines": rows},
        )
        write_report(arguments.out, report)
    return 0 if all(row["whole"] == row["calls"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
