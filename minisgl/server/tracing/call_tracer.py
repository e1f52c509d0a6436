"""Collects the calls that have ended, asks the engine for the lives of their requests, and has spans made.

Promise: a call waits for none of this. It takes one list entry when it ends; the rest is done a little later,
for several calls at once. Beyond `MAX_PENDING` calls, spans are dropped.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from minisgl.errors import ConfigError
from minisgl.ipc.questions import AskRequests
from minisgl.lives import Life
from minisgl.server.engines.engines import Engines
from minisgl.server.http.middleware import CallFacts
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.tracing.spans import OPERATIONS, EndedCall, span_of_call, spans_of_life

if TYPE_CHECKING:
    from minisgl.server.tracing.export import OpenSpan, SpanExport

log = logging.getLogger(__name__)

MAX_PENDING = 4096
"""Calls that wait for their spans, about 1 KB each."""
INTERVAL_S = 0.25
"""How long calls are collected before the engine is asked."""
SETTLE_S = 0.2
"""When the engine is asked again for requests that it has yet to abort."""
MAX_ASKED = 64
"""Requests in a question to the engine, which takes it 2 ms at most."""
ANSWER_TIMEOUT_S = 2.0
LAST_SPANS_S = 2.0
"""How long engine and collector have for the last spans when the server stops."""
MAX_HEADER = 1024
"""Longer headers are no trace context."""


def load_export() -> "type[SpanExport]":
    """Import OpenTelemetry.

    Raises:
        ConfigError: its packages are not installed.
    """
    try:
        from minisgl.server.tracing.export import SpanExport
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs OpenTelemetry's packages ({error}); "
            "install them with: pip install 'minisgl[otel]'"
        ) from None
    return SpanExport


def open_tracer(endpoint: str | None, model: ModelInUse, engines: Engines, rank: int) -> "CallTracer | None":
    """The tracer of a server process of this rank; None without an endpoint.

    Raises:
        ConfigError: the packages for it are not installed.
    """
    return None if endpoint is None else CallTracer(model, engines, load_export()(endpoint, rank))


class CallTracer:
    """Gets every ended call, and has spans made of those that generate text."""

    def __init__(self, model: ModelInUse, engines: Engines, export: "SpanExport") -> None:
        self._model = model
        self._engines = engines
        self._export = export
        self._pending: deque[EndedCall] = deque()
        self._has_pending = asyncio.Event()
        self._has_dropped = False
        self._sending = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Make spans from now on."""
        self._task = asyncio.ensure_future(self._run())

    def ended(self, request: web.Request, facts: CallFacts, status: int) -> None:
        """Take in a call that has ended."""
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        if route not in OPERATIONS:
            return
        if len(self._pending) >= MAX_PENDING:
            if not self._has_dropped:
                self._has_dropped = True
                log.warning("calls end faster than spans are made; some calls have none")
            return
        now_s = time.time()
        headers = {name: request.headers.get(name, "") for name in ("traceparent", "tracestate")}
        self._pending.append(
            EndedCall(
                route=route,
                method=request.method,
                model=self._model.current.name,
                request_id=facts.request_id,
                status=status,
                error_code=facts.error_code,
                began_s=now_s - (time.monotonic() - facts.arrived_at),
                ended_s=now_s,
                first_token_s=facts.first_token_s,
                is_streamed=facts.is_streamed,
                num_prompt_tokens=facts.num_prompt_tokens,
                num_cached_tokens=facts.num_cached_tokens,
                num_output_tokens=facts.num_output_tokens,
                finish_reasons=facts.finish_reasons,
                numbers=facts.request_numbers,
                parent={name: value for name, value in headers.items() if 0 < len(value) <= MAX_HEADER},
            )
        )
        self._has_pending.set()

    async def send_pending(self) -> None:
        """Make the spans of all calls that have ended so far."""
        async with self._sending:
            while self._pending:
                await self._send(self._next_calls())

    async def close(self) -> None:
        """Make the last spans and send them, within a limited time."""
        end_s = time.monotonic() + LAST_SPANS_S
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.send_pending(), LAST_SPANS_S)
        if self._task is not None:
            self._task.cancel()
        await asyncio.to_thread(self._export.close, max(0.0, end_s - time.monotonic()))

    async def _run(self) -> None:
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.send_pending()
            except Exception:
                log.exception("spans can't be made")

    def _next_calls(self) -> list[EndedCall]:
        """Calls with `MAX_ASKED` requests that get spans, or a few more."""
        calls: list[EndedCall] = []
        num_asked = 0
        while self._pending and num_asked < MAX_ASKED:
            calls.append(self._pending.popleft())
            num_asked += max(1, len(calls[-1].told_numbers))
        return calls

    async def _send(self, calls: Sequence[EndedCall]) -> None:
        open_spans: list[tuple[EndedCall, OpenSpan]] = []
        for call in calls:
            span = self._export.begin(span_of_call(call), call.parent)
            if span is not None:
                open_spans.append((call, span))
            await asyncio.sleep(0)
        lives = await self._lives([number for call, _ in open_spans for number in call.told_numbers])
        unsettled = [number for number, life in lives.items() if life.end is None]
        if unsettled:
            await asyncio.sleep(SETTLE_S)
            lives |= await self._lives(unsettled)
        for call, span in open_spans:
            found = [(choice, lives.get(number)) for choice, number in enumerate(call.told_numbers)]
            children = [spans_of_life(life, choice) for choice, life in found if life is not None]
            self._export.end(span, [one for own in children for one in own])
            await asyncio.sleep(0)

    async def _lives(self, numbers: Sequence[int]) -> dict[int, Life]:
        """The lives of these requests, as far as an engine still knows them."""
        if not numbers:
            return {}
        question = AskRequests(0, numbers=tuple(numbers), limit=len(numbers))
        answers = await asyncio.gather(
            *[engine.link.ask_requests(question, ANSWER_TIMEOUT_S) for engine in self._engines.up]
        )
        return {life.number: life for answer in answers if answer is not None for life in answer.requests}
