"""Keeps the engines of --replicas running, each through lives of its own.

Promise: the server starts with all of them or not at all. Later it goes on while one is left: `failed`
resolves when the last one is not started again.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from minisgl.ipc.messages import Ready
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.engines.supervision.keeper import EngineKeeper, Failure, KeeperSettings
from minisgl.server.processes.api_workers import ApiWorkers


class EngineKeepers:
    """One `EngineKeeper` for each engine. Create, use and close it in one event loop.

    Args:
        workers: the settings of each engine, in place of `settings.worker`.
        one_first: whether the others start only when the first engine is ready, so that they find the code
            that it has compiled.

    Raises:
        ConfigError: the command can't be started.
    """

    def __init__(
        self, settings: KeeperSettings, workers: Sequence[dict[str, Any]], *, one_first: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        """The first engine's answer, when all of them are ready for the first time."""
        self.failed: asyncio.Future[Failure] = loop.create_future()
        self.all: list[EngineKeeper] = []
        """By the numbers of their engines."""
        self._others: set[EngineKeeper] = set()  # engines that are to replace others, or were replaced
        several = len(workers) > 1
        try:
            for number, worker in enumerate(workers):
                keeper = EngineKeeper(
                    number,
                    settings._replace(worker=worker),
                    name=f"engine {number}" if several else "the engine",
                    starts_after=self.all[0].ready if one_first and number else None,
                )
                self.all.append(keeper)
                self._watch(keeper)
        except BaseException:
            for keeper in self.all:
                keeper.kill()
            raise

    @property
    def engines(self) -> list[ServedEngine]:
        """The engines, by their numbers."""
        return [keeper.engine for keeper in self.all]

    @property
    def first(self) -> EngineKeeper:
        """The keeper of engine 0."""
        return self.all[0]

    @property
    def has_been_ready(self) -> bool:
        """Whether an engine has been ready."""
        return self.ready.done() or any(keeper.ready.done() for keeper in self.all)

    def keep(self, workers: ApiWorkers) -> None:
        """See `EngineKeeper.keep`."""
        for keeper in self.all:
            keeper.keep(workers)

    def prepare(self, keeper: EngineKeeper, workers: ApiWorkers) -> None:
        """Keep an engine that is to replace another one. Its own `ready` and `failed` say how that goes."""
        self._others.add(keeper)
        keeper.keep(workers)

    def replace(self, old: EngineKeeper, new: EngineKeeper) -> None:
        """Put `new` in the place of `old`. `old` runs until `remove`."""
        self._others.discard(new)
        self._others.add(old)
        self.all[self.all.index(old)] = new

    def accept(self, keeper: EngineKeeper) -> None:
        """A new engine stays: from now on, its failure counts for `failed`."""
        self._watch(keeper)

    async def remove(self, keeper: EngineKeeper) -> None:
        """Stop an engine that was replaced, or that replaces none after all."""
        await keeper.stop()
        await keeper.close()
        self._others.discard(keeper)

    async def stop(self) -> None:
        """Ask all engines to exit, and kill those that do not."""
        await asyncio.gather(*[keeper.stop() for keeper in (*self.all, *self._others)])

    async def close(self) -> None:
        """Kill the engines that still run, and close their sockets."""
        await asyncio.gather(*[keeper.close() for keeper in (*self.all, *self._others)])
        await asyncio.gather(*[keeper.spare.close() for keeper in self.all])

    def _watch(self, keeper: EngineKeeper) -> None:
        keeper.ready.add_done_callback(lambda _: self._note_ready())
        keeper.failed.add_done_callback(lambda _: self._note_failure(keeper))

    def _note_ready(self) -> None:
        if not self.ready.done() and all(keeper.ready.done() for keeper in self.all):
            self.ready.set_result(self.first.ready.result())

    def _note_failure(self, lost: EngineKeeper) -> None:
        if self.failed.done():
            return
        failure = lost.failed.result()
        if lost not in self.all:  # it was replaced
            lost.engine.fail(failure.reason)
            return
        if len(self.all) > 1:
            failure = failure._replace(reason=f"{lost.engine.name}: {failure.reason}")
        if not self.ready.done() or all(keeper.failed.done() for keeper in self.all):
            self.failed.set_result(failure)
        else:
            lost.engine.fail(failure.reason)
