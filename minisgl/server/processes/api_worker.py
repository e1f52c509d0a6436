"""An additional server process on the same port, started by the first server process.

It reads a line of JSON (`WorkerSettings`) from stdin, then one command per line: "reload", "drain", "stop",
"dead REASON"; and of the engine's life G: "lost G REASON", "engine G PID DIRECTORY", "try G" and "resume G".
It writes "ready G SUSPECTS" when life G is ready, "tried G 0" after "try G", and "empty" when it drains and
no request is open. The end of stdin means that the first process has ended; then this process exits.

Promise: it gives the same answers as the first process, and ends when told to or when the first process or
the engine ends.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path

import msgspec

from minisgl.config import EngineConfig, ServerConfig
from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.ipc.transport import ServerSocket
from minisgl.log import setup_logging
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.http_server import HttpServer, HttpServerSettings, open_http_server
from minisgl.server.streams import Streams

log = logging.getLogger(__name__)

SHUTTING_DOWN = RequestError(503, "shutting_down", "the server is shutting down")


class WorkerSettings(msgspec.Struct, frozen=True):
    """The first line on stdin, as JSON."""

    server: ServerConfig
    engine: EngineConfig
    model_name: str
    model_folder: str
    ipc_dir: str
    engine_dir: str
    """The directory of the sockets of the engine's first life."""
    rank: int
    engine_pid: int
    listener_fd: int
    """File descriptor of an inherited socket that already listens."""


def main() -> int:
    """Serve until told to stop. Returns the exit code: 0 after a stop, 1 after a failure."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1  # the first process is gone already
    config = msgspec.json.decode(line, type=WorkerSettings)
    # A terminal or an init system may signal the whole process group; only the first process reacts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup_logging(config.server.log_level, f"server{config.rank}")
    try:
        asyncio.run(_serve(config))
    except MinisglError as error:
        log.error("%s", error)
        return 1
    return 0


async def _serve(config: WorkerSettings) -> None:
    settings = HttpServerSettings(
        config.server,
        config.engine,
        config.model_name,
        Path(config.model_folder),
        Path(config.ipc_dir),
        config.rank,
    )
    engine = ServedEngine(0, config.rank, ServerSocket(config.engine_dir, config.rank))
    engine.pid = config.engine_pid
    engines = Engines([engine])
    follower = EngineFollower(engine, settings.server.heartbeat_timeout_s)
    try:
        http_server = await open_http_server(settings, engines, socket.socket(fileno=config.listener_fd))
        try:
            engines.listen(http_server.reader(lambda _: None))
            follower.wait_until_ready()
            await _follow_commands(http_server, follower)
        finally:
            await http_server.close()
    finally:
        follower.close()
        engines.close()


class EngineFollower:
    """Follows what the first process says of the engine's lives."""

    def __init__(self, engine: ServedEngine, heartbeat_timeout_s: float) -> None:
        self._engine = engine
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._task: asyncio.Task[None] | None = None  # what is being done for the current life

    def wait_until_ready(self) -> None:
        """Say "ready" when the current life is; send requests to the first life at once."""
        self._do(self._wait_until_ready())

    def follow(self, word: str, rest: str) -> bool:
        """Follow a command; False = it is none of the engine's."""
        engine = self._engine
        generation, _, more = rest.partition(" ")
        if word == "lost":
            self.close()
            engine.lose(more)
        elif word == "engine":
            pid, _, ipc_dir = more.partition(" ")
            engine.begin(int(generation), ServerSocket(ipc_dir, engine.rank))
            engine.pid = int(pid)
            self.wait_until_ready()
        elif word == "try":
            self._do(self._try_suspects(int(generation)))
        elif word == "resume":
            if engine.generation == int(generation) > 1:
                self._do(engine.resume())
        else:
            return False
        return True

    def close(self) -> None:
        """Stop what is being done."""
        if self._task is not None:
            self._task.cancel()

    def _do(self, work: Coroutine[None, None, None]) -> None:
        self.close()
        self._task = asyncio.get_running_loop().create_task(work)

    async def _wait_until_ready(self) -> None:
        engine = self._engine
        # Others read `ready`, too: it must not be cancelled with this task.
        await asyncio.shield(engine.link.ready)
        engine.link.start_heartbeat(self._heartbeat_timeout_s)
        if engine.generation == 1:
            await engine.resume()
        _tell_first_process(f"ready {engine.generation} {engine.num_suspects}")

    async def _try_suspects(self, generation: int) -> None:
        if self._engine.generation == generation:
            await self._engine.try_suspects()
            _tell_first_process(f"tried {generation} 0")


async def _follow_commands(http_server: HttpServer, follower: EngineFollower) -> None:
    """Follow commands from stdin until told to end; then end every open request with an error."""
    streams = http_server.streams
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    drained: asyncio.Task[None] | None = None
    end: MinisglError = SHUTTING_DOWN
    while True:
        word, _, reason = (await commands.readline()).decode().rstrip("\n").partition(" ")
        if word == "reload":
            http_server.reload()
        elif word == "drain":
            streams.refuse_requests(SHUTTING_DOWN)
            drained = asyncio.ensure_future(_say_when_empty(streams))
        elif word == "stop":
            break
        elif word == "dead":
            end = EngineDeadError(reason)
            break
        elif not follower.follow(word, reason):
            os._exit(1)  # the first process is gone
    if drained is not None:
        drained.cancel()
    streams.refuse_requests(end)
    streams.fail_all(end)


async def _say_when_empty(streams: Streams) -> None:
    await streams.wait_until_empty()
    _tell_first_process("empty")


def _tell_first_process(word: str) -> None:
    """Write a line to the first process. If that has ended, reading stdin shows it."""
    with contextlib.suppress(OSError):
        sys.stdout.write(word + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
