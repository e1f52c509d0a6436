"""The routes for operators: health, statistics, aborting calls, the prefix cache.

Promise: statistics are summed over all server processes, and the engine is asked for its own at each call. An
unknown value is null, never zero.
"""

import asyncio
import dataclasses
from typing import Any

import msgspec
from aiohttp import web

from minisgl import __version__
from minisgl.errors import EngineDeadError, RequestError
from minisgl.ipc.questions import Status
from minisgl.server.apis import chat, completions
from minisgl.server.engines.engine_link import EngineLink
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.http.bodies import Body, Condition, FieldIs, given, missing
from minisgl.server.http.middleware import facts_of, json_answer, require_admin
from minisgl.server.http.routes import TEXT, Answer, Route
from minisgl.server.http.uploads import Uploads
from minisgl.server.metrics import CONTENT_TYPE, EngineFigures, exposition
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.processes.siblings import Siblings
from minisgl.server.stats import total
from minisgl.server.streams import Streams

STATUS_TIMEOUT_S = 2.0
"""How long to wait for the engine's status. It answers between two steps."""
ANSWER_TIMEOUT_S = 5.0
"""How long /health/ready and /flush_cache wait for the engine."""


class AbortFields(msgspec.Struct, frozen=True):
    """POST /abort: either `request_id` (alias `rid`) or `abort_all`."""

    request_id: str | None = None
    """The X-Request-Id of the call, or the id of its answer."""
    rid: str | None = None
    abort_all: bool | None = None


ABORT = Body(
    "AbortBody",
    (AbortFields,),
    (
        Condition(
            "request_id",
            "give request_id or abort_all: true",
            (given("request_id"), given("rid"), FieldIs("abort_all", (True,))),
        ),
        Condition(
            "rid", "rid is request_id by another name; give one", (missing("request_id"), missing("rid"))
        ),
        *(
            Condition(
                name,
                f"give {name} or abort_all, not both",
                (missing(name), FieldIs("abort_all", (None, False))),
            )
            for name in ("request_id", "rid")
        ),
    ),
)


