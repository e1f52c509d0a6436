"""The further server processes of a port as the first one sees them: started, told, ended.

Promise: `failed` resolves when one of them ends unasked; after `close` none is left.
"""

import asyncio
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from minisgl.server.front import LAST_ANSWERS_S, FrontSettings

COMMAND = (sys.executable, "-m", "minisgl.server.api_worker")
END_S = LAST_ANSWERS_S + 3.0
"""How long they may take to end when told to, before they are killed."""


class ApiWorkers:
    """A process for each listener, with the ranks from 1 on. Make and close it inside one event loop."""

    def __init__(self, settings: FrontSettings, listeners: Sequence[socket.socket]) -> None:
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = self._loop.create_future()
        self._may_end = False
        self._workers = [
            ApiWorker(self, settings._replace(rank=rank), listener)
            for rank, listener in enumerate(listeners, start=1)
        ]

    async def all_ready(self) -> None:
        """Returns when each has heard that the engine is ready."""
        await asyncio.gather(*[worker.ready.wait() for worker in self._workers])

    async def all_empty(self) -> None:
        """Returns when, after `drain`, none has an open request."""
        await asyncio.gather(*[worker.empty.wait() for worker in self._workers])

    def drain(self) -> None:
        """Take no new requests."""
        self._tell("drain")

    def fail(self, reason: str) -> None:
        """End every open request with an error that gives `reason`, then end."""
        self._may_end = True
        self._tell("dead " + " ".join(reason.split()))

    async def stop(self) -> None:
        """End what is open, and the processes."""
        self._may_end = True
        self._tell("stop")
        await self._all_ended()

    async def close(self) -> None:
        """Wait for those that were told to end; kill the others."""
        if not self._may_end:
            await self.stop()
        else:
            await self._all_ended()
        for worker in self._workers:
            worker.kill()
        await self._all_ended()

    def note_end(self, rank: int, code: int) -> None:
        """A worker's process is over."""
        if not self._may_end and not self.failed.done():
            self.failed.set_result(f"server process {rank} ended (exit code {code})")

    async def _all_ended(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*[worker.ended.wait() for worker in self._workers]), END_S)

    def _tell(self, command: str) -> None:
        for worker in self._workers:
            worker.tell(command)


class ApiWorker:
    """One process and its two pipes."""

    def __init__(self, owner: ApiWorkers, settings: FrontSettings, listener: socket.socket) -> None:
        self.ready, self.empty, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._rank = settings.rank
        # A session of its own: Ctrl-C in the terminal is for the first process.
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        fd = listener.fileno()
        listener.close()  # the process has it now: no connection may wait on a copy that nobody takes from
        first_line = {
            "server": dataclasses.asdict(settings.server),
            "engine": dataclasses.asdict(settings.engine),
            "model_name": settings.model_name,
            "model_folder": str(settings.model_folder),
            "ipc_dir": str(settings.ipc_dir),
            "rank": settings.rank,
            "engine_pid": settings.engine_pid,
            "listener_fd": fd,
        }
        self.tell(json.dumps(first_line))
        threading.Thread(target=self._hear, name=f"server-{self._rank}", daemon=True).start()

    def tell(self, line: str) -> None:
        """One line to its stdin; it may have ended, which `ended` tells."""
        assert self._process.stdin is not None  # opened as a pipe
        with contextlib.suppress(OSError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def _hear(self) -> None:
        """In a thread of its own, because its end must be noticed whatever its pipes do."""
        assert self._process.stdout is not None  # opened as a pipe
        for line in self._process.stdout:
            event = {b"ready": self.ready, b"empty": self.empty}.get(line.strip())
            if event is not None:
                self._call(event.set)
        code = self._process.wait()
        self._call(lambda: self._owner.note_end(self._rank, code))
        self._call(self.ended.set)

    def _call(self, callback: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback)  # pyright: ignore[reportArgumentType]
