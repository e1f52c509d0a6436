"""Two API keys, one floods: what does the other one notice, and are the counts right?

    python bench/fair_keys.py --out bench/results/cpu/fair-keys.json

A real server with two keys of a file, neither with a limit. The quiet key sends one request after the other
and takes the time to the first token, in turns alone and beside a flood: the other key keeps `--flood-open`
requests open, several times as many as the engine runs at once, with long answers. Turns make a machine that
others use, too, slow both alike.

Bars: the quiet key's 99th percentile beside the flood is under twice its value alone. Of every call that was
answered, the usage log has the counts of the answer's `usage`, and the sums of the log are those of /metrics.
"""

import argparse
import asyncio
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from minisgl.benchmark.reports.report import format_table, make_report, write_report
from minisgl.config.api_keys import KeyEntry, append_api_key, hash_of, new_key
from minisgl.ipc.child_process import module_command

QUIET, FLOOD = "quiet", "flood"
BAR = 2.0
LIMIT_S = 600.0


class Served:
    """A running server with the two keys."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.keys = {name: new_key() for name in (QUIET, FLOOD)}
        for name, key in self.keys.items():
            append_api_key(folder / "keys.jsonl", KeyEntry(name=name, key_sha256=hash_of(key)))
        self.usage_log = folder / "usage.jsonl"
        flags = [f"--model={arguments.model}", "--port=0", f"--max-running-requests={arguments.rows}"]
        flags += [f"--api-keys-file={folder / 'keys.jsonl'}", f"--usage-log={self.usage_log}"]
        self.process = subprocess.Popen(
            [*module_command("minisgl"), "serve", *flags, *arguments.flag], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None  # opened as a pipe
        self.url = ""
        for line in self.process.stdout:
            if line.startswith("curl "):
                self.url = line.removeprefix("curl ").split("/v1/")[0]
                break
        if not self.url:
            raise SystemExit("the server did not start")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None  # opened as a pipe
        self.process.stdout.close()


class Client:
    """Sends requests with random prompts, and keeps what their answers say of usage."""

    def __init__(self, session: aiohttp.ClientSession, served: Served, arguments: argparse.Namespace) -> None:
        self.session = session
        self.served = served
        self.arguments = arguments
        self.rng = np.random.default_rng(arguments.seed)
        self.usage: dict[str, tuple[int, int, int]] = {}  # request id -> prompt, cached, output tokens
        self.statuses: collections.Counter[str] = collections.Counter()

    async def ask(self, name: str, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Seconds to the first token of one streamed request, which is read to its end."""
        body = {
            "prompt": self.rng.integers(1000, 20_000, num_prompt_tokens).tolist(),
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
            "stream": True,
            "return_cached_tokens_details": True,
            "return_token_ids": True,  # an event for every token, also for one without text
            "stream_options": {"include_usage": True},
        }
        headers = {"Authorization": f"Bearer {self.served.keys[name]}"}
        begin = time.perf_counter()
        first_s = 0.0
        url = f"{self.served.url}/v1/completions"
        async with self.session.post(url, json=body, headers=headers) as answer:
            self.statuses[f"{name} {answer.status}"] += 1
            if answer.status != 200:
                raise RuntimeError(await answer.text())
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                if not first_s:
                    first_s = time.perf_counter() - begin
                usage = json.loads(line[6:]).get("usage")
                if usage:
                    details = usage.get("prompt_tokens_details") or {}
                    self.usage[answer.headers["X-Request-Id"]] = (
                        usage["prompt_tokens"],
                        details.get("cached_tokens", 0),
                        usage["completion_tokens"],
                    )
        return first_s

    async def quiet_phase(self) -> list[float]:
        """Times to first token of the quiet key's requests, one after the other."""
        times = []
        for _ in range(self.arguments.requests):
            times.append(await self.ask(QUIET, self.arguments.prompt, self.arguments.output))
            # At any moment of the flood's steps.
            await asyncio.sleep(self.arguments.pause_s * float(self.rng.uniform(0.5, 1.5)))
        return times

    async def flood(self) -> None:
        """One of the flood's callers: as soon as it has its answer, it asks again."""
        while True:
            await self.ask(FLOOD, self.arguments.flood_prompt, self.arguments.flood_output)

    async def flooded_phase(self) -> list[float]:
        """The same beside the flood, once requests of it wait for a row."""
        flood = [asyncio.ensure_future(self.flood()) for _ in range(self.arguments.flood_open)]
        try:
            while ((await self.load())["waiting"] or 0) < self.arguments.flood_open - 2 * self.arguments.rows:
                await asyncio.sleep(0.05)
            return await self.quiet_phase()
        finally:
            for one in flood:
                one.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            while (await self.load())["server_load"]:
                await asyncio.sleep(0.05)

    async def load(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.served.keys[QUIET]}"}
        async with self.session.get(f"{self.served.url}/load", headers=headers) as answer:
            return await answer.json()

    async def counted(self) -> dict[str, int]:
        """The counts of /metrics, by "key kind"."""
        async with self.session.get(f"{self.served.url}/metrics") as answer:
            text = await answer.text()
        found = re.findall(r'minisgl:key_tokens_total\{api_key="(.*?)",kind="(.*?)",.*?\} (\S+)', text)
        return {f"{key} {kind}": int(float(value)) for key, kind, value in found}


