"""Keeps an engine running: starts its process, and starts it again when it has ended or hangs.

Promise: one process at a time; the next starts when the one before is gone. `failed` resolves when the engine
is not started again: its first start failed, its settings can't work, or no restart is left.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.ipc.messages import Ready
from minisgl.ipc.transport import ServerSocket
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.engines.supervision.engine_process import EngineProcess
from minisgl.server.engines.supervision.life import LifeLimits, live
from minisgl.server.engines.supervision.restarts import WINDOW_S, Restarts
from minisgl.server.engines.supervision.spare_process import SpareProcess
from minisgl.server.processes.api_workers import ApiWorkers

log = logging.getLogger(__name__)


class KeeperSettings(NamedTuple):
    """The arguments of `EngineKeeper`."""

    command: Sequence[str]
    """Command line of the engine."""
    worker: dict[str, Any]
    """The engine's settings, which it reads from stdin, without `ipc_dir`."""
    private_dir: Path
    """Gets a directory for the sockets of each life."""
    startup_timeout_s: float
    heartbeat_timeout_s: float
    restarts: int
    """Most restarts within `restarts.WINDOW_S`."""
    keeps_spare: bool | None
    """Whether a `SpareProcess` waits for the next life; None = if the engine runs on a GPU."""


class Failure(NamedTuple):
    """Why the engine is not started again."""

    reason: str
    is_user_mistake: bool = False
    """The settings or the model can't work."""
    is_device_fault: bool = False


