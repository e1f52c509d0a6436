"""POST /reload in every server process, and the queue from there to the reloader in the first one.

Promise: one reload runs at a time; another one is refused by name. A caller that leaves does not stop it.
"""

import asyncio
import logging
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from minisgl.errors import ConfigError, EngineDeadError, MinisglError, ModelError, RequestError
from minisgl.server.http.errors import Fault, error_body, fault_of
from minisgl.server.http.middleware import facts_of, json_answer
from minisgl.server.http.routes import Answer, Route
from minisgl.server.http.uploads import Uploads
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.processes.siblings import Siblings
from minisgl.server.reload.changes import RELOAD

log = logging.getLogger(__name__)

PATH = "/reload"


class ReloadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload did."""

    model: str
    """The name of the model that is served now."""
    beside: bool
    """The new engines started while the old ones still ran."""
    streams: str
    """What became of open answers: "moved" (on to the new engines) or "finished" (in the old ones)."""
    num_streams: int
    """How many open requests there were."""
    engines: list[dict[str, int]]
    """`id` and `pid` of each engine."""
    seconds: float


class Outcome(msgspec.Struct, frozen=True):
    """What the first process answers to the process that got the call."""

    status: int
    body: str
    """JSON: a `ReloadAnswer` or an error object."""


class PendingReload(NamedTuple):
    """A reload that a caller waits for."""

    fields: Any
    """A `changes.ReloadFields`."""
    answer: asyncio.Future[ReloadAnswer]


class Reloads:
    """The reloads that callers want. The reloader in the first process takes them. Used in one event loop."""

    def __init__(self) -> None:
        self._pending: asyncio.Queue[PendingReload] = asyncio.Queue()
        self._is_busy = False

    async def ask(self, body: bytes) -> bytes:
        """Have a reload done; returns its `Outcome` as JSON. A cancellation does not stop the reload."""
        try:
            fields = RELOAD.read(body)[0]
            if self._is_busy:
                raise RequestError(
                    409, "reload_in_progress", "another reload is in progress; try again when it has ended"
                )
            self._is_busy = True
            answer: asyncio.Future[ReloadAnswer] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(lambda _: self._end(answer))
            self._pending.put_nowait(PendingReload(fields, answer))
            result = await asyncio.shield(answer)
        except Exception as error:
            fault = _fault(error)
            return msgspec.json.encode(Outcome(fault.status, error_body(fault).decode()))
        return msgspec.json.encode(Outcome(200, msgspec.json.encode(result).decode()))

    async def next(self) -> PendingReload:
        """The next reload; waits for one."""
        return await self._pending.get()

    def _end(self, answer: asyncio.Future[ReloadAnswer]) -> None:
        self._is_busy = False
        if not answer.cancelled():
            answer.exception()  # marks it as read, since the caller may have left


class ReloadApi:
    """The request handler."""

    def __init__(self, model: ModelInUse, siblings: Siblings, uploads: Uploads, reloads: Reloads) -> None:
        self._model = model
        self._siblings = siblings
        self._uploads = uploads
        siblings.offer_work(PATH, reloads.ask)

    def routes(self) -> list[Route]:
        """The route."""
        summary = "Give the engines other settings or another model, without refusing a call."
        return [Route("POST", PATH, summary, self.reload, Answer("What was done.", ReloadAnswer), RELOAD)]

    async def reload(self, request: web.Request) -> web.Response:
        """POST /reload. It can name files and code, so it needs an admin key."""
        server = self._model.settings[0]
        caller = facts_of(request).caller
        has_admin_key = bool(server.admin_key) or (caller.user is not None and caller.user.is_admin)
        if not caller.is_admin or not has_admin_key:
            raise RequestError(
                403,
                "admin_key_required",
                "/reload needs the server's admin key; "
                + (
                    "send it as 'Authorization: Bearer KEY'"
                    if server.admin_key
                    else "this server has none: start it with --admin-key"
                ),
            )
        async with self._uploads.body(request) as body:
            if server.engine_listen is not None:
                raise RequestError(
                    409,
                    "not_possible",
                    "the engines of --engine-listen are not the server's: stop and start them one after the "
                    "other, and their streams go on in the others",
                )
            outcome_json = await self._siblings.have_first(PATH, body or b"{}")
        if outcome_json is None:
            raise EngineDeadError("the first server process does not answer")
        outcome = msgspec.json.decode(outcome_json, type=Outcome)
        return json_answer(outcome.body.encode(), outcome.status)


def _fault(error: Exception) -> Fault:
    if isinstance(error, ConfigError | ModelError):
        return Fault(400, "reload_refused", str(error))
    if isinstance(error, EngineDeadError):
        return Fault(500, "reload_failed", str(error))
    if not isinstance(error, MinisglError):
        log.error("a reload failed in the server", exc_info=error)
    return fault_of(error)
