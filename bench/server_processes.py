"""How many streamed tokens per second and connections can the server processes handle?

    python bench/server_processes.py --out bench/results/cpu/front.json

A fake engine sends one token a step to all requests, without waiting, so the server is the bottleneck. The
client reads 256 streams and counts events. Tokens per second of the server's CPU time tell the capacity of
one core even on a shared machine.

Server processes have the first cores of the machine, client and engine the rest of them; where none are left
they run in between, and take from what is measured. What a second server process brings can be seen on two
cores nevertheless: `half` gives each half of the first core, and a lone one the other half to a process that
does nothing but spin.

The crowd: 10,000 connections at once, each with one small request; every one must be answered, with the text
or with 429, and afterwards the server must hold nothing.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minisgl.benchmark.reports.report import format_table, make_report, write_report
from minisgl.config import EngineConfig, ServerConfig
from minisgl.engine.parent_watch import ParentWatch
from minisgl.ipc.messages import AbortRequest, AddRequest, Ready, Shutdown, StepOutput
from minisgl.ipc.questions import Ping, Status
from minisgl.ipc.transport import EngineSocket
from minisgl.request import FinishReason, RequestOutput
from minisgl.server.engines.launch import run_server

HEADERS = (
    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
)
LIMIT_S = 300.0
TOKEN = 71


def run_engine(batch: int) -> None:
    """The engine process: once `batch` requests are there, a token a step for all, as fast as it can."""
    settings = json.loads(ParentWatch().next_line())
    link = EngineSocket(settings["ipc_dir"], settings["num_servers"])
    link.send(Ready(4096, 1000, 16, 10_000, "fake", {"start": 0.0}))
    left: dict[int, int] = {}  # tokens to give, by request
    steps = False
    while True:
        for message in link.receive(0 if steps else 100):
            if isinstance(message, AddRequest):
                left[message.request_id] = message.params.max_tokens or 1
            elif isinstance(message, AbortRequest):
                left.pop(message.request_id, None)
            elif isinstance(message, Ping):
                link.send(Status(message.sequence, num_running=len(left)), message.server)
            elif isinstance(message, Shutdown):
                return
        steps = bool(left) and (steps or len(left) >= batch)
        if steps:
            link.send_outputs(StepOutput([give_token(left, request_id) for request_id in list(left)]))


def give_token(left: dict[int, int], request_id: int) -> RequestOutput:
    """A request's next token; with the last one it goes."""
    left[request_id] -= 1
    if left[request_id]:
        return RequestOutput(request_id, [TOKEN])
    del left[request_id]
    return RequestOutput(request_id, [TOKEN], FinishReason.LENGTH)


def run_front(settings: dict[str, Any]) -> None:
    """The server process, and those it starts."""
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    server = ServerConfig(
        port=0,
        served_model_name="fake",
        max_queued_requests=settings["most"],
        api_workers=settings["workers"],
    )
    engine = [sys.executable, __file__, "engine", str(settings["batch"])]
    if settings["engine_cores"]:
        engine = ["taskset", "-c", ",".join(map(str, settings["engine_cores"])), *engine]
    folder = Path(settings["folder"])
    run_server(
        server, EngineConfig(model=str(folder)), folder, worker_command=engine, started_at=time.monotonic()
    )


class Served:
    """A running server; `pids` are its server processes, not the engine."""

    def __init__(self, folder: Path, *, workers: int, most: int, batch: int, num_cores: int) -> None:
        """`num_cores` are for the server processes alone, where the machine has more."""
        cores = sorted(os.sched_getaffinity(0))
        num_cores = num_cores if len(cores) > num_cores else 0
        self.first_core, self.client_cores = cores[0], cores[num_cores:]
        settings = {
            "folder": str(folder),
            "workers": workers,
            "most": most,
            "batch": batch,
            "cores": cores[:num_cores],
            "engine_cores": cores[num_cores:] if num_cores else [],
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "front", json.dumps(settings)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("curl "):
                self.port = int(line.split("/v1/")[0].rsplit(":", 1)[1])
                break
        engine = self.get("/health")["engine_pid"]
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pids = [self._process.pid, *(pid for pid in map(int, children) if pid != engine)]
        self.engine_pid: int = engine

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=LIMIT_S) as answer:
            return json.load(answer)

    def rss_mib(self) -> float:
        """Resident memory of the server processes."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids)
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(LIMIT_S)


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time of these processes so far."""
    ticks = 0
    for pid in pids:
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def spinning(core: int) -> Iterator[None]:
    """A process that takes all it gets of a core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(process.pid, [core])
        yield
    finally:
        process.kill()
        process.wait()


def request_bytes(**fields: Any) -> bytes:
    body = json.dumps({"model": "fake", "prompt": "abc", **fields})
    return f"{HEADERS}{len(body)}\r\n\r\n{body}".encode()


def stream_all(port: int, num_clients: int, num_tokens: int) -> tuple[int, float]:
    """(events with a token, seconds from the first byte to the last) over all streams."""
    selector = selectors.DefaultSelector()
    ask = request_bytes(stream=True, max_tokens=num_tokens)
    tails: dict[int, bytes] = {}
    for _ in range(num_clients):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(ask)
        selector.register(client, selectors.EVENT_READ)
        tails[client.fileno()] = b""
    num_events, began = 0, 0.0
    while tails:
        for key, _ in selector.select(LIMIT_S):
            client, number = key.fileobj, key.fd
            assert isinstance(client, socket.socket)
            data = client.recv(1 << 16)
            began = began or time.perf_counter()
            seen = tails[number] + data
            num_events += seen.count(b'"text":')
            # A mark may be cut in two; what is kept is shorter than one, so none counts twice.
            tails[number] = seen[-6:]
            if b"[DONE]" in seen or not data:
                selector.unregister(client)
                client.close()
                del tails[number]
    return num_events, time.perf_counter() - began


class Sample(NamedTuple):
    """One round of streams."""

    tokens_per_s: float
    tokens_per_cpu_s: float  # of the server processes
    others_us: float  # processor time of client and engine for each token


def measure_streams(
    folder: Path, worker_counts: Sequence[int], num_clients: int, num_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Medians of rounds that take turns, because others may use the machine, too."""
    every_core = os.sched_getaffinity(0)
    with contextlib.ExitStack() as rest:
        rest.callback(os.sched_setaffinity, 0, every_core)
        setups: list[tuple[bool, int, Served, list[Sample]]] = []
        for half in (False, True):
            for workers in worker_counts:
                served = Served(
                    folder,
                    workers=workers,
                    most=num_clients * 4,
                    batch=num_clients,
                    num_cores=1 if half else workers,
                )
                rest.callback(served.close)
                setups.append((half, workers, served, []))
        for _ in range(rounds):
            for half, workers, served, samples in setups:
                os.sched_setaffinity(0, served.client_cores)
                alone = half and workers == 1
                with spinning(served.first_core) if alone else contextlib.nullcontext():
                    samples.append(stream_sample(served, num_clients, num_tokens))
        rows = []
        for half, workers, served, samples in setups:
            per_process = [one["output_tokens"] for one in served.get("/server_info")["processes"]]
            middle = Sample(*(statistics.median(column) for column in zip(*samples, strict=True)))
            rows.append(
                {
                    "cores_each": 0.5 if half else 1.0,
                    "api_workers": workers,
                    "clients": num_clients,
                    "tokens_per_client": num_tokens,
                    "tokens_per_s": round(middle.tokens_per_s),
                    "best_tokens_per_s": round(max(sample.tokens_per_s for sample in samples)),
                    "tokens_per_cpu_s": round(middle.tokens_per_cpu_s),
                    "client_and_engine_us": round(middle.others_us, 1),
                    "busiest_share": round(max(per_process) / sum(per_process), 3),
                }
            )
        return rows


