"""Debug routes: a timeline of the engine's last steps, and torch's profiler on demand.

Promise: answers hold counts and times, but no text and no tokens. Only the engine writes files, and only into
the folder that its operator named.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from minisgl.errors import EngineDeadError, RequestError
from minisgl.fields import convert_value
from minisgl.ipc.questions import DebugAnswer, ProfiledSteps
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.http.middleware import require_admin
from minisgl.server.http.routes import Answer, Route

ANSWER_TIMEOUT_S = 10.0
"""How long to wait for the engine's answer."""


class Debug:
    """The request handlers."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def routes(self) -> list[Route]:
        """The debug routes."""
        steps = {
            "name": "steps",
            "in": "query",
            "schema": msgspec.json.schema(ProfiledSteps) | {"default": 20},
        }
        timeline = "The engine's last steps in Chrome's trace format."
        profile = "Have torch's profiler watch the next steps."
        return [
            Route("GET", "/debug/timeline", timeline, self.timeline, Answer("The trace.")),
            Route("POST", "/debug/profile", profile, self.profile, Answer("The file."), parameters=(steps,)),
        ]

    async def timeline(self, request: web.Request) -> web.Response:
        """GET /debug/timeline: the last steps in Chrome's trace format."""
        require_admin(request, "/debug/timeline")
        engines = self._running()
        answers = await asyncio.gather(*[one.link.ask_timeline(ANSWER_TIMEOUT_S) for one in engines])
        traces = [_answered(answer).body for answer in answers]
        body = traces[0] if len(self._engines.all) == 1 else merged([one.name for one in engines], traces)
        return web.Response(body=body, content_type="application/json")

    async def profile(self, request: web.Request) -> web.Response:
        """POST /debug/profile?steps=N: profile the next N steps of each engine."""
        require_admin(request, "/debug/profile")
        text = request.query.get("steps", "20")
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        num_steps: int = convert_value(int(text) if is_number else text, ProfiledSteps, "steps")
        asked = [one.link.ask_profile(num_steps, ANSWER_TIMEOUT_S) for one in self._running()]
        answers = [_answered(answer) for answer in await asyncio.gather(*asked)]
        files = [answer.body.decode() for answer in answers if not answer.error]
        if not files:
            raise RequestError(409, "not_possible", answers[0].error)
        more = {"files": files} if len(self._engines.all) > 1 else {}
        return web.json_response({"steps": num_steps, "file": files[0], **more})

    def _running(self) -> list[ServedEngine]:
        if not self._engines.up:
            raise RequestError(503, "loading", "the engine is not running")
        return self._engines.up


def merged(names: Sequence[str], traces: Sequence[bytes]) -> bytes:
    """One trace of those of several engines: a process of each in the viewer, with its name."""
    events: list[dict[str, Any]] = []
    for place, (name, trace) in enumerate(zip(names, traces, strict=True), start=1):
        for event in msgspec.json.decode(trace)["traceEvents"]:
            event["pid"] = place
            if event["name"] == "process_name":
                event["args"] = {"name": f"minisgl {name}"}
            events.append(event)
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _answered(answer: DebugAnswer | None) -> DebugAnswer:
    if answer is None:
        raise EngineDeadError(f"the engine did not answer within {ANSWER_TIMEOUT_S:g} s")
    return answer
