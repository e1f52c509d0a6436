"""The door of --engine-listen: engines from elsewhere connect, and each gets a seat, a `ServedEngine`.

When an engine has gone, its seat stays for the next engine that connects. So a seat has one life after the
other, each with a connection of its own.

Promise: an engine of another version or model, or with settings that would change answers, is refused, and
both sides say why. `failed` resolves only if the door itself breaks.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import NamedTuple

import msgspec

from minisgl import __version__
from minisgl.config import EngineConfig, ServerConfig
from minisgl.config.model_facts import difference, server_facts
from minisgl.errors import ConfigError
from minisgl.ipc.door import DoorSocket, EngineLine
from minisgl.ipc.door_messages import Dismissed, Hello, Welcome
from minisgl.ipc.messages import Ready
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.engines.supervision.keeper import Failure
from minisgl.server.engines.supervision.leaving import HAS_LEFT, end_when_left
from minisgl.server.engines.supervision.life import LifeLimits, live
from minisgl.server.processes.api_workers import ApiWorkers

log = logging.getLogger(__name__)

PROBE_S = 0.5
"""How often to check the connections. A lost one is noticed within this time."""
MOST_SEATS = 64
SERVER_FIELDS = frozenset({"model", "revision", "tokenizer", "seed", "compile_cache"})
"""Fields of `EngineConfig` that a server without engines of its own uses or ignores."""


def check_engine_listen(server: ServerConfig, engine: EngineConfig) -> None:
    """Refuse settings that do not go with engines from elsewhere.

    Raises:
        ConfigError: a flag belongs to `minisgl engine`, or is about engines that the server starts.
    """
    if server.engine_listen is None:
        return
    wrong = [("--replicas", server.replicas != 1), ("--api-workers", server.api_workers != 1)]
    wrong.append(("--engine-restarts", server.engine_restarts is not None))
    wrong.append(("--spare-process", bool(server.spare_process)))
    for flag, is_given in wrong:
        if is_given:
            raise ConfigError(
                f"{flag} does not go with --engine-listen: start as many engines as you like with 'minisgl "
                "engine', and have something start them again (torchrun, systemd, Kubernetes)"
            )
    usual = EngineConfig()
    for name in engine.__dataclass_fields__:
        if name not in SERVER_FIELDS and getattr(engine, name) != getattr(usual, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with --engine-listen: give it to 'minisgl engine'"
            )


class DoorSettings(NamedTuple):
    """The arguments of `EngineDoor`."""

    endpoint: str
    secret: str
    model_folder: Path
    limits: LifeLimits


class _Seat:
    """One `ServedEngine`, and the connection of its current life."""

    def __init__(self, number: int, door: DoorSocket) -> None:
        self.line = EngineLine(door)
        self.engine = ServedEngine(
            number,
            0,
            self.line,
            f"engine {number}",
            "is away, and answers wait until an engine comes",
        )
        self.connection = b""
        self.hello: Hello | None = None
        self.is_free = asyncio.Event()
        self.is_free.set()


class EngineDoor:
    """Create, use and close it in one event loop.

    Raises:
        ConfigError: the secret is too short, or the endpoint can't be used.
    """

    def __init__(self, settings: DoorSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = settings.limits
        self._facts = server_facts(settings.model_folder)  # and those of the first engine, once it is ready
        self._door = DoorSocket(settings.endpoint, settings.secret)
        self._seats = [_Seat(0, self._door)]
        self._seat_of: dict[bytes, _Seat] = {}  # by connection
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        """The first engine is ready."""
        self.failed: asyncio.Future[Failure] = self._loop.create_future()

    @property
    def endpoint(self) -> str:
        """Where engines connect, with the port that the system chose."""
        return self._door.endpoint

    @property
    def engines(self) -> list[ServedEngine]:
        """The engines, by their numbers."""
        return [seat.engine for seat in self._seats]

    @property
    def has_been_ready(self) -> bool:
        """Whether an engine has been ready."""
        return self.ready.done()

    def open(self, engines: Engines, workers: ApiWorkers) -> None:
        """Accept engines from now on; new ones are added to `engines`."""
        self._start(self._keep(self._seats[0], workers))
        self._start(self._receive(engines, workers))
        self._start(self._probe())

    async def stop(self) -> None:
        """Tell the engines that this server ends. They then wait for the next server."""
        self._is_stopping = True
        for seat in self._seats:
            seat.line.dismiss("the server has ended")

    async def close(self) -> None:
        """Close all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for seat in self._seats:
            seat.engine.close()
        self._door.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        async def watched() -> None:
            try:
                await work
            except Exception as error:
                log.exception("the door to the engines has broken")
                if not self.failed.done():
                    self.failed.set_result(Failure(f"the door to the engines has broken: {error}"))

        task = self._loop.create_task(watched())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, engines: Engines, workers: ApiWorkers) -> None:
        while True:
            connection, data = await self._door.receive()
            seat = self._seat_of.get(connection)
            if seat is not None:
                seat.line.take(data)
            elif data and not self._is_stopping:
                self._start(self._greet(connection, data, engines, workers))
            await asyncio.sleep(0)  # other tasks must run even if messages arrive without pause

    async def _greet(self, connection: bytes, data: bytes, engines: Engines, workers: ApiWorkers) -> None:
        """Accept an engine that has connected, or tell it why it is refused."""
        try:
            hello = msgspec.msgpack.decode(data, type=Hello)
        except msgspec.DecodeError:  # from a life that has ended here, or from another version
            self._door.send(connection, Dismissed(f"minisgl {__version__} can't read its first message"))
            return
        # An engine that was just started again should find its old seat free, so wait for lost connections.
        lost = [seat.is_free.wait() for seat in self._seats if seat.line.probe()]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*lost), PROBE_S)
        # From here on nothing is awaited: two engines that come at once must not both be the first.
        refusal = self._refusal(hello)
        who = f"an engine of {hello.host} (process {hello.pid}, life {hello.life})"
        if refusal:
            log.warning("%s is refused: %s", who, refusal)
            self._door.send(connection, Dismissed(refusal))
            return
        free = [seat for seat in self._seats if seat.is_free.is_set()]
        if not free:
            seat = _Seat(len(self._seats), self._door)
            self._seats.append(seat)
            engines.add(seat.engine)
            self._start(self._keep(seat, workers))
        else:
            # Suspects of a crash wait for a life of their own seat.
            seat = max(free, key=lambda one: (one.engine.num_suspects, -one.engine.number))
        log.info("%s has come as %s", who, seat.engine.name)
        seat.connection, seat.hello = connection, hello
        seat.is_free.clear()
        seat.engine.pid = hello.pid
        self._seat_of[connection] = seat
        self._door.send(connection, Welcome())
        seat.line.open(connection)

    def _refusal(self, hello: Hello) -> str:
        """Why an engine is refused; empty = it is accepted."""
        if hello.version != __version__:
            return f"minisgl must be the same: here it is {__version__}, this engine has {hello.version}"
        # Until an engine is ready, the first that is starting decides.
        known = [seat.hello.facts for seat in self._seats if seat.hello is not None]
        found = difference({**(known[0] if known else {}), **self._facts}, hello.facts)
        if found:
            return f"{found}; what the first engine has holds until the server is started again"
        if len(self._seat_of) == MOST_SEATS:
            return f"{MOST_SEATS} engines are connected already"
        return ""

    async def _keep(self, seat: _Seat, workers: ApiWorkers) -> None:
        """Serve with the engines that take this seat, one after the other."""
        engine = seat.engine
        while True:
            await seat.line.came.wait()
            leaving = asyncio.ensure_future(end_when_left(engine))
            try:
                await live(engine, workers, self._limits, lambda ready: self._note_ready(seat, ready))
            finally:
                leaving.cancel()
            reason = engine.link.died.result()
            has_left = reason == HAS_LEFT
            log.log(logging.INFO if has_left else logging.ERROR, "%s has gone: %s", engine.name, reason)
            self._seat_of.pop(seat.connection, None)
            seat.line.dismiss(reason if has_left else f"the server counts this engine as dead: {reason}")
            seat.hello = None
            engine.lose(reason, is_crash=not has_left)
            seat.line = EngineLine(self._door)
            engine.begin(engine.generation + 1, seat.line)
            seat.is_free.set()

    def _note_ready(self, seat: _Seat, ready: Ready) -> None:
        if seat.hello is not None:
            self._facts = {**seat.hello.facts, **self._facts}
        if not self.ready.done():
            self.ready.set_result(ready)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            for seat in self._seats:
                seat.line.probe()