def stream_sample(served: Served, num_clients: int, num_tokens: int) -> Sample:
    """Every client reads a stream to its end."""
    others = [os.getpid(), served.engine_pid]
    before = cpu_s(served.pids), cpu_s(others)
    num_events, wall_s = stream_all(served.port, num_clients, num_tokens)
    server_s, others_s = cpu_s(served.pids) - before[0], cpu_s(others) - before[1]
    assert num_events == num_clients * num_tokens, (num_events, num_clients * num_tokens)
    return Sample(num_events / wall_s, num_events / server_s, 1e6 * others_s / num_events)


async def crowd(port: int, num_clients: int) -> dict[str, int]:
    """Status -> connections, of so many that are open at the same time; 0 = no answer."""
    everybody = asyncio.Event()
    num_connected = 0
    counts: dict[str, int] = {}
    ask = request_bytes(max_tokens=4).replace(b"Host:", b"Connection: close\r\nHost:", 1)

    async def one() -> None:
        nonlocal num_connected
        status = "lost"
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            num_connected += 1
            if num_connected == num_clients:
                everybody.set()
            await everybody.wait()
            writer.write(ask)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            if head and json.loads(body):
                status = head.split()[1].decode()
            writer.close()
        except OSError as error:
            status = type(error).__name__
            everybody.set()
        counts[status] = counts.get(status, 0) + 1

    await asyncio.wait_for(asyncio.gather(*[one() for _ in range(num_clients)]), LIMIT_S)
    return counts


def measure_crowd(folder: Path, num_clients: int, rounds: int) -> list[dict[str, Any]]:
    """One row a round, with the server's memory after it."""
    served = Served(folder, workers=1, most=1024, batch=1, num_cores=0)
    try:
        rows = []
        for number in range(rounds):
            began = time.perf_counter()
            counts = asyncio.run(crowd(served.port, num_clients))
            info = served.get("/server_info")["server"]
            rows.append(
                {
                    "round": number + 1,
                    "connections": num_clients,
                    "answered": counts.pop("200", 0),
                    "refused_429": counts.pop("429", 0),
                    "lost": sum(counts.values()),
                    "lost_by": " ".join(sorted(counts)) or None,
                    "seconds": round(time.perf_counter() - began, 2),
                    "still_open": info["num_open_requests"] + info["num_running_requests"],
                    "rss_mib": round(served.rss_mib(), 1),
                }
            )
        return rows
    finally:
        served.close()


def make_folder(folder: Path) -> Path:
    """A model folder as far as the server reads one: a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="for each client")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--crowd", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name))
        streams = measure_streams(
            folder, arguments.workers, arguments.clients, arguments.tokens, arguments.rounds
        )
        print(format_table(streams))
        crowds = measure_crowd(folder, arguments.crowd, arguments.rounds) if arguments.crowd else []
        if crowds:
            print(format_table(crowds))
    if arguments.out:
        report = make_report(
            "front",
            arguments={
                **{name: getattr(arguments, name) for name in ("clients", "tokens", "crowd", "rounds")},
                "load_average": round(os.getloadavg()[0], 1),  # of everybody on this machine
            },
            metrics={
                f"tokens_per_s_{row['api_workers']}_{row['cores_each']:g}": row["tokens_per_s"]
                for row in streams
            },
            tables={"streams": streams, "crowd": crowds},
        )
        write_report(arguments.out, report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        run_engine(int(sys.argv[2]))
    elif sys.argv[1:2] == ["front"]:
        run_front(msgspec.json.decode(sys.argv[2]))
    else:
        main()