class EngineKeeper:
    """Keeps one engine; lives in the first server process. Create, use and close it in one event loop.

    Args:
        name: of the engine, for people.
        starts_after: the first life starts when this is done; None = now.
        generations: numbers for its lives. Engines that replace each other take them from one iterator.
        spare: shared by engines that replace each other; `EngineKeepers` closes it. None = a new one.
        may_fail_first: whether a failed first start is tried again, as later starts are.

    Raises:
        ConfigError: the command can't be started.
    """

    def __init__(
        self,
        number: int,
        settings: KeeperSettings,
        *,
        name: str = "the engine",
        starts_after: asyncio.Future[Any] | None = None,
        generations: Iterator[int] | None = None,
        spare: SpareProcess | None = None,
        may_fail_first: bool = False,
    ) -> None:
        self.settings = settings
        self.spare = SpareProcess(settings.command) if spare is None else spare
        self._generations = itertools.count(1) if generations is None else generations
        self._may_fail_first = may_fail_first
        self._restarts = Restarts(settings.restarts)
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        """The answer of the first life."""
        self.failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        generation = next(self._generations)
        socket = ServerSocket(self._make_dir(number, generation))
        self.engine = ServedEngine(number, 0, socket, name, generation=generation)
        self._process: EngineProcess | None = None
        self._closing: asyncio.Future[None] | None = None  # of the spare process
        self._starts_after = starts_after
        if starts_after is None:
            try:
                self._start_process()
            except BaseException:
                self.engine.close()
                raise
        self._task: asyncio.Task[None] | None = None

    def dir_of_life(self) -> Path:
        """The directory of the current life's sockets."""
        return self._dir(self.engine.number, self.engine.generation)

    def keep(self, workers: ApiWorkers) -> None:
        """From now on, start the engine again when it ends. `workers` are told of it."""
        self._task = asyncio.get_running_loop().create_task(self._keep(workers))

    def successor(
        self,
        worker: dict[str, Any],
        *,
        starts_after: asyncio.Future[Any] | None = None,
        may_fail_first: bool = False,
    ) -> "EngineKeeper":
        """The keeper of an engine with other settings, which is to replace this one's.

        Raises:
            ConfigError: the command can't be started.
        """
        return EngineKeeper(
            self.engine.number,
            self.settings._replace(worker=worker),
            name=self.engine.name,
            starts_after=starts_after,
            generations=self._generations,
            spare=self.spare,
            may_fail_first=may_fail_first,
        )

    async def stop(self) -> None:
        """Ask the engine to exit, and kill it if it does not. It is not started again."""
        await self._stop_keeping()
        if self._process is not None:
            await (self._process.stop() if self.engine.link.is_up else self._process.close())

    async def close(self) -> None:
        """Kill the engine if it still runs, and close its sockets."""
        await self._stop_keeping()
        if self._process is not None:
            await self._process.close()
        self.engine.close()
        shutil.rmtree(self.dir_of_life(), ignore_errors=True)

    def kill(self) -> None:
        """Kill the engine and close its sockets, without waiting. Call it before `keep` only."""
        if self._process is not None:
            self._process.kill()
        self.engine.close()

    async def _stop_keeping(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep(self, workers: ApiWorkers) -> None:
        try:
            if self._starts_after is not None:
                await asyncio.shield(self._starts_after)
                self._start_process()
                workers.note_pid(self.engine.first_generation, self.engine.pid)
            while True:
                await self._live(workers)
                failure = await self._end_life(workers)
                if failure is not None:
                    if self.ready.done() or self._may_fail_first:  # else another engine may have it
                        await self.spare.close()
                    self.failed.set_result(failure)
                    return
                self._begin_next_life(workers)
        except Exception as error:
            log.exception("%s can't be kept running", self.engine.name)
            await self.spare.close()
            self.failed.set_result(Failure(f"it can't be started again: {error}"))

    async def _live(self, workers: ApiWorkers) -> None:
        """Return when the current life has ended; until then, its requests run."""

        def note_ready(ready: Ready) -> None:
            if not self.ready.done():
                self.ready.set_result(ready)
            if ready.device == "cuda" if settings.keeps_spare is None else settings.keeps_spare:
                self.spare.start(settings.worker)
            else:  # an engine before this one may have run on a GPU
                self._closing = asyncio.ensure_future(self.spare.close())

        settings = self.settings
        limits = LifeLimits(settings.startup_timeout_s, settings.heartbeat_timeout_s)
        await live(self.engine, workers, limits, note_ready)

    async def _end_life(self, workers: ApiWorkers) -> Failure | None:
        """End the process and tell everybody. Returns why there is no next life; None = there is one."""
        engine, link = self.engine, self.engine.link
        reason = link.died.result()
        if self._process is not None:
            await self._process.close()
        failure = Failure(reason, link.is_user_mistake, link.is_device_fault)
        if not self.ready.done() and not self._may_fail_first:
            return failure
        wait_s = None if link.is_user_mistake else self._restarts.take(time.monotonic())
        if wait_s is None:
            used_up = f"; it was started again {self._restarts.most} times within {WINDOW_S / 60:g} minutes"
            is_used_up = self._restarts.most and not link.is_user_mistake
            return failure._replace(reason=reason + used_up) if is_used_up else failure
        log.error(
            "%s died%s: %s; it is started again (restart %d of %d within %g minutes)",
            engine.name,
            " of a GPU fault" if link.is_device_fault else "",
            reason,
            self._restarts.num_counted,
            self._restarts.most,
            WINDOW_S / 60,
        )
        engine.lose(reason)
        workers.lose(engine.first_generation, engine.generation, reason)
        shutil.rmtree(self.dir_of_life(), ignore_errors=True)
        await asyncio.sleep(wait_s)
        return None

    def _begin_next_life(self, workers: ApiWorkers) -> None:
        engine, generation = self.engine, next(self._generations)
        ipc_dir = self._make_dir(engine.number, generation)
        engine.begin(generation, ServerSocket(ipc_dir))
        self._start_process()
        workers.begin(engine.first_generation, generation, engine.pid, ipc_dir)

    def _start_process(self) -> None:
        line = {
            **self.settings.worker,
            "ipc_dir": str(self.dir_of_life()),
            "sent_s": time.monotonic(),
            "private_dir": str(self.settings.private_dir),
        }
        spare = self.spare.take(self.settings.worker)
        self._process = spare or EngineProcess(self.settings.command)
        self._process.begin(json.dumps(line, allow_nan=False).encode(), self.engine.link)
        self.engine.pid = self._process.pid
        if spare is not None:  # its imports run while the engine starts, which may die again soon
            self.spare.start(self.settings.worker)

    def _make_dir(self, number: int, generation: int) -> Path:
        ipc_dir = self._dir(number, generation)
        ipc_dir.mkdir(mode=0o700)
        return ipc_dir

    def _dir(self, number: int, generation: int) -> Path:
        # Short, because the paths of unix sockets are.
        return self.settings.private_dir / f"e{number}.{generation}"
