"""An additional server process on the same port, started by the first server process.

It reads a line of JSON (`WorkerSettings`) from stdin, then one command per line: "reload", "drain", "stop",
"dead REASON". Of life G of the engine whose first life is E: "lost E G REASON", "engine E G PID DIRECTORY",
"try E G", "resume E G". It writes "ready G SUSPECTS" when life G is ready, "tried G 0" after "try E G", and
"empty" when it drains and no request is open. Reloads have commands of their own (`EngineFollowers`). The end
of stdin means that the first process has ended; then this process exits.

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
from pathlib import Path

import msgspec

from minisgl.config import EngineConfig, ServerConfig
from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.ipc.transport import ServerSocket
from minisgl.log import setup_logging
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.http_server import HttpServer, HttpServerSettings, open_http_server
from minisgl.server.processes.engine_followers import EngineFollowers, tell_first_process
from minisgl.server.reload.process_change import ProcessChange
from minisgl.server.reload.reloads import Reloads
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
    async with contextlib.AsyncExitStack() as parts:
        parts.callback(engines.close)
        listener = socket.socket(fileno=config.listener_fd)
        http_server = await open_http_server(settings, engines, Reloads(), listener)
        parts.push_async_callback(http_server.close)
        engines.listen(http_server.reader(lambda _: None))
        followers = EngineFollowers(engine, engines, ProcessChange(http_server, engines), settings)
        parts.callback(followers.close)
        await _follow_commands(http_server, followers)


async def _follow_commands(http_server: HttpServer, followers: EngineFollowers) -> None:
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
            http_server.refuse_requests(SHUTTING_DOWN)
            drained = asyncio.ensure_future(_say_when_empty(streams))
        elif word == "stop":
            break
        elif word == "dead":
            end = EngineDeadError(reason)
            break
        elif not followers.follow(word, reason):
            os._exit(1)  # the first process is gone
    if drained is not None:
        drained.cancel()
    http_server.refuse_requests(end)
    streams.fail_all(end)


async def _say_when_empty(streams: Streams) -> None:
    await streams.wait_until_empty()
    tell_first_process("empty")


if __name__ == "__main__":
    sys.exit(main())
