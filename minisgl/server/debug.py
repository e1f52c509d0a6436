"""Looking inside a running engine over HTTP: its last steps, and torch's profiler on demand.

Promise: what comes out holds counts and times, no text and no token; files are written by the engine only,
into the folder that its operator named.
"""

from aiohttp import web

from minisgl.errors import EngineDeadError, RequestError
from minisgl.fields import checked
from minisgl.messages import DebugAnswer, ProfiledSteps
from minisgl.server.engine_link import EngineLink

LIMIT_S = 10.0
"""How long the engine may take to answer."""


class Debug:
    """The handlers."""

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    def add_routes(self, app: web.Application) -> None:
        """GET /debug/timeline and POST /debug/profile."""
        app.router.add_get("/debug/timeline", self.timeline)
        app.router.add_post("/debug/profile", self.profile)

    async def timeline(self, _: web.Request) -> web.Response:
        """GET /debug/timeline: the last steps in Chrome's trace format."""
        self._check_engine()
        answer = _answered(await self._link.ask_timeline(LIMIT_S))
        return web.Response(body=answer.body, content_type="application/json")

    async def profile(self, request: web.Request) -> web.Response:
        """POST /debug/profile?steps=N: have the next N steps profiled; says in which file."""
        text = request.query.get("steps", "20")
        is_number = text.isascii() and text.isdigit() and len(text) < 10
        num_steps: int = checked(int(text) if is_number else text, ProfiledSteps, "steps")
        self._check_engine()
        answer = _answered(await self._link.ask_profile(num_steps, LIMIT_S))
        if answer.error:
            raise RequestError(409, "not_possible", answer.error)
        return web.json_response({"steps": num_steps, "file": answer.body.decode()})

    def _check_engine(self) -> None:
        if not self._link.ready.done() or self._link.died.done():
            raise RequestError(503, "loading", "the engine is not running")


def _answered(answer: DebugAnswer | None) -> DebugAnswer:
    if answer is None:
        raise EngineDeadError(f"the engine did not answer within {LIMIT_S:g} s")
    return answer
