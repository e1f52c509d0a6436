"""The routes that say what the server does and why, as JSON and as a stream of events.

Promise: counts, times and ids only; no text and no tokens. With an admin key, all of them need it. An engine
that does not answer has an empty list and its state, not an error, so that a page can show that.
"""

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from minisgl import __version__
from minisgl.errors import RequestError
from minisgl.fields import convert_value
from minisgl.ipc.questions import AskRequests
from minisgl.lives import Life, LivesAnswer
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.http.middleware import json_answer, require_admin
from minisgl.server.http.routes import EVENTS, Answer, Route
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.processes.siblings import Siblings
from minisgl.server.streams import Streams
from minisgl.server.watch.clients import slow_clients
from minisgl.server.watch.history import CAPACITY
from minisgl.server.watch.refusals import Refusals
from minisgl.server.watch.ticker import INTERVAL_S, Ticker, moment_view
from minisgl.server.watch.views import (
    Aborted,
    ChosenSetting,
    EngineHistory,
    EngineMoments,
    EngineRequests,
    EnginesAnswer,
    EngineState,
    EngineView,
    HistoryAnswer,
    MomentsAnswer,
    RequestsAnswer,
    RequestView,
)
from minisgl.server.watch.waiting import waiting_lives
from minisgl.server.watch.words import SlowClient, causes_of

ANSWER_TIMEOUT_S = 5.0
MAX_LISTED = 1000
ASKED_AT_ONCE = 100
"""Requests in one answer of the engine, which its next step waits for (a millisecond)."""
WORDS_AT_ONCE = 50
"""Requests that get their words before other tasks run."""
CLIENTS_PATH = "/watch/clients"
WAITING_PATH = "/watch/waiting"
STATES = (
    "open",
    "waiting",
    "running",
    "restart",
    "grammar",
    "queued",
    "prompt",
    "decoding",
    "preempted",
    "ended",
)
ANSWER_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""What stands before a call's X-Request-Id in the ids of answers."""

Limit = Annotated[int, Meta(ge=0, le=MAX_LISTED)]
Seconds = Annotated[int, Meta(ge=1, le=CAPACITY)]