async def measure(
    served: Served, arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], Client, dict[str, int]]:
    """The times of both phases, over all rounds; the client; the counts of /metrics."""
    times: dict[str, list[float]] = {"alone": [], "beside the flood": []}
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, served, arguments)
        for name in (QUIET, FLOOD):  # warm up
            await client.ask(name, arguments.prompt, 2)
        for _ in range(arguments.rounds):
            times["alone"] += await client.quiet_phase()
            times["beside the flood"] += await client.flooded_phase()
        return times, client, await client.counted()


def check_counts(served: Served, client: Client, counted: dict[str, int]) -> list[str]:
    """What is wrong with the counts."""
    lines = [json.loads(line) for line in served.usage_log.read_text().splitlines()]
    logged = {
        line["request_id"]: (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"])
        for line in lines
    }
    wrong = [
        f"{one}: answered {usage}, logged {logged.get(one)}"
        for one, usage in client.usage.items()
        if logged.get(one) != usage
    ]
    sums: collections.Counter[str] = collections.Counter()
    for line in lines:
        for kind in ("prompt", "cached", "output"):
            sums[f"{line['key']} {kind}"] += line[f"{kind}_tokens"]
    wrong += [
        f"{kind}: {counted.get(kind, 0)} in /metrics, {sums[kind]} logged"
        for kind in {*counted, *sums}
        if counted.get(kind, 0) != sums[kind]
    ]
    if len(logged) != len(lines):
        wrong.append("a request has two lines")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=8, help="requests that the engine runs at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=17, help="of the quiet key, in each phase")
    parser.add_argument("--prompt", type=int, default=400, help="prompt tokens of the quiet key's requests")
    parser.add_argument("--output", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=2.5, help="mean pause between two of its requests")
    parser.add_argument("--flood-open", type=int, default=48)
    parser.add_argument("--flood-prompt", type=int, default=64)
    parser.add_argument("--flood-output", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--flag", action="append", default=[], help="a flag for the server, as --flag=--dtype=float32"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(arguments, Path(folder))
        try:
            times, client, counted = asyncio.run(measure(served, arguments))
            wrong = check_counts(served, client, counted)
        finally:
            served.close()
    rows = [
        {
            "quiet key": phase,
            "requests": len(values),
            **{f"p{q}_ms": round(float(np.percentile(values, q)) * 1e3, 1) for q in (50, 90, 99)},
        }
        for phase, values in times.items()
    ]
    print(format_table(rows))
    ratios = {f"ratio_p{q}": round(rows[1][f"p{q}_ms"] / rows[0][f"p{q}_ms"], 2) for q in (50, 90, 99)}
    print(f"beside the flood / alone: {ratios}; answered: {dict(client.statuses)}")
    print("counts equal usage" if not wrong else "\n".join(["counts differ:", *wrong[:20]]))
    if arguments.out is not None:
        given = {name: value for name, value in vars(arguments).items() if name != "out"}
        report = make_report(
            "fair-keys",
            arguments={**given, "load_average": round(os.getloadavg()[0], 1)},  # of everybody on this machine
            metrics={**ratios, "wrong_counts": len(wrong), "calls_compared": len(client.usage)},
            tables={"first_token": rows},
            samples={f"first_token_s {phase}": values for phase, values in times.items()},
        )
        write_report(arguments.out, report)
    return int(bool(wrong) or ratios["ratio_p99"] >= BAR)


if __name__ == "__main__":
    sys.exit(main())
