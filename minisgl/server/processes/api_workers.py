"""Starts, commands and ends the additional server processes; runs in the first one.

Promise: `failed` resolves when one of them ends without being told to. After `close` none is left.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from minisgl.errors import EngineDeadError
from minisgl.ipc.child_process import module_command
from minisgl.server.http_server import LAST_ANSWERS_S, HttpServerSettings
from minisgl.server.tracing.call_tracer import LAST_SPANS_S

KEPT_ANSWERS = 20
"""Of one kind. Several lives may be waited for at once."""
COMMAND = tuple(module_command("minisgl.server.processes.api_worker"))
END_S = LAST_ANSWERS_S + LAST_SPANS_S + 3.0
"""Processes that were told to end are killed after this time."""


class ApiWorkers:
    """One process per listener, with ranks from 1. Create and close it in one event loop.

    Methods name an engine by the generation of its first life.

    Args:
        engine_pid: process id of the engine's first life.
        engine_dir: the directory of that life's sockets.
    """

    def __init__(
        self,
        settings: HttpServerSettings,
        listeners: Sequence[socket.socket],
        engine_pid: int,
        engine_dir: Path,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = self._loop.create_future()
        self._may_end = False
        self._num_steps = 0  # of reloads
        self._workers = [
            ApiWorker(self, settings._replace(rank=rank), listener, engine_pid, engine_dir)
            for rank, listener in enumerate(listeners, start=1)
        ]

    async def all_ready(self) -> None:
        """Return when every process knows that the engine is ready."""
        await asyncio.gather(*[worker.ready.wait() for worker in self._workers])

    async def all_empty(self) -> None:
        """Return when, after `drain`, no process has an open request."""
        await asyncio.gather(*[worker.empty.wait() for worker in self._workers])

    async def num_suspects(self, generation: int) -> list[int]:
        """Of each process: requests that must be tried alone in this life of the engine.

        It returns when every process has said so, which is when it knows that the engine is ready.
        """
        return await asyncio.gather(*[worker.number_said("ready", generation) for worker in self._workers])

    async def try_suspects(self, engine: int, generation: int, num_suspects: Sequence[int]) -> None:
        """Have the processes try their suspects, one process after the other."""
        for worker, num in zip(self._workers, num_suspects, strict=True):
            if num:
                worker.tell(f"try {engine} {generation}")
                await worker.number_said("tried", generation)

    def resume(self, engine: int, generation: int) -> None:
        """Tell the processes to send their open requests to this life of the engine."""
        self._tell(f"resume {engine} {generation}")

    def lose(self, engine: int, generation: int, reason: str) -> None:
        """Tell the processes that this life of the engine has ended, and why."""
        self._tell(f"lost {engine} {generation} {' '.join(reason.split())}")

    def begin(self, engine: int, generation: int, pid: int, ipc_dir: Path) -> None:
        """Tell the processes to connect to the engine's next life."""
        self._tell(f"engine {engine} {generation} {pid} {ipc_dir}")

    def add(self, engine: int, pid: int, ipc_dir: Path) -> None:
        """Tell the processes to connect to the first life of an engine that is to replace another one.

        `pid` is 0 if it has not started yet.
        """
        self._tell(f"add {engine} {pid} {ipc_dir}")

    def note_pid(self, engine: int, pid: int) -> None:
        """Tell the processes the process id of an engine that they have been told of before it started."""
        self._tell(f"pid {engine} {pid}")

    def release(self) -> None:
        """Tell the processes to let calls go on that wait since "hold"."""
        self._tell("release")

    async def do(self, word: str, what: str = "") -> None:
        """Tell the processes to do a step of a reload (`EngineFollowers`); return when all have.

        Raises:
            EngineDeadError: a process could not.
        """
        self._num_steps += 1
        number = self._num_steps
        self._tell(f"{word} {number} {what}")
        if any(await asyncio.gather(*[worker.step_done(word, number) for worker in self._workers])):
            raise EngineDeadError(f"a server process could not {word} what the reload needs; see the log")

    def reload(self) -> None:
        """Tell the processes to read and open files again, as `HttpServer.reload` does."""
        self._tell("reload")

    def drain(self) -> None:
        """Tell the processes to refuse new requests."""
        self._tell("drain")

    def fail(self, reason: str) -> None:
        """Tell the processes to end every open request with an error that states `reason`, then to exit."""
        self._may_end = True
        self._tell("dead " + " ".join(reason.split()))

    async def stop(self) -> None:
        """Tell the processes to end their open requests and to exit; wait until they have."""
        self._may_end = True
        self._tell("stop")
        await self._all_ended()

    async def close(self) -> None:
        """Wait until the processes have ended, and kill those that have not ended after END_S."""
        if not self._may_end:
            await self.stop()
        else:
            await self._all_ended()
        for worker in self._workers:
            worker.kill()
        await self._all_ended()

    def note_end(self, rank: int, code: int) -> None:
        """Record that a process has ended; unless it was told to, that is a failure."""
        if not self._may_end and not self.failed.done():
            self.failed.set_result(f"server process {rank} ended (exit code {code})")

    async def _all_ended(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*[worker.ended.wait() for worker in self._workers]), END_S)

    def _tell(self, command: str) -> None:
        for worker in self._workers:
            worker.tell(command)