class Admin:
    """The request handlers.

    Args:
        uploads: reads request bodies.
    """

    def __init__(
        self,
        model: ModelInUse,
        streams: Streams,
        engines: Engines,
        siblings: Siblings,
        uploads: Uploads,
    ) -> None:
        self._model = model
        self._streams = streams
        self._engines = engines
        self._siblings = siblings
        self._uploads = uploads

    def routes(self) -> list[Route]:
        """The operators' routes."""
        facts, done = Answer("It."), Answer("What was done.")
        return [
            Route(
                "GET",
                "/health",
                "200 while the engine is ready and alive, or is started again, else 503.",
                self.health,
                facts,
                has_503=True,
            ),
            Route(
                "GET",
                "/health/ready",
                "200 when a request would be taken now and the engine answers, else 503.",
                self.ready,
                facts,
                has_503=True,
            ),
            Route("GET", "/version", "minisgl's version.", self.version, facts),
            Route("GET", "/server_info", "Settings, and what is held and was counted.", self.info, facts),
            Route("GET", "/load", "How busy the server is.", self.load, facts),
            Route("GET", "/metrics", "Figures for Prometheus.", self.metrics, Answer("It.", None, (TEXT,))),
            Route("POST", "/abort", "End open calls.", self.abort, done, ABORT),
            Route("POST", "/flush_cache", "Drop the prefix cache.", self.flush_cache, done),
        ]

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 only while the engine is ready and alive, or is started again.

        A restart is no reason to end the server, whose open answers go on after it.
        """
        reason = self._unavailable_reason()
        is_restarting = self._engines.restart_reason is not None or bool(self._model.held_because)
        is_well = reason is None or (is_restarting and self._streams.refusal is None)
        status = "ok" if reason is None else "restarting" if is_well else "unavailable"
        stats = self._streams.stats
        facts = {
            "status": status,
            "reason": reason,
            "open_requests": stats.num_open_requests,
            "running_requests": stats.num_running_requests,
            "held_calls": self._model.num_waiting,
            "engine_pid": self._engines.first.pid,
            "engine_restarts": self._engines.num_restarts,
            "engine_silent_s": round(self._engines.silent_s, 3),
            "engine": self._link.status and msgspec.structs.asdict(self._link.status),
            "engines": [_facts_of(engine, engine.link.status) for engine in self._engines.all],
        }
        return _json(facts, 200 if is_well else 503)

    async def ready(self, _: web.Request) -> web.Response:
        """GET /health/ready: 200 if a request would be accepted now and an engine answers."""
        reason = self._unavailable_reason()
        if reason is None and not await self._any_answers():
            reason = f"the engine did not answer within {ANSWER_TIMEOUT_S:g} s"
        return _json({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    async def version(self, _: web.Request) -> web.Response:
        """GET /version."""
        return _json({"version": __version__})

    async def info(self, _: web.Request) -> web.Response:
        """GET /server_info: the engine's status, statistics, and all settings except keys."""
        statuses = await self._fresh_statuses()
        parts = await self._siblings.stats()
        ready, status = self._engines.first.last_ready, statuses[0]
        model = self._model.current
        server, engine = self._model.settings
        settings = dataclasses.asdict(server)
        for name in ("api_key", "admin_key"):
            settings[name] = f"{len(settings[name])} given"
        return _json(
            {
                "version": __version__,
                "model": model.name,
                "reply_format": model.format_facts,
                "max_model_len": self._streams.max_context_tokens or None,
                "engine_pid": self._engines.first.pid,
                "engine_restarts": self._engines.num_restarts,
                "engine": status and msgspec.structs.asdict(status),
                "start": ready and msgspec.structs.asdict(ready),
                "engines": [
                    _facts_of(one, status) for one, status in zip(self._engines.all, statuses, strict=False)
                ],
                "server": msgspec.to_builtins(total(parts)),
                "processes": [
                    {
                        "open_requests": part.num_open_requests,
                        "running_requests": part.num_running_requests,
                        "output_tokens": part.num_output_tokens,
                    }
                    for part in parts
                ],
                "server_settings": settings,
                "engine_settings": dataclasses.asdict(engine),
            }
        )

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics, for Prometheus."""
        statuses = await self._fresh_statuses()
        figures = [
            EngineFigures(status, engine.last_ready, engine.num_restarts, engine.is_up)
            for engine, status in zip(self._engines.all, statuses, strict=False)
        ]
        text = exposition(self._model.current.name, total(await self._siblings.stats()), figures)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def load(self, _: web.Request) -> web.Response:
        """GET /load: how busy the server is, for load balancers."""
        statuses = [status for status in await self._fresh_statuses() if status is not None]
        whole = total(await self._siblings.stats())
        num_pages = sum(engine.last_ready.num_pages for engine in self._engines.up if engine.last_ready)
        return _json(
            {
                "server_load": whole.num_open_requests,
                "max_load": self._model.settings[0].max_queued_requests,
                "queued_tokens": whole.num_queued_tokens,
                "running": sum(one.num_running for one in statuses) if statuses else None,
                "waiting": sum(one.num_waiting for one in statuses) if statuses else None,
                "kv_cache_usage": sum(one.num_held_pages for one in statuses) / num_pages
                if statuses and num_pages
                else None,
            }
        )

    async def abort(self, request: web.Request) -> web.Response:
        """POST /abort: end open calls. Their clients get an error.

        If the server has admin keys, a caller without one may only abort calls of its own API key. Calls of
        other keys count as not found.
        """
        async with self._uploads.body(request) as data:
            body: AbortFields = ABORT.read(data)[0]
        name = body.request_id if body.request_id is not None else body.rid
        if name is not None:
            name = name.removeprefix(chat.ID_PREFIX).removeprefix(completions.ID_PREFIX)
        caller = facts_of(request).caller
        if name is None:
            require_admin(request, "abort_all", "abort_all")
        elif caller.key is None:
            require_admin(request, "aborting a call, where callers have no API keys that tell them apart,")
        return _json({"aborted": await self._siblings.abort(name, None if caller.is_admin else caller.key)})

    async def flush_cache(self, request: web.Request) -> web.Response:
        """POST /flush_cache: drop the prefix cache, except pages that running requests use."""
        require_admin(request, "/flush_cache")
        engines = self._engines.up
        if not engines:
            raise RequestError(503, "loading", self._unavailable_reason() or "the engine is not running")
        self._engines.forget_caches()
        freed = await asyncio.gather(*[engine.link.flush_cache(ANSWER_TIMEOUT_S) for engine in engines])
        for engine, num_pages in zip(engines, freed, strict=True):
            if num_pages is None:
                raise EngineDeadError(f"{engine.name} did not answer within {ANSWER_TIMEOUT_S:g} s")
        return _json({"freed_pages": sum(num_pages or 0 for num_pages in freed)})

    @property
    def _link(self) -> EngineLink:
        return self._engines.first.link

    def _unavailable_reason(self) -> str | None:
        """Why requests are refused, or wait for an engine; None = they are taken."""
        if self._streams.refusal is not None:
            return str(self._streams.refusal)
        if self._model.held_because:
            return self._model.held_because
        if self._engines.restart_reason is not None:
            return self._engines.restart_reason
        if self._engines.silent_s > self._model.settings[0].heartbeat_timeout_s:
            return f"the engine has been silent for {self._engines.silent_s:.1f} s"
        return None

    async def _any_answers(self) -> bool:
        """Whether an engine answers; returns as soon as one does."""
        questions = [engine.link.ask_status(ANSWER_TIMEOUT_S) for engine in self._engines.up]
        for answer in asyncio.as_completed(questions):
            if await answer is not None:
                return True
        return False

    async def _fresh_statuses(self) -> list[Status | None]:
        """What each engine says of itself now; None = it is down or does not answer."""

        async def ask(engine: ServedEngine) -> Status | None:
            return await engine.link.ask_status(STATUS_TIMEOUT_S) if engine.is_up else None

        return await asyncio.gather(*[ask(engine) for engine in self._engines.all])


def _facts_of(engine: ServedEngine, status: Status | None) -> dict[str, Any]:
    """What is told of one engine."""
    return {
        "id": engine.number,
        "up": engine.is_up,
        "pid": engine.pid,
        "restarts": engine.num_restarts,
        "silent_s": round(engine.link.silent_s, 3),
        "status": status and msgspec.structs.asdict(status),
    }


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    return json_answer(msgspec.json.encode(content), status)
