"""What does a token cost on its way from an engine to its server, by Ray Serve's handles and by our door?

    python bench/ray_handles.py --out bench/results/cpu/ray-handles.json     (needs minisgl[ray])

Both ways carry the tokens of `--rows` streams over `--steps` steps between two processes of this host, as
fast as they go. By handles each stream is a generator, as in Ray's own engines, and each token a message. By
the door a step is one message for all rows, over zmq with CURVE. The figure is the processor time of both
ends for a token.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from minisgl import __version__
from minisgl.benchmark.reports.report import format_table, make_report, write_report
from minisgl.ipc.door import DoorSocket, EngineLine
from minisgl.ipc.door_messages import Hello, Welcome
from minisgl.ipc.messages import StepOutput
from minisgl.ipc.questions import Ping, Status
from minisgl.ipc.server_line import ServerDoor
from minisgl.request import RequestOutput

SECRET = "a secret of the benchmark"
ENGINE = "--engine"
REPEATS = 3


def run_engine(endpoint: str, rows: int, steps: int) -> None:
    """The engine's end of the door: sends the steps whenever it is asked, then its processor time."""
    line = ServerDoor(endpoint, SECRET, lambda _: None).enter(Hello(__version__, "1", "here", 0, {}))
    while True:
        for message in line.receive(1000):
            if not isinstance(message, Ping):
                return
            before_s = time.process_time()
            for step in range(steps):
                line.send_outputs(StepOutput([RequestOutput(row, [step], None) for row in range(rows)]))
            line.send(Status(message.sequence, request_part_s=[time.process_time() - before_s]))


async def by_door(rows: int, steps: int) -> dict[str, float]:
    """The best of `REPEATS` runs."""
    door = DoorSocket("tcp://127.0.0.1:0", SECRET)
    command = [sys.executable, __file__, ENGINE, door.endpoint, str(rows), str(steps)]
    engine = subprocess.Popen(command)
    try:
        connection, _ = await door.receive()
        door.send(connection, Welcome())
        line = EngineLine(door)
        line.open(connection)
        runs = []
        for sequence in range(REPEATS + 1):  # the first warms up
            cpu_s, began_s, num = time.process_time(), time.perf_counter(), 0
            line.send(Ping(sequence))
            while True:
                line.take((await door.receive())[1])
                message = await line.receive()
                if isinstance(message, Status):
                    break
                assert isinstance(message, StepOutput)
                num += sum(len(one.token_ids) for one in message.outputs)
            assert num == rows * steps
            reader_s = time.process_time() - cpu_s
            runs.append((time.perf_counter() - began_s, reader_s, message.request_part_s[0]))
        return figures("door", min(runs[1:]), rows * steps)
    finally:
        engine.kill()
        engine.wait()
        door.close()


def by_handles(rows: int, steps: int) -> dict[str, float]:
    """The same by a streaming handle."""
    import ray
    from ray import serve

    @serve.deployment(max_ongoing_requests=10_000, logging_config={"enable_access_log": False})
    class Sender:
        async def tokens(self, num: int) -> Any:
            for step in range(num):
                yield step
                await asyncio.sleep(0)  # a stream takes turns with the others, as steps make it do

        async def cpu_s(self) -> float:
            return time.process_time()

    @serve.deployment(max_ongoing_requests=10_000, logging_config={"enable_access_log": False})
    class Reader:
        def __init__(self, sender: Any) -> None:
            self._sender = sender
            self._streams = sender.options(stream=True)

        async def run(self, num_streams: int, num_steps: int) -> tuple[float, float, float]:
            async def read() -> int:
                return len([one async for one in self._streams.tokens.remote(num_steps)])

            sender_s = await self._sender.cpu_s.remote()
            reader_s, began_s = time.process_time(), time.perf_counter()
            counts = await asyncio.gather(*[read() for _ in range(num_streams)])
            assert sum(counts) == num_streams * num_steps
            took_s, reader_s = time.perf_counter() - began_s, time.process_time() - reader_s
            return took_s, reader_s, await self._sender.cpu_s.remote() - sender_s

    ray.init(num_cpus=2, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
    try:
        handle = serve.run(Reader.bind(Sender.bind()), route_prefix=None)
        runs = [handle.run.remote(rows, steps).result() for _ in range(REPEATS + 1)]
        return figures("handles", min(runs[1:]), rows * steps)
    finally:
        serve.shutdown()
        ray.shutdown()


def figures(way: str, run: tuple[float, float, float], num_tokens: int) -> dict[str, Any]:
    took_s, reader_s, sender_s = run
    return {
        "way": way,
        "tokens_per_s": round(num_tokens / took_s),
        "reader_us_per_token": round(1e6 * reader_s / num_tokens, 2),
        "sender_us_per_token": round(1e6 * sender_s / num_tokens, 2),
    }


def main() -> int:
    if sys.argv[1:2] == [ENGINE]:
        run_engine(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    rows = [asyncio.run(by_door(settings.rows, settings.steps)), by_handles(settings.rows, settings.steps)]
    print(format_table(rows))
    if settings.out is not None:
        arguments = {"rows": settings.rows, "steps": settings.steps}
        both = [one["reader_us_per_token"] + one["sender_us_per_token"] for one in rows]
        metrics = {"door_us_per_token": round(both[0], 2), "handles_us_per_token": round(both[1], 2)}
        report = make_report("ray_handles", arguments=arguments, metrics=metrics, tables={"ways": rows})
        write_report(settings.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