class ApiWorker:
    """One additional server process and the pipes to its stdin and stdout."""

    def __init__(
        self,
        owner: ApiWorkers,
        settings: HttpServerSettings,
        listener: socket.socket,
        engine_pid: int,
        engine_dir: Path,
    ) -> None:
        self.ready, self.empty, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._said: dict[tuple[str, int], asyncio.Future[int]] = {}  # by word and generation
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._rank = settings.rank
        # Its own session, so that Ctrl-C in the terminal reaches only the first process.
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        fd = listener.fileno()
        listener.close()  # only the child may hold it: connections on a copy would never be accepted
        first_line = {
            "server": dataclasses.asdict(settings.server),
            "engine": dataclasses.asdict(settings.engine),
            "model_name": settings.model_name,
            "model_folder": str(settings.model_folder),
            "ipc_dir": str(settings.ipc_dir),
            "engine_dir": str(engine_dir),
            "rank": settings.rank,
            "engine_pid": engine_pid,
            "listener_fd": fd,
        }
        self.tell(json.dumps(first_line))
        threading.Thread(target=self._read_output, name=f"server-{self._rank}", daemon=True).start()

    def tell(self, line: str) -> None:
        """Write a line to its stdin. If the process has ended, nothing happens; see `ended`."""
        assert self._process.stdin is not None  # opened as a pipe
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    async def number_said(self, word: str, generation: int) -> int:
        """The number that it says after this word of this life of the engine; waits for it."""
        return await asyncio.shield(self._answer(word, generation))

    async def step_done(self, word: str, number: int) -> int:
        """What it says after this step of a reload: 0 = it is done; 1 = it failed, or has ended."""
        answer, ended = self._answer(word, number), asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        return answer.result() if answer.done() else 1

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def _read_output(self) -> None:
        """Read its stdout and wait for its end. Runs in a thread, so that the end is noticed in any case."""
        assert self._process.stdout is not None  # opened as a pipe
        for line in self._process.stdout:
            self._call(functools.partial(self._take, line.decode().split()))
        code = self._process.wait()
        self._call(lambda: self._owner.note_end(self._rank, code))
        self._call(self.ended.set)

    def _take(self, words: list[str]) -> None:
        """A line of its stdout: "empty"; or "ready" or "tried" with a generation and a number, or a step of a
        reload with its number and 0 or 1."""
        if words == ["empty"]:
            self.empty.set()
        elif len(words) == 3:
            if words[0] == "ready":
                self.ready.set()
            answer = self._answer(words[0], int(words[1]))
            if not answer.done():
                answer.set_result(int(words[2]))

    def _answer(self, word: str, generation: int) -> asyncio.Future[int]:
        # Old answers, which nobody waits for any more, go.
        said = self._said.items()
        self._said = {
            key: answer for key, answer in said if key[0] != word or key[1] > generation - KEPT_ANSWERS
        }
        return self._said.setdefault((word, generation), self._loop.create_future())

    def _call(self, callback: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for this
            self._loop.call_soon_threadsafe(callback)  # pyright: ignore[reportArgumentType]
