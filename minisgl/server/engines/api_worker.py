"""An additional server process on the same port, started by the first server process.

It reads a line of JSON (`WorkerSettings`) from stdin, then one command per line: "reload", "drain", "stop" or
"dead REASON". It writes "ready" when the engine is ready, and "empty" when it drains and no request is open.
The end of stdin means that the first process has ended; then this process exits.

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
from minisgl.log import setup_logging
from minisgl.server.engines.engine_link import EngineLink
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
        config.engine_pid,
    )
    link = EngineLink(settings.ipc_dir, config.rank)
    try:
        http_server = await open_http_server(settings, link, socket.socket(fileno=config.listener_fd))
        try:
            link.listen(http_server.streams.deliver, lambda _: None)
            accepting = asyncio.ensure_future(
                _accept_when_ready(http_server.streams, link, settings.server.heartbeat_timeout_s)
            )
            await _follow_commands(http_server)
            accepting.cancel()
        finally:
            await http_server.close()
    finally:
        link.close()


async def _accept_when_ready(streams: Streams, link: EngineLink, heartbeat_timeout_s: float) -> None:
    """Accept requests as soon as the engine is ready."""
    ready = await link.ready
    streams.accept_requests(ready.max_context_tokens)
    link.start_heartbeat(heartbeat_timeout_s)
    _tell_first_process("ready")


async def _follow_commands(http_server: HttpServer) -> None:
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
        else:
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