class Watch:
    """The request handlers.

    Args:
        rank: of this server process.
    """

    def __init__(
        self,
        model: ModelInUse,
        streams: Streams,
        engines: Engines,
        siblings: Siblings,
        refusals: Refusals,
        rank: int,
    ) -> None:
        self._model = model
        self._streams = streams
        self._engines = engines
        self._siblings = siblings
        self.ticker = Ticker(engines, siblings, refusals, rank, self._state)
        siblings.offer(WAITING_PATH, lambda: msgspec.json.encode([waiting_lives(one) for one in engines.all]))
        siblings.offer(CLIENTS_PATH, lambda: msgspec.json.encode(slow_clients(streams.open_streams)))

    def routes(self) -> list[Route]:
        """The routes."""
        states = {"name": "state", "in": "query", "schema": {"enum": list(STATES)}}
        limit = _query("limit", Limit, 100)
        after = {"name": "ended_after", "in": "query", "schema": {"type": "number", "minimum": 0}}
        one = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        list_summary = "The last requests: what each does, did and waited for."
        return [
            Route("GET", "/debug/engines", "What runs, and why.", self.engines, Answer("It.", EnginesAnswer)),
            Route(
                "GET",
                "/debug/requests",
                list_summary,
                self.requests,
                Answer("They.", RequestsAnswer),
                parameters=(states, limit, after),
            ),
            Route(
                "GET",
                "/debug/requests/{id}",
                "The requests of one call, in words.",
                self.request,
                Answer("They.", RequestsAnswer),
                parameters=(one,),
            ),
            Route(
                "POST",
                "/debug/requests/{id}/abort",
                "End a call.",
                self.abort,
                Answer("What was done.", Aborted),
                parameters=(one,),
            ),
            Route(
                "GET",
                "/debug/moments",
                "When the server was slow or refused calls, and why.",
                self.moments,
                Answer("They.", MomentsAnswer),
            ),
            Route(
                "GET",
                "/debug/history",
                "The figures of the last ten minutes.",
                self.history,
                Answer("They.", HistoryAnswer),
                parameters=(_query("seconds", Seconds, CAPACITY),),
            ),
            Route(
                "GET",
                "/debug/events",
                "The figures of each second, as they come.",
                self.events,
                Answer("Events named sample.", None, (EVENTS,)),
            ),
        ]

    async def engines(self, request: web.Request) -> web.Response:
        """GET /debug/engines."""
        require_admin(request, "/debug/engines")
        views = [await self._engine_view(engine) for engine in self._engines.all]
        return _json(
            EnginesAnswer(time=_now(), version=__version__, model=self._model.current.name, engines=views)
        )

    async def _engine_view(self, engine: ServedEngine) -> EngineView:
        ready, status = engine.last_ready, engine.link.status
        refusal = self._streams.refusal
        reason = None if refusal is None else str(refusal)
        if refusal is None and engine.is_restarting:
            reason = engine.restart_reason
        stages = {stage.name: stage.duration_ms for stage in engine.link.stages}
        return EngineView(
            id=engine.number,
            state=self._state(engine),
            reason=reason,
            pid=engine.pid,
            generation=engine.generation,
            restarts=engine.num_restarts,
            ended_lives=engine.ended,
            silent_s=round(engine.link.silent_s, 3),
            device=ready and ready.device,
            num_pages=ready and ready.num_pages,
            page_size=ready and ready.page_size,
            max_rows=ready and ready.max_rows,
            max_context_tokens=ready and ready.max_context_tokens,
            startup_ms=stages if ready is None else ready.startup_ms,
            choices=[] if ready is None else [ChosenSetting(*choice) for choice in ready.choices],
            settings=dataclasses.asdict(self._model.settings[1]),
            sample=await self.ticker.last_sample(engine.number),
            counters=None if status is None else msgspec.structs.asdict(status),
        )

    async def requests(self, request: web.Request) -> web.Response:
        """GET /debug/requests?state=&limit=&ended_after=."""
        require_admin(request, "/debug/requests")
        state = request.query.get("state", "")
        if state and state not in STATES:
            raise RequestError(400, "invalid_value", f"state must be one of {', '.join(STATES)}", "state")
        ended_after = _number(request, "ended_after", float, 0.0)
        limit = _number(request, "limit", Limit, 100)
        return await self._answer(AskRequests(0, state=state, limit=limit, ended_after=ended_after))

    async def request(self, request: web.Request) -> web.Response:
        """GET /debug/requests/{id}: by the call's X-Request-Id, its answer's id, or a request's number."""
        require_admin(request, "/debug/requests/{id}")
        name = request.match_info["id"]
        asked = await self._ask_all(AskRequests(0, id=call_id_of(name), limit=MAX_LISTED))
        if not _found(asked) and name.isascii() and name.isdigit() and len(name) < 18:
            asked = await self._ask_all(AskRequests(0, number=int(name), limit=1))
        if not _found(asked):
            message = f"no request of the call {name[:128]!r} is known; the last 1000 that ended are"
            raise RequestError(404, "not_found", message)
        return await self._told(asked)

    async def abort(self, request: web.Request) -> web.Response:
        """POST /debug/requests/{id}/abort: end a call, whose client gets an error as after POST /abort."""
        require_admin(request, "/debug/requests/{id}/abort")
        name = request.match_info["id"]
        aborted = await self._siblings.abort(call_id_of(name))
        if not aborted and name.isascii() and name.isdigit() and len(name) < 18:
            found = _found(await self._ask_all(AskRequests(0, number=int(name), limit=1)))
            if found and found[0].id:
                aborted = await self._siblings.abort(found[0].id)
        return _json(Aborted(aborted))

    async def moments(self, request: web.Request) -> web.Response:
        """GET /debug/moments."""
        require_admin(request, "/debug/moments")
        asked = await self._ask_all(AskRequests(0, limit=0))
        refused = [moment_view(one) for one in await self.ticker.refused()]
        engines = [
            EngineMoments(
                id=engine.number,
                state=self._state(engine),
                moments=[] if told is None else [moment_view(one) for one in told.moments],
            )
            for engine, told in zip(self._engines.all, asked, strict=False)
        ]
        return _json(MomentsAnswer(time=_now(), engines=engines, refused=refused))

    async def history(self, request: web.Request) -> web.Response:
        """GET /debug/history?seconds=N."""
        require_admin(request, "/debug/history")
        columns = await self.ticker.columns(_number(request, "seconds", Seconds, CAPACITY))
        engines = [
            EngineHistory(id=engine.number, state=self._state(engine), columns=own)
            for engine, own in zip(self._engines.all, columns, strict=False)
        ]
        return _json(HistoryAnswer(time=_now(), interval_s=INTERVAL_S, engines=engines))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /debug/events."""
        require_admin(request, "/debug/events")
        return await self.ticker.send_events(request)

    def _state(self, engine: ServedEngine) -> EngineState:
        if engine.is_restarting:
            return "restarting"
        if engine.link.died.done():
            return "dead"
        if not engine.link.ready.done():
            return "starting"
        refusal = self._streams.refusal
        if isinstance(refusal, RequestError) and refusal.code == "shutting_down":
            return "stopping"
        return "silent" if engine.link.silent_s > self._model.settings[0].heartbeat_timeout_s else "serving"

    async def _ask_all(self, which: AskRequests) -> list[LivesAnswer | None]:
        """See `_ask`; of each engine."""
        return await asyncio.gather(*[self._ask(engine, which) for engine in self._engines.all])

    async def _ask(self, engine: ServedEngine, which: AskRequests) -> LivesAnswer | None:
        """Ask an engine, or the server processes for what waits for it; None = nobody answers."""
        if engine.is_restarting:
            return await self._waiting(engine, which)
        if not engine.link.is_up:
            return None
        requests: dict[int, Life] = {}
        while True:
            limit = min(which.limit - len(requests), ASKED_AT_ONCE)
            part = msgspec.structs.replace(which, skip=len(requests), limit=limit)
            answer = await engine.link.ask_requests(part, ANSWER_TIMEOUT_S)
            if answer is None:
                return None
            known = len(requests)
            requests |= {life.number: life for life in answer.requests}
            if len(answer.requests) < limit or len(requests) in (known, which.limit):
                return msgspec.structs.replace(answer, requests=list(requests.values()))

    async def _waiting(self, engine: ServedEngine, which: AskRequests) -> LivesAnswer:
        """The requests that wait for an engine's next life, in all server processes."""
        answers = await self._siblings.ask_all(WAITING_PATH)
        parts = [msgspec.json.decode(answer, type=list[list[Life]]) for answer in answers]
        lives = [one for part in parts for one in part[engine.number]]
        lives.sort(key=lambda life: (life.arrived_at, life.number), reverse=True)
        found = [
            life
            for life in lives
            if which.state in ("", "open", "waiting")
            and (not which.id or life.id == which.id)
            and (which.number < 0 or life.number == which.number)
        ]
        return LivesAnswer(
            requests=found[which.skip : which.skip + which.limit],
            num_open=len(lives),
            num_ended=0,
            moments=[],
        )

    async def _answer(self, which: AskRequests) -> web.Response:
        return await self._told(await self._ask_all(which))

    async def _told(self, answers: Sequence[LivesAnswer | None]) -> web.Response:
        """The answer with words, which other tasks do not wait for."""
        clients = {one.id: one for one in await self._slow_clients()}
        engines = [
            await self._told_of(engine, asked, clients)
            for engine, asked in zip(self._engines.all, answers, strict=False)
        ]
        return _json(RequestsAnswer(time=_now(), engines=engines))

    async def _told_of(
        self, engine: ServedEngine, asked: LivesAnswer | None, clients: Mapping[str, SlowClient]
    ) -> EngineRequests:
        asked = asked or LivesAnswer(requests=[], num_open=0, num_ended=0, moments=[])
        views: list[RequestView] = []
        for place, life in enumerate(asked.requests):
            views.append(_view(life, clients.get(life.id)))
            if place % WORDS_AT_ONCE == WORDS_AT_ONCE - 1:
                await asyncio.sleep(0)
        return EngineRequests(
            id=engine.number,
            state=self._state(engine),
            num_open=asked.num_open,
            num_ended=asked.num_ended,
            requests=views,
        )

    async def _slow_clients(self) -> Sequence[SlowClient]:
        answers = await self._siblings.ask_all(CLIENTS_PATH)
        return [one for answer in answers for one in msgspec.json.decode(answer, type=list[SlowClient])]


