"""How many streamed tokens per second can the client of `minisgl bench serve` read on one core?

    python bench/serve_client.py --out bench/results/cpu/serve-client.json

A minimal server, in its own process and on its own core, writes one event per token to all streams in turn,
as an engine's steps do. The client is the real one, pinned to one core. Its counts must equal the requested
tokens. If tokens_per_read is near 1, it read every event separately.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from minisgl.benchmark.load.datasets import Dialogue, Lengths, random_prompts
from minisgl.benchmark.load.load_client import Target, open_client
from minisgl.benchmark.load.load_run import Load, run_load
from minisgl.benchmark.load.serve_plan import Point
from minisgl.benchmark.load.serve_report import report_point
from minisgl.benchmark.reports.report import format_table, make_report, write_report

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-6f1d7c3a5b2e4908a7c6d5e4f3b2a190","object":"text_completion","created":1763700000,'
    b'"model":"fake","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":%s}],'
    b'"usage":null}\n\n'
)
USAGE = (
    b'data: {"id":"cmpl-6f1d7c3a5b2e4908a7c6d5e4f3b2a190","object":"text_completion","created":1763700000,'
    b'"model":"fake","choices":[],"usage":{"prompt_tokens":16,"completion_tokens":%d,"total_tokens":%d}}\n\n'
)


def chunk(data: bytes) -> bytes:
    """One chunk of HTTP's chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Streams(asyncio.Protocol):
    """One connection; `left` counts the tokens of those that are open."""

    def __init__(self, left: dict[asyncio.Transport, int], num_tokens: int) -> None:
        self._left = left
        self._num_tokens = num_tokens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):  # the body's end; bodies are small
            self._transport.write(HEAD)
            self._left[self._transport] = self._num_tokens

    def connection_lost(self, exc: Exception | None) -> None:
        self._left.pop(self._transport, None)


async def serve(port_file: Path, num_tokens: int, step_s: float) -> None:
    """Write a token to every stream each `step_s`, for ever."""
    left: dict[asyncio.Transport, int] = {}
    server = await asyncio.get_running_loop().create_server(
        lambda: Streams(left, num_tokens), "127.0.0.1", 0, backlog=2048
    )
    port_file.write_text(str(server.sockets[0].getsockname()[1]))
    middle, last = chunk(EVENT % b"null"), chunk(EVENT % b'"length"')
    end = chunk(USAGE % (num_tokens, 16 + num_tokens)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    due = time.monotonic()
    while True:
        for transport, num in list(left.items()):
            transport.write(middle if num > 1 else last)
            if num > 1:
                left[transport] = num - 1
            else:
                del left[transport]
                transport.write(end)
                transport.close()
        due = max(due + step_s, time.monotonic() - 1)  # a server that fell behind catches up for a second
        await asyncio.sleep(max(0.0, due - time.monotonic()))


def measure(num_streams: int, num_tokens: int, rate: float, work_dir: Path) -> dict[str, float]:
    """One run; `rate` is tokens per second over all streams."""
    port_file = work_dir / "port"
    port_file.unlink(missing_ok=True)
    step_s = num_streams / rate
    command = [sys.executable, __file__, "--serve", str(port_file), str(num_tokens), str(step_s)]
    server = subprocess.Popen(command)
    try:
        while not (port_file.exists() and port_file.read_text()):
            time.sleep(0.01)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        return asyncio.run(_measure(int(port_file.read_text()), num_streams, num_tokens, rate))
    finally:
        server.kill()
        server.wait()


async def _measure(port: int, num_streams: int, num_tokens: int, rate: float) -> dict[str, float]:
    conversations = random_prompts(num_streams, Lengths((16, 16), (num_tokens, num_tokens)), seed=0)
    load = Load([0.0] * num_streams, None)
    target = Target(url=f"http://127.0.0.1:{port}", model="fake", fields={})
    async with open_client(target) as client:
        run = await run_load(
            client, conversations, load, new_dialogue=lambda: Dialogue("tokens", (0,), 30_000)
        )
    figures = report_point(Point("streams", num_streams, load), run, {}).metrics
    if figures["num_output_tokens"] != num_streams * num_tokens:
        raise SystemExit(f"counted {figures['num_output_tokens']}, sent {num_streams * num_tokens}")
    num_output_tokens = num_streams * num_tokens
    return {
        "asked_tokens_per_s": rate,
        "streams": num_streams,
        "tokens_per_s": num_output_tokens / float(figures["duration_s"] or 0),
        "cpu_share": run.watch.cpu_share,
        "tokens_per_cpu_s": num_output_tokens / (run.watch.cpu_share * run.watch.wall_s),
        "tokens_per_read": num_output_tokens / sum(len(one.answer.stream.times) for one in run.sent),
        "itl_p50_ms": float(figures["itl_p50_ms"] or 0),
        "itl_p99_ms": float(figures["itl_p99_ms"] or 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rates", default="5000,10000,20000,30000", help="Tokens per second.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if arguments.serve:
        os.sched_setaffinity(0, {cores[-1]})
        port_file, num_tokens, step_s = arguments.serve
        asyncio.run(serve(Path(port_file), int(num_tokens), float(step_s)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as work_dir:
        for rate in map(float, arguments.rates.split(",")):
            num_tokens = round(rate * arguments.seconds / arguments.streams)
            rows.append(measure(arguments.streams, num_tokens, rate, Path(work_dir)))
            os.sched_setaffinity(0, cores)  # also for the next server, which takes the last
            print(format_table(rows[-1:]), flush=True)
    if arguments.out is not None:
        report = make_report(
            "serve-client",
            arguments={"streams": arguments.streams, "seconds": arguments.seconds},
            metrics={"max_tokens_per_s": max(row["tokens_per_s"] for row in rows)},
            tables={"rates": rows},
        )
        write_report(arguments.out, report)


if __name__ == "__main__":
    main()
