"""Once a second: takes a sample of the figures, and makes the event that all open streams of events get.

Promise: a stream whose client does not read is skipped, and is closed after `MAX_SKIPPED` events; it holds no
memory but its socket's buffer. With nobody listening, a second costs one question to the engine. Of several
server processes the first one samples; the others ask it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from minisgl.errors import RequestError
from minisgl.ipc.questions import AskRequests
from minisgl.lives import Moment
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.processes.siblings import Siblings
from minisgl.server.stats import ServerStats, total
from minisgl.server.watch.advice import advice_on
from minisgl.server.watch.history import NAMES, Counted, History, Sample
from minisgl.server.watch.refusals import Refusals
from minisgl.server.watch.views import EngineEvent, EngineState, Event, MomentView

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
ANSWER_S = 0.8
"""How long the engine may take to answer; else the second has no figures of it."""
MAX_STREAMS = 64
MAX_SKIPPED = 30
HISTORY_PATH = "/watch/history"
EVENT_PATH = "/watch/event"
REFUSED_PATH = "/watch/refused"


class Ticker:
    """Samples, and sends events. Create, use and close it in one event loop.

    Args:
        rank: of this server process; 0 = it samples.
        state: tells an engine's state.
    """

    def __init__(
        self,
        engines: Engines,
        siblings: Siblings,
        refusals: Refusals,
        rank: int,
        state: Callable[[ServedEngine], EngineState],
    ) -> None:
        self._engines = engines
        self._siblings = siblings
        self._rank = rank
        self._state = state
        self._histories: list[History] = []  # of each engine
        self._event = b""  # the newest, as server-sent event
        self._has_event = asyncio.Event()  # another one for each event
        self._num_streams = 0
        self._last_ask_at = 0.0  # when another process last asked for an event
        self._told_until = time.time()  # moments that have not changed since were told
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        siblings.offer(EVENT_PATH, self._give_event)
        siblings.offer(HISTORY_PATH, self._give_history)
        siblings.offer(REFUSED_PATH, lambda: msgspec.json.encode(refusals.told()))

    def start(self) -> None:
        """Tick from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop, and end the open streams."""
        self._is_closing = True
        self._has_event.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def refused(self) -> list[Moment]:
        """When any server process refused calls, the oldest first."""
        answers = await self._siblings.ask_all(REFUSED_PATH)
        found = [one for answer in answers for one in msgspec.json.decode(answer, type=list[Moment])]
        return sorted(found, key=lambda one: (one.at, one.number))

    async def columns(self, seconds: int) -> list[dict[str, list[float | None]]]:
        """See `History.columns`; of each engine, by the process that samples."""
        if self._rank == 0:
            return [history.columns(seconds) for history in self._all_histories()]
        answer = await self._siblings.ask_first(HISTORY_PATH)
        if answer is None:
            return [{name: [] for name in NAMES} for _ in self._engines.all]
        whole = msgspec.json.decode(answer, type=list[dict[str, list[float | None]]])
        return [{name: values[-seconds:] for name, values in one.items()} for one in whole]

    async def last_sample(self, engine: int) -> Sample | None:
        """The newest sample of an engine; of the process that samples."""
        columns = (await self.columns(1))[engine]
        found = {name: values[-1] for name, values in columns.items() if values}
        return msgspec.convert(found, Sample) if found else None

    async def send_events(self, request: web.Request) -> web.StreamResponse:
        """Answer with a stream of events, until the client leaves or the server stops.

        Raises:
            RequestError: 429 if too many streams are open.
        """
        if self._num_streams >= MAX_STREAMS:
            raise RequestError(
                429,
                "too_many_streams",
                f"{MAX_STREAMS} streams of events are open; close one, or read /debug/history",
            )
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._num_streams += 1
        try:
            await response.prepare(request)
            await self._send(request, response)
        except ConnectionResetError:
            log.debug("a reader of events has left")
        finally:
            self._num_streams -= 1
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse) -> None:
        num_skipped = 0
        while not self._is_closing:
            transport = request.transport
            if transport is None:
                return
            if transport.get_write_buffer_size():
                num_skipped += 1
                if num_skipped >= MAX_SKIPPED:
                    transport.abort()
                    return
            elif self._event:
                num_skipped = 0
                await response.write(self._event)
            await self._has_event.wait()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while True:
            next_at = max(next_at + INTERVAL_S, loop.time())
            try:
                await self._tick()
            except Exception:
                log.exception("a second of the history is missing")
            await asyncio.sleep(next_at - loop.time())

    async def _tick(self) -> None:
        if self._rank != 0:
            if self._num_streams:
                self._publish(await self._siblings.ask_first(EVENT_PATH) or b"")
            return
        await self._sample()
        if self._num_streams or time.monotonic() - self._last_ask_at < 3 * INTERVAL_S:
            event = msgspec.json.encode(await self._make_event())
            self._publish(b"event: sample\ndata: " + event + b"\n\n")

    async def _sample(self) -> None:
        if any(engine.last_ready or engine.num_restarts for engine in self._engines.all):
            parts = await self._siblings.stats()
        else:  # the other processes may not listen yet
            parts = [self._siblings.own_stats()]
        stats = total(parts)
        await asyncio.gather(*[self._sample_engine(engine, stats) for engine in self._engines.all])

    async def _sample_engine(self, engine: ServedEngine, stats: ServerStats) -> None:
        """Take a sample of an engine, with the figures of the whole server in it."""
        ready, generation = engine.last_ready, engine.generation
        status = await engine.link.ask_status(ANSWER_S) if engine.is_up else None
        self._history_of(engine).add(
            Counted(
                time=time.time(),
                clock_s=time.monotonic(),
                generation=generation,
                status=status,
                ready=ready,
                stats=stats,
            )
        )

    def _all_histories(self) -> list[History]:
        return [self._history_of(engine) for engine in self._engines.all]

    def _history_of(self, engine: ServedEngine) -> History:
        while len(self._histories) <= engine.number:
            self._histories.append(History())
        return self._histories[engine.number]

    async def _make_event(self) -> Event:
        since, self._told_until = self._told_until, time.time()
        events = [self._engine_event(engine, since) for engine in self._engines.all]
        engines = await asyncio.gather(*events)
        refused = await self.refused()
        return Event(
            time=round(self._told_until, 3),
            engines=engines,
            refused=[moment_view(one) for one in refused if one.until >= since],
        )

    async def _engine_event(self, engine: ServedEngine, since: float) -> EngineEvent:
        moments: list[Moment] = []
        if self._state(engine) == "serving":
            answer = await engine.link.ask_requests(AskRequests(0, limit=0), ANSWER_S)
            moments = answer.moments if answer is not None else []
        return EngineEvent(
            id=engine.number,
            state=self._state(engine),
            sample=self._history_of(engine).last,
            moments=[moment_view(one) for one in moments if one.until >= since],
        )

    def _give_history(self) -> bytes:
        return msgspec.json.encode([history.columns(1 << 20) for history in self._all_histories()])

    def _publish(self, event: bytes) -> None:
        self._event = event
        self._has_event.set()
        self._has_event = asyncio.Event()

    def _give_event(self) -> bytes:
        self._last_ask_at = time.monotonic()
        return self._event


def moment_view(moment: Moment) -> MomentView:
    """The moment with its words."""
    advice = advice_on(moment)
    return MomentView(**msgspec.structs.asdict(moment), words=advice.words, knobs=advice.knobs)
