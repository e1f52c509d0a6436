"""Do streams go on when a rank of an engine over several nodes is killed? Each node is a GPU of this host.

    python bench/dummy_model.py llama-3.1-8b /tmp/llama-3.1-8b
    python bench/torchrun_nodes.py --model /tmp/llama-3.1-8b --out bench/results/h200/torchrun-nodes.json

It starts `minisgl serve --engine-listen` and one torchrun agent for each node, with random weights. Streams
are read while rank 1 is killed, after which torchrun starts all ranks again. The pause is a stream's longest
time between two tokens. Whether the tokens are right is for bench/kills.py, with a trained model. The exit
code is 1 if an answer is not whole.
"""

import argparse
import asyncio
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
from kills import Answer, read

from minisgl.benchmark.reports.report import format_table, make_report, write_report

LIMIT_S = 300.0
READY_S = 240.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(model: str, nodes: int, log: Path) -> Iterator[str]:
    """The address of a server whose engine has a rank on each node."""
    environ = {**os.environ, "MINISGL_ENGINE_SECRET": secrets.token_hex(16)}
    port, engines, meeting = free_port(), free_port(), free_port()
    serve = ["-m", "minisgl", "serve", "--model", model, "--port", str(port)]
    serve += ["--engine-listen", f"tcp://127.0.0.1:{engines}"]
    agent = ["-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", "1"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{meeting}", "--max-restarts", "5"]
    agent += ["--monitor-interval", "0.1", "--local-addr", "127.0.0.1", "-m", "minisgl.engine"]
    agent += ["--server", f"tcp://127.0.0.1:{engines}", "--model", model, "--dummy-weights"]
    agent += ["--max-context-tokens", "4096"]
    with log.open("w") as out:
        processes = [subprocess.Popen([sys.executable, *serve], env=environ, stdout=out, stderr=out)]
        processes += [
            subprocess.Popen(
                [sys.executable, *agent],
                env={**environ, "CUDA_VISIBLE_DEVICES": str(node)},
                stdout=out,
                stderr=out,
            )
            for node in range(nodes)
        ]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(60)


def ranks() -> dict[int, int]:
    """Rank -> process id of the engine's processes on this host."""
    found = {}
    for place in Path("/proc").iterdir():
        try:
            command = (place / "cmdline").read_bytes() if place.name.isdigit() else b""
            environ = (place / "environ").read_text() if b"minisgl.engine" in command else ""
        except (OSError, UnicodeDecodeError):
            continue
        values = dict(one.split("=", 1) for one in environ.split("\0") if "=" in one)
        if "LOCAL_RANK" in values and b"torch.distributed.run" not in command:
            found[int(values["RANK"])] = int(place.name)
    return found


async def wait_until_ready(session: aiohttp.ClientSession, url: str) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            async with session.get(f"{url}/health/ready") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the engine is not ready in time")


def body_of(number: int, tokens: int) -> dict[str, Any]:
    source = random.Random(number)
    prompt = [source.randrange(1000, 30000) for _ in range(source.randrange(100, 400))]
    fixed = {"temperature": 0.6, "ignore_eos": True, "return_token_ids": True, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return {"prompt": prompt, "max_tokens": tokens, "seed": number, **fixed, **usage}


async def measure(url: str, streams: int, tokens: int) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    answers = [Answer() for _ in range(streams)]
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await wait_until_ready(session, url)
        readers = [
            asyncio.ensure_future(read(session, url, body_of(number, tokens), answer))
            for number, answer in enumerate(answers)
        ]
        while min(len(one.token_ids.get(0, [])) for one in answers) < tokens // 2:
            failed = next((one.error for one in answers if one.error), None)
            if failed:
                raise SystemExit(f"a stream ended with {failed}")
            await asyncio.sleep(0.01)
        os.kill(ranks()[1], signal.SIGKILL)
        await asyncio.gather(*readers)
    gaps = sorted(max(after - before for before, after in pairwise(one.times)) for one in answers)
    return {
        "streams": streams,
        "whole": sum(one.is_whole and len(one.token_ids[0]) == tokens for one in answers),
        "pause_p50_s": round(gaps[len(gaps) // 2], 2),
        "pause_max_s": round(gaps[-1], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            with served(arguments.model, arguments.nodes, log) as url:
                row = asyncio.run(measure(url, arguments.streams, arguments.tokens))
        except BaseException:
            print(log.read_text()[-6000:], file=sys.stderr)
            raise
    print(format_table([row]))
    if arguments.out:
        options = {name: getattr(arguments, name) for name in ("nodes", "streams", "tokens")}
        report = make_report(
            "torchrun_nodes",
            arguments=options | {"model": Path(arguments.model).name},
            metrics={name: float(value) for name, value in row.items()},
            tables={"kills": [row]},
        )
        write_report(arguments.out, report)
    return 0 if row["whole"] == arguments.streams else 1


if __name__ == "__main__":
    sys.exit(main())
