"""What do people who look on cost? CPU of an idle server, and time between tokens with 20 streams of events.

    python bench/page_cost.py --out bench/results/cpu/page-cost.json

Bars: an idle server whose page is open takes under 1 % of a core; 20 open streams of events do not change the
time between tokens. Rounds with and without streams alternate, and their medians are compared. Linux only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from minisgl.benchmark.reports.report import make_report, write_report

NUM_STREAMS = 20
PAGE_FETCHES = ("debug/history?seconds=600", "debug/moments", "debug/engines")
"""What the page asks for once; then it reads the stream."""


class Server:
    """`minisgl serve` with the built-in model on the CPU."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", "--port", "0", "--device", "cpu"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("curl "):
                self.url = line.split("/v1/")[0].removeprefix("curl ")
                break
        self.pids = [self.process.pid, json.load(self.get("health"))["engine_pid"]]

    def get(self, path: str) -> Any:
        return urllib.request.urlopen(f"{self.url}/{path}", timeout=30)

    def cpu_s(self) -> float:
        """CPU time of both processes, all threads."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


@contextmanager
def streams(server: Server, count: int) -> Iterator[None]:
    """Read `count` streams of events, and what a page asks for at first."""
    answers = [server.get("debug/events") for _ in range(count)]
    threads = [threading.Thread(target=drain, args=(one,), daemon=True) for one in answers]
    for thread in threads:
        thread.start()
    for path in PAGE_FETCHES * min(count, 1):
        server.get(path).read()
    yield
    for one in answers:
        one.close()


def drain(answer: Any) -> None:
    try:
        while answer.readline():
            pass
    except (OSError, ValueError, AttributeError):
        return  # closed by the other thread


def gaps_ms(server: Server, num_tokens: int) -> list[float]:
    """Milliseconds between the tokens of one answer, as a client sees them."""
    ask = {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(ask).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        times = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
    return [1000 * (later - earlier) for earlier, later in pairwise(times)]


def idle_share(server: Server, seconds: float) -> float:
    """Share of one core that an idle server takes."""
    before, began = server.cpu_s(), time.monotonic()
    threading.Event().wait(seconds)
    return (server.cpu_s() - before) / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each idle measurement")
    parser.add_argument("--rounds", type=int, default=6, help="with and without streams")
    parser.add_argument("--tokens", type=int, default=100, help="of each round's answer")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    server = Server()
    try:
        gaps_ms(server, 20)
        idle_share(server, 5)  # an engine builds the grammars' tokenizer when it is idle for the first time
        shares = {}
        for count in (0, 1, NUM_STREAMS):
            with streams(server, count):
                shares[count] = idle_share(server, arguments.seconds)
        found: dict[int, list[float]] = {0: [], NUM_STREAMS: []}
        for _ in range(arguments.rounds):
            for count, gaps in found.items():
                with streams(server, count):
                    gaps.extend(gaps_ms(server, arguments.tokens))
    finally:
        server.close()
    medians = {count: statistics.median(gaps) for count, gaps in found.items()}
    p99 = {count: statistics.quantiles(gaps, n=100)[98] for count, gaps in found.items()}
    metrics = {
        "idle, nobody looks: share of a core": shares[0],
        "idle, one page: share of a core": shares[1],
        f"idle, {NUM_STREAMS} streams: share of a core": shares[NUM_STREAMS],
        "between tokens, nobody looks, p50 ms": medians[0],
        f"between tokens, {NUM_STREAMS} streams, p50 ms": medians[NUM_STREAMS],
        "between tokens, p50, ratio": medians[NUM_STREAMS] / medians[0],
        "between tokens, p99, ratio": p99[NUM_STREAMS] / p99[0],
    }
    for name, value in metrics.items():
        print(f"{name:48} {value:8.4f}")
    if arguments.out is not None:
        report = make_report(
            "page-cost",
            arguments={name: getattr(arguments, name) for name in ("seconds", "rounds", "tokens")},
            metrics=metrics,
            command=" ".join(["page_cost.py", *sys.argv[1:]]),
        )
        write_report(arguments.out, report)
    return 0 if shares[1] < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
