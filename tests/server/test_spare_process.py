"""A spare process waits to become the next engine, and leaves nothing behind."""

import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import FAKE_ENGINE, LIMIT_S, RunningServer, eventually
from small_model import make_folder
from test_engine_restarts import engine_of, is_back, text_of, wait_for_events
from test_launch import exit_code, gone, open_stream
from test_reload import Reloads, running, write_knobs
from test_replicas import engines_of

from minisgl.config import EngineConfig
from minisgl.errors import MinisglError
from minisgl.ipc.transport import ServerSocket, make_ipc_dir
from minisgl.server.engines.engine_link import EngineLink
from minisgl.server.engines.launch import WORKER
from minisgl.server.engines.supervision.spare_process import SpareProcess
from minisgl.weights.sources import resolve_model_folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running(make_folder(tmp_path / "model"), spare_process=True) as started:
        yield started.ready()


def children_of(server: RunningServer) -> set[int]:
    """The processes that the server has started and that still run."""
    listed = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return {int(pid) for pid in listed.split() if not gone(int(pid))}


def spare_of(server: RunningServer) -> int:
    """The process that waits."""
    found: set[int] = set()

    def is_alone() -> bool:
        found.clear()
        found.update(children_of(server) - {engine_of(server)})
        return len(found) == 1

    eventually(is_alone, "one spare process")
    return found.pop()


def test_it_becomes_the_engine_after_each_kill_and_another_one_waits(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", pace_ms=20)
    text = "abcdefghij" * 8
    with RunningServer(folder, spare_process=True) as server:
        server.ready()
        stream = open_stream(server, f"@chars {text}")
        for number in range(2):
            wait_for_events([stream], 10 + 20 * number)
            spare, engine = spare_of(server), engine_of(server)
            os.kill(engine, signal.SIGKILL)
            eventually(lambda number=number: is_back(server, number + 1), "the engine is back")
            assert engine_of(server) == spare
            assert spare_of(server) != spare
        assert text_of(stream.result()) == (text, "stop")
        left = children_of(server)
        server.process.terminate()
        assert exit_code(server) == 0
        assert all(gone(pid) for pid in left)


def test_the_engine_starts_without_it_when_it_has_died(server: RunningServer) -> None:
    spare, engine = spare_of(server), engine_of(server)
    os.kill(spare, signal.SIGKILL)
    eventually(lambda: gone(spare), "the spare process ends")
    os.kill(engine, signal.SIGKILL)
    eventually(lambda: is_back(server, 1), "the engine is back")
    assert server.complete("@say hello")[0] == 200
    assert spare_of(server) not in (spare, engine)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_reload_takes_it(device: str, tmp_path: Path) -> None:
    """On a GPU the new engine takes the old one's place, on a CPU it starts beside it."""
    folder = make_folder(tmp_path / "model", device=device)
    with running(folder, spare_process=True) as server:
        server.ready()
        spare = spare_of(server)
        told = Reloads(server)(max_running_requests=20)
        assert told["engines"] == [{"id": 0, "pid": spare}]
        assert server.complete("@say hello")[0] == 200
        assert spare_of(server) != spare


def test_each_replica_has_one(tmp_path: Path) -> None:
    with RunningServer(make_folder(tmp_path / "model"), spare_process=True, replicas=2) as server:
        server.ready()
        engines = {one["pid"] for one in engines_of(server)}
        eventually(lambda: len(children_of(server)) == 4, "two engines, two spare processes")
        waiting = children_of(server) - engines
        os.kill(engines_of(server)[1]["pid"], signal.SIGKILL)
        eventually(lambda: engines_of(server)[1]["pid"] in waiting, "one has become an engine")
        eventually(lambda: all(one["up"] for one in engines_of(server)), "both are up")
        assert engines_of(server)[0]["pid"] in engines
        eventually(lambda: len(children_of(server)) == 4, "another one waits")


def test_it_ends_when_the_server_is_killed(server: RunningServer) -> None:
    left = children_of(server) | {spare_of(server)}
    server.process.kill()
    eventually(lambda: all(gone(pid) for pid in left), "all end")


def test_it_ends_when_no_restart_is_left(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with RunningServer(folder, spare_process=True, engine_restarts=0) as server:
        server.ready()
        spare = spare_of(server)
        os.kill(engine_of(server), signal.SIGKILL)
        assert exit_code(server) == 1
        assert gone(spare)


def test_a_reload_that_fails_leaves_the_engine_its_spare_process(
    server: RunningServer, tmp_path: Path
) -> None:
    engine = engine_of(server)
    write_knobs(tmp_path / "model", start="refuse", only_with=20)
    status, _ = Reloads(server).begin(max_running_requests=20).result(LIMIT_S)
    assert status != 200
    assert engine_of(server) == engine
    assert spare_of(server) != engine


def test_what_starts_while_it_is_closed_is_kept() -> None:
    async def main() -> None:
        spare = SpareProcess([sys.executable, str(FAKE_ENGINE)])
        spare.start({})
        closing = asyncio.ensure_future(spare.close())
        await asyncio.sleep(0)  # it has begun
        assert spare.take({}) is None
        spare.start({})
        await closing
        process = spare.take({})
        assert process is not None
        assert not process.exited.is_set()
        await process.close()
        assert process.exited.is_set()

    asyncio.run(main())


def test_it_serves_engines_with_the_same_gpus_only() -> None:
    async def main() -> None:
        spare = SpareProcess([sys.executable, str(FAKE_ENGINE)])
        spare.start({"visible_gpus": "1"})
        assert spare.take({}) is None
        first = spare.take({"visible_gpus": "1", "log_level": "info"})
        assert first is not None
        spare.start({"visible_gpus": "1"})
        spare.start({})  # in its place
        assert spare.take({"visible_gpus": "1"}) is None
        second = spare.take({})
        assert second is not None
        for process in (first, second):
            await process.close()

    asyncio.run(main())


@pytest.mark.parametrize(("device", "num"), [("cpu", 1), ("cuda", 2)])
def test_without_the_flag_there_is_one_on_a_gpu(device: str, num: int, tmp_path: Path) -> None:
    with RunningServer(make_folder(tmp_path / "model", device=device)) as server:
        server.ready()
        server.complete("@say hello")
        assert len(children_of(server)) == num


def test_a_real_engine_has_imported_torch_before_it_is_needed() -> None:
    try:
        folder = resolve_model_folder("smollm2-135m")
    except MinisglError as error:
        pytest.skip(f"the built-in model is not on this machine and can't be fetched: {error}")
    engine = EngineConfig(device="cpu", dtype="float32", num_pages=64, cpu_threads=1)
    worker = {"engine": dataclasses.asdict(engine), "model_folder": str(folder)}
    ipc_dir = make_ipc_dir()

    async def main() -> dict[str, float]:
        spare, link = SpareProcess(WORKER), EngineLink(ServerSocket(ipc_dir))
        spare.start(worker)
        process = spare.take(worker)
        assert process is not None
        # The line waits in the pipe until the process has imported everything.
        process.begin(json.dumps({**worker, "ipc_dir": str(ipc_dir)}).encode(), link)
        try:
            link.listen(lambda _: None, lambda _: None)
            ready = await asyncio.wait_for(link.ready, 60)
            return ready.startup_ms
        finally:
            await process.close()
            link.close()

    began = time.monotonic()
    stages = asyncio.run(main())
    assert stages["import torch"] < 0.2 * (time.monotonic() - began) * 1e3, stages
    for file in ipc_dir.iterdir():
        file.unlink()
    ipc_dir.rmdir()
