"""The ASGI application in front of a server, without Ray: what arrives at the server, and what comes back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from minisgl.ray.forward import Forwarder

LIMIT_S = 10.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Call:
    """One call as an ASGI server makes it; `parts` are those of its body."""

    def __init__(
        self,
        path: str,
        *parts: bytes,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        query: bytes = b"",
        root: str = "",
    ) -> None:
        size = ((b"content-length", str(sum(map(len, parts))).encode()),) if parts else ()
        self.scope = {
            "type": "http",
            "method": "POST" if parts else "GET",
            "path": path,
            "raw_path": path.encode(),
            "root_path": root,
            "query_string": query,
            "headers": [(b"host", b"llm.example.org"), *size, *headers],
        }
        self._parts = list(parts)
        self.left = asyncio.Event()
        self.sent: list[Any] = []
        self.has_more = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.has_more.set()

    async def until(self, num_messages: int) -> None:
        while len(self.sent) < num_messages:
            self.has_more.clear()
            await asyncio.wait_for(self.has_more.wait(), LIMIT_S)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def with_server(handler: Handler, use: Callable[[Forwarder], Awaitable[None]]) -> None:
    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        forwarder = Forwarder(f"http://{host}:{port}")
        try:
            await asyncio.wait_for(use(forwarder), LIMIT_S)
        finally:
            await forwarder.close()
            await runner.cleanup()

    asyncio.run(run())


def test_a_call_arrives_as_it_was_sent_and_so_does_its_answer() -> None:
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        received = {name.lower(): value for name, value in request.headers.items()}
        seen.append((request.method, request.raw_path, received, await request.read()))
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", "mine"), "Retry-After": "3"}
        return web.Response(status=429, body=b"full", headers=headers)

    async def use(forwarder: Forwarder) -> None:
        headers = ((b"x-request-id", b"7"), (b"connection", b"close, X-Own"), (b"x-own", b"1"), (b"te", b"a"))
        call = Call("/v1/a%2Fb", b"one ", b"two", headers=headers, query=b"x=%20&y")
        await forwarder(call.scope, call.receive, call.send)
        assert seen[-1] == (
            "POST",
            "/v1/a%2Fb?x=%20&y",
            {"host": "llm.example.org", "content-length": "7", "x-request-id": "7"},
            b"one two",
        )
        start = call.sent[0]
        assert start["status"] == 429
        names = [name.lower() for name, _ in start["headers"]]
        assert (b"Retry-After", b"3") in start["headers"]
        assert not {b"x-request-id", b"date", b"server", b"connection"} & set(names)  # Ray Serve adds them
        assert call.body == b"full"
        call = Call("/prefix/health", root="/prefix")
        await forwarder(call.scope, call.receive, call.send)
        assert seen[-1][1] == "/health"
        assert (b"X-Request-Id", b"mine") in call.sent[0]["headers"]

    with_server(answer, use)


def test_events_come_one_by_one() -> None:
    go = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await go.wait()
        await response.write(b"data: 2\n\n")
        return response

    async def use(forwarder: Forwarder) -> None:
        call = Call("/stream", b"{}")
        running = asyncio.ensure_future(forwarder(call.scope, call.receive, call.send))
        await call.until(2)
        assert call.body == b"data: 1\n\n"
        go.set()
        await running
        assert call.body == b"data: 1\n\ndata: 2\n\n"
        assert call.sent[-1] == {"type": "http.response.body", "body": b""}

    with_server(answer, use)


@pytest.mark.parametrize("how", ["it leaves", "it is cancelled"])
def test_a_server_sees_that_its_client_has_left(how: str) -> None:
    gone = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: 1\n\n")
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    async def use(forwarder: Forwarder) -> None:
        call = Call("/stream", b"{}")
        running = asyncio.ensure_future(forwarder(call.scope, call.receive, call.send))
        await call.until(2)
        if how == "it leaves":
            call.left.set()
            await running
        else:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await gone.wait()

    with_server(answer, use)


def test_calls_wait_for_the_first_engine_and_questions_do_not() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=request.path.encode())

    async def use(forwarder: Forwarder) -> None:
        held = Forwarder(forwarder._url, most_held=1, hold_s=LIMIT_S)
        first, more, question = Call("/first", b"{}"), Call("/more", b"{}"), Call("/health")
        waiting = asyncio.ensure_future(held(first.scope, first.receive, first.send))
        await held(question.scope, question.receive, question.send)
        await held(more.scope, more.receive, more.send)  # one may wait, no more
        assert (question.body, more.body, first.sent) == (b"/health", b"/more", [])
        held.open()
        await waiting
        assert first.body == b"/first"
        impatient = Forwarder(forwarder._url, most_held=1, hold_s=0.01)
        late = Call("/late", b"{}")
        await impatient(late.scope, late.receive, late.send)
        assert late.body == b"/late"
        await held.close()
        await impatient.close()

    with_server(answer, use)


def test_an_answer_that_breaks_off_looks_broken() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def use(forwarder: Forwarder) -> None:
        call = Call("/stream", b"{}")
        with pytest.raises(Exception, match=r"payload|[Cc]onnection"):
            await forwarder(call.scope, call.receive, call.send)
        assert call.sent[-1].get("more_body")

    with_server(answer, use)


def test_without_a_server_the_client_gets_a_503() -> None:
    async def run() -> None:
        forwarder = Forwarder("http://127.0.0.1:1")
        call = Call("/v1/models")
        await forwarder(call.scope, call.receive, call.send)
        await forwarder.close()
        assert call.sent[0]["status"] == 503
        assert b'"code": "ingress"' in call.body

    asyncio.run(run())


def test_the_life_of_the_application_is_answered() -> None:
    async def run() -> None:
        forwarder = Forwarder("http://127.0.0.1:1")
        messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await forwarder({"type": "lifespan"}, receive, send)
        await forwarder.close()
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    asyncio.run(run())
