"""How long do streams pause when their engine is killed? For a large model on a GPU.

    python bench/dummy_model.py llama-3.1-8b /tmp/llama-3.1-8b
    python bench/restart_pause.py --model /tmp/llama-3.1-8b --out bench/results/h200/restart-pause.json
    python bench/restart_pause.py --model /tmp/llama-3.1-8b --kills 1 --flag=--replicas=2

It starts `minisgl serve --dummy-weights`, opens streams, and kills the engine's process as often as --kills
says, each time when all streams have got the same number of further tokens. The pause is a stream's longest
time between two tokens, the first of which came in the 0.1 s before the kill or until the engine was ready
again. Of several replicas the first is killed, whose streams go on in another, which computes their prompts
again; its own streams wait for that, too. The second table has the milliseconds of each stage of the new
engine's start. The exit code is 1 if an answer is not whole.
bench/kills.py compares the tokens with those of an undisturbed run, for a small model.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from kills import Answer, pauses, read

from minisgl.benchmark.reports.report import format_table, make_report, write_report

LIMIT_S = 240.0


def start(model: str, log: Path, flags: list[str]) -> tuple[str, subprocess.Popen[str]]:
    """The server's address and its process."""
    command = [sys.executable, "-m", "minisgl", "serve", "--model", model, "--dummy-weights", "--port", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        found = re.match(r"curl (http://[^/]+)/", line)
        if found:
            return found[1], process
    raise SystemExit(log.read_text())


async def kill_at(
    session: aiohttp.ClientSession, url: str, answers: list[Answer], num_tokens: int
) -> dict[str, Any]:
    """Kill the engine when each answer has `num_tokens`, and wait for its next life."""
    while min(len(one.token_ids.get(0, [])) for one in answers) < num_tokens:
        failed = next((one.error for one in answers if one.error), None)
        if failed:
            raise SystemExit(f"a stream ended with {failed}")
        await asyncio.sleep(0.01)
    before = await first_engine(session, url, "health")
    at = time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    now = before
    while not (now["up"] and now["restarts"] > before["restarts"]):
        await asyncio.sleep(0.05)
        now = await first_engine(session, url, "health")
    ready_s = round(time.monotonic() - at, 2)
    stages = (await first_engine(session, url, "debug/engines"))["startup_ms"]
    return {"at": at, "ready_s": ready_s, "stages": stages}


async def first_engine(session: aiohttp.ClientSession, url: str, path: str) -> dict[str, Any]:
    """What a page says of the engine that is killed: of several replicas the first."""
    async with session.get(f"{url}/{path}") as response:
        return (await response.json())["engines"][0]


async def measure(
    url: str, streams: int, tokens: int, kills: int
) -> tuple[list[Answer], list[dict[str, Any]]]:
    source = random.Random(1)
    answers = [Answer() for _ in range(streams)]
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        readers = []
        for number, answer in enumerate(answers):
            body = {
                "prompt": [source.randrange(1000, 30000) for _ in range(source.randrange(100, 1000))],
                "max_tokens": tokens,
                "seed": number,
                "temperature": 0.6,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            readers.append(asyncio.ensure_future(read(session, url, body, answer)))
        rows = [
            await kill_at(session, url, answers, (number + 1) * tokens // (kills + 1))
            for number in range(kills)
        ]
        await asyncio.gather(*readers)
    return answers, rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600, help="of each answer")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--flag", action="append", default=[], help="for the server, as --flag=--tp=2")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url, process = start(arguments.model, Path(folder) / "log", arguments.flag)
        try:
            work = measure(url, arguments.streams, arguments.tokens, arguments.kills)
            answers, rows = asyncio.run(work)
        finally:
            process.terminate()
            process.wait(30)
    stages = [{"kill": number, **row.pop("stages")} for number, row in enumerate(rows, 1)]
    for row in rows:
        at = row.pop("at")
        gaps = pauses(answers, at - 0.1, at + row["ready_s"])
        row |= {"streams": len(gaps), "p50_s": round(gaps[len(gaps) // 2], 2), "max_s": round(gaps[-1], 2)}
    whole = sum(one.is_whole and len(one.token_ids[0]) == arguments.tokens for one in answers)
    print(format_table(rows), *map(str, stages), f"{whole} of {len(answers)} answers whole", sep="\n")
    if arguments.out:
        options = {name: getattr(arguments, name) for name in ("model", "streams", "tokens", "kills", "flag")}
        report = make_report(
            "restart_pause",
            arguments=options | {"model": Path(arguments.model).name, "flag": " ".join(arguments.flag)},
            metrics={"whole": whole, "pause_max_s": max(row["max_s"] for row in rows)},
            tables={"kills": rows, "stages": stages},
        )
        write_report(arguments.out, report)
    return 0 if whole == len(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
