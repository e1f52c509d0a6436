"""What an additional server process does when the first one tells it of engines and reloads.

Promise: every command of a reload that waits for an answer gets one, 0 if it was done and 1 if not.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from minisgl.config import EngineConfig, ServerConfig
from minisgl.ipc.transport import ServerSocket
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.http_server import HttpServerSettings
from minisgl.server.reload.process_change import ProcessChange

log = logging.getLogger(__name__)


class NextModel(msgspec.Struct, frozen=True):
    """What "load" says of the next model, as JSON."""

    server: ServerConfig
    engine: EngineConfig
    model_name: str
    model_folder: str


class EngineFollower:
    """Follows what the first process says of one engine's lives."""

    def __init__(self, engine: ServedEngine, heartbeat_timeout_s: float) -> None:
        self.engine = engine
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._task: asyncio.Task[None] | None = None  # what is being done for the current life

    def wait_until_ready(self) -> None:
        """Say "ready" when the current life is; send requests to the first life at once."""
        self._do(self._wait_until_ready())

    def follow(self, word: str, generation: int, more: str) -> None:
        """Follow a command about a life."""
        engine = self.engine
        if word == "lost":
            self.close()
            engine.lose(more)
        elif word == "engine":
            pid, _, ipc_dir = more.partition(" ")
            engine.begin(generation, ServerSocket(ipc_dir, engine.rank))
            engine.pid = int(pid)
            self.wait_until_ready()
        elif word == "try":
            self._do(self._try_suspects(generation))
        elif word == "resume" and engine.generation == generation > engine.first_generation:
            self._do(engine.resume())

    def close(self) -> None:
        """Stop what is being done."""
        if self._task is not None:
            self._task.cancel()

    def _do(self, work: Coroutine[None, None, None]) -> None:
        self.close()
        self._task = asyncio.get_running_loop().create_task(work)

    async def _wait_until_ready(self) -> None:
        engine = self.engine
        # Others read `ready`, too: it must not be cancelled with this task.
        await asyncio.shield(engine.link.ready)
        engine.link.start_heartbeat(self._heartbeat_timeout_s)
        if engine.generation == engine.first_generation:
            await engine.resume()
        tell_first_process(f"ready {engine.generation} {engine.num_suspects}")

    async def _try_suspects(self, generation: int) -> None:
        if self.engine.generation == generation:
            await self.engine.try_suspects()
            tell_first_process(f"tried {generation} 0")


class EngineFollowers:
    """Follows what the first process says of all engines, and of reloads.

    Args:
        engine: the first one.
        settings: those of this process at its start.
    """

    def __init__(
        self, engine: ServedEngine, engines: Engines, change: ProcessChange, settings: HttpServerSettings
    ) -> None:
        self._engines = engines
        self._change = change
        self._settings = settings
        self._followers = {engine.first_generation: self._make(engine)}
        self._tasks: set[asyncio.Task[None]] = set()
        self._followers[engine.first_generation].wait_until_ready()

    def follow(self, word: str, rest: str) -> bool:
        """Follow a command; False = it is none of these."""
        first, _, more = rest.partition(" ")
        if word in ("lost", "engine", "try", "resume"):
            generation, _, more = more.partition(" ")
            follower = self._followers.get(int(first))
            if follower is not None:
                follower.follow(word, int(generation), more)
        elif word == "add":
            pid, _, ipc_dir = more.partition(" ")
            self._add(int(first), int(pid), ipc_dir)
        elif word == "pid":
            follower = self._followers.get(int(first))
            if follower is not None:
                follower.engine.pid = int(more)
        elif word == "release":
            self._change.release()
        elif word in ("load", "hold", "replace", "switch", "left", "end"):
            task = asyncio.get_running_loop().create_task(self._step(word, int(first), more))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            return False
        return True

    def close(self) -> None:
        """Stop what is being done."""
        for follower in self._followers.values():
            follower.close()
        for task in self._tasks:
            task.cancel()

    def _make(self, engine: ServedEngine) -> EngineFollower:
        return EngineFollower(engine, self._settings.server.heartbeat_timeout_s)

    def _add(self, generation: int, pid: int, ipc_dir: str) -> None:
        rank = self._settings.rank
        engine = ServedEngine(0, rank, ServerSocket(ipc_dir, rank), generation=generation)
        engine.pid = pid
        self._engines.prepare(engine)
        self._followers[generation] = self._make(engine)
        self._followers[generation].wait_until_ready()

    async def _step(self, word: str, number: int, what: str) -> None:
        """Do a step of a reload, and say that it is done."""
        try:
            await self._do(word, what)
        except Exception:
            log.exception("a step of a reload failed: %s", word)
            tell_first_process(f"{word} {number} 1")
        else:
            tell_first_process(f"{word} {number} 0")

    async def _do(self, word: str, what: str) -> None:
        engines = [] if word == "load" else [self._followers[int(one)].engine for one in what.split()]
        match word, engines:
            case "load", _:
                await self._change.load(self._next_settings(what))
            case "hold", _:
                await self._change.hold()
            case "replace", [old, new]:
                self._change.replace(old, new)
            case "switch", []:
                await self._change.switch()
            case "switch", [old, new]:
                await self._change.switch([(old, new)])
            case "left", [engine]:
                await engine.wait_until_empty()
            case "end", [engine]:
                self._followers.pop(engine.first_generation).close()
                self._engines.remove(engine)
            case _:
                raise ValueError(f"{word} {what}")

    def _next_settings(self, line: str) -> HttpServerSettings:
        told = msgspec.json.decode(line, type=NextModel)
        values: dict[str, Any] = {name: getattr(told, name) for name in told.__struct_fields__}
        return self._settings._replace(**{**values, "model_folder": Path(told.model_folder)})


def tell_first_process(line: str) -> None:
    """Write a line to the first process. If that has ended, reading stdin shows it."""
    with contextlib.suppress(OSError):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
