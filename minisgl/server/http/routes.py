"""A route: its path, its handler, and what OpenAPI's document says of it."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

from aiohttp import HttpVersion11, web

from minisgl.server.http.bodies import Body
from minisgl.server.http.errors import OPENAI, ErrorFormat, Fault, error_body
from minisgl.server.http.middleware import json_answer

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"


class Answer(NamedTuple):
    """An answer of a route."""

    description: str
    kind: type[Any] | None = None
    """The struct of its JSON; None = an object with any fields."""
    media_types: tuple[str, ...] = (JSON,)
    or_list: bool = False
    """Some answers are a list of `kind`."""


class Route(NamedTuple):
    """One route."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    answer: Answer
    body: Body | None = None
    parameters: tuple[Mapping[str, Any], ...] = ()
    """OpenAPI's parameter objects of the path and the query."""
    has_503: bool = False
    """A status of 503 has an answer of the same kind, not an error object."""
    errors: ErrorFormat = OPENAI

    def add_to(self, app: web.Application) -> None:
        """Add the route to `app`."""
        # aiohttp's default pattern for {name} takes no slash, which a model's name may hold.
        path = self.path.replace("{model}", "{model:.+}")
        if self.method == "GET":
            app.router.add_get(path, self.handler)
        else:
            app.router.add_post(path, self.handler, expect_handler=_expect)


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Handle the Expect header. aiohttp calls this before the handler and outside the middleware."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # as aiohttp does: no part of the answer has been sent
        return None
    return json_answer(error_body(Fault(417, "expectation_failed", "Expect may only be 100-continue")), 417)
