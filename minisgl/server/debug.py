"""Debug routes: a timeline of the engine's last steps, and torch's profiler on demand.

Promise: answers hold counts and times, but no text and no tokens. Only the engine writes files, and only into
the folder that its operator named.
"""

import msgspec
from aiohttp import web

from minisgl.errors import EngineDeadError, RequestError
from minisgl.fields import convert_value
from minisgl.ipc.questions import DebugAnswer, ProfiledSteps
from minisgl.server.engines.engines import Engines
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
        self._check_engine()
        answer = _answered(await self._engines.first.link.ask_timeline(ANSWER_TIMEOUT_S))
        return web.Response(body=answer.body, content_type="application/json")

    async def profile(self, request: web.Request) -> web.Response:
        """POST /debug/profile?steps=N: profile the next N steps; the answer names the file."""
        require_admin(request, "/debug/profile")
        text = request.query.get("steps", "20")
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        num_steps: int = convert_value(int(text) if is_number else text, ProfiledSteps, "steps")
        self._check_engine()
        answer = _answered(await self._engines.first.link.ask_profile(num_steps, ANSWER_TIMEOUT_S))
        if answer.error:
            raise RequestError(409, "not_possible", answer.error)
        return web.json_response({"steps": num_steps, "file": answer.body.decode()})

    def _check_engine(self) -> None:
        if not self._engines.first.is_up:
            raise RequestError(503, "loading", "the engine is not running")


def _answered(answer: DebugAnswer | None) -> DebugAnswer:
    if answer is None:
        raise EngineDeadError(f"the engine did not answer within {ANSWER_TIMEOUT_S:g} s")
    return answer
