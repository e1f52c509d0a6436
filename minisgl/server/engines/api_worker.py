"""A further server process on the same port: `python -m minisgl.server.api_worker`, started by the first.

Reads one JSON line from stdin (`WorkerLine`), then one command a line: "drain", "stop", "dead REASON". Writes
"ready" when the engine is, and "empty" when it drains and no request is open any more. At the end of stdin
the first process is gone, and so is this one.

Promise: the same answers as the first process gives; it ends when it is told to, or when either of the other
two processes does.
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
from minisgl.server.engine_link import EngineLink
from minisgl.server.front import FrontSettings, open_front
from minisgl.server.frontend import Frontend

log = logging.getLogger(__name__)

SHUTTING_DOWN = RequestError(503, "shutting_down", "the server is shutting down")


class WorkerLine(msgspec.Struct, frozen=True):
    """The first line on stdin."""

    server: ServerConfig
    engine: EngineConfig
    model_name: str
    model_folder: str
    ipc_dir: str
    rank: int
    engine_pid: int
    listener_fd: int
    """An inherited socket that listens already."""


def main() -> int:
    """Serve until told to stop; exit code 0 then, 1 after a failure."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1  # the first process is gone already
    config = msgspec.json.decode(line, type=WorkerLine)
    # A terminal or an init system may signal the whole group; the first process decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup_logging(config.server.log_level, f"server{config.rank}")
    try:
        asyncio.run(_serve(config))
    except MinisglError as error:
        log.error("%s", error)
        return 1
    return 0


async def _serve(config: WorkerLine) -> None:
    settings = FrontSettings(
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
        front = await open_front(settings, link, socket.socket(fileno=config.listener_fd))
        try:
            link.listen(front.frontend.take, lambda _: None)
            welcome = asyncio.ensure_future(
                _welcome(front.frontend, link, settings.server.heartbeat_timeout_s)
            )
            await _obey(front.frontend)
            welcome.cancel()
        finally:
            await front.close()
    finally:
        link.close()


async def _welcome(frontend: Frontend, link: EngineLink, heartbeat_timeout_s: float) -> None:
    """Take requests as soon as the engine does."""
    ready = await link.ready
    frontend.welcome(ready.max_context_tokens)
    link.watch(heartbeat_timeout_s)
    _say("ready")


async def _obey(frontend: Frontend) -> None:
    """Take commands until it is time to close; every open request has its end then."""
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    drained: asyncio.Task[None] | None = None
    end: MinisglError = SHUTTING_DOWN
    while True:
        word, _, reason = (await commands.readline()).decode().rstrip("\n").partition(" ")
        if word == "drain":
            frontend.refuse(SHUTTING_DOWN)
            drained = asyncio.ensure_future(_say_when_empty(frontend))
        elif word == "stop":
            break
        elif word == "dead":
            end = EngineDeadError(reason)
            break
        else:
            os._exit(1)  # the first process is gone
    if drained is not None:
        drained.cancel()
    frontend.refuse(end)
    frontend.fail_all(end)


async def _say_when_empty(frontend: Frontend) -> None:
    await frontend.wait_until_empty()
    _say("empty")


def _say(word: str) -> None:
    """To the first process; if it is gone, stdin says so, too."""
    with contextlib.suppress(OSError):
        sys.stdout.write(word + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