def _found(answers: Sequence[LivesAnswer | None]) -> list[Life]:
    return [life for answer in answers if answer is not None for life in answer.requests]


def call_id_of(name: str) -> str:
    """A call's X-Request-Id, from it or from the id of its answer."""
    for prefix in ANSWER_ID_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _view(life: Life, client: SlowClient | None) -> RequestView:
    causes = causes_of(life, client)
    fields = {name: getattr(life, name) for name in Life.__struct_fields__}
    return RequestView(**fields, why=causes[0].words if causes else "", causes=causes, client=client)


def _json(answer: msgspec.Struct) -> web.Response:
    return json_answer(msgspec.json.encode(answer))


def _now() -> float:
    return round(time.time(), 3)


def _query(name: str, kind: Any, default: int) -> dict[str, Any]:
    """OpenAPI's object of a query parameter that is a whole number."""
    return {"name": name, "in": "query", "schema": msgspec.json.schema(kind) | {"default": default}}


def _number(request: web.Request, name: str, kind: Any, default: Any) -> Any:
    """A number in the query.

    Raises:
        RequestError: 400 that names it.
    """
    text = request.query.get(name)
    if text is None:
        return default
    is_plain = text.isascii() and text.replace(".", "", 1).isdigit() and len(text) < 24
    if kind is float:
        if not is_plain:
            raise RequestError(
                400, "invalid_type", f"{name} must be a number of seconds, got {text[:60]!r}", name
            )
        return float(text)
    return convert_value(int(text) if is_plain and text.isdigit() and len(text) < 10 else text, kind, name)
