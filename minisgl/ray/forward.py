"""An ASGI application that hands each call to an HTTP server on this host, and its answer back as it comes.

Promise: method, path, query, headers and body arrive as they were sent, and so does the answer; nothing is
buffered. If the client leaves, the call to the server ends, so the server sees that. This module does not
import Ray.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import aiohttp
from yarl import URL

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HOP_BY_HOP = frozenset(
    b"connection expect keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade".split()
)
"""Headers of one connection, which no proxy forwards (RFC 9110, 7.6.1). Ray Serve's proxy answers Expect."""
ADDED_BY_RAY = frozenset({b"date", b"server"})
REQUEST_ID = b"x-request-id"
LARGEST_HEADER = 1 << 16
IDLE_S = 60.0
"""An idle connection is closed after this time. The server must keep it longer."""


class Forwarder:
    """The application. Create and use it in one event loop.

    Args:
        url: of the server, without a path.
        most_held: most POST calls that wait for `open`. Others get the server's answer at once.
        hold_s: how long each may wait.
    """

    def __init__(self, url: str, most_held: int = 0, hold_s: float = 0.0) -> None:
        self._url = url
        self._most_held = most_held
        self._hold_s = hold_s
        self._num_held = 0
        self._is_open = asyncio.Event()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            max_line_size=LARGEST_HEADER,
            max_field_size=LARGEST_HEADER,
        )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one call."""
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._forward(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    async def get(self, path: str, limit_s: float) -> tuple[int, bytes]:
        """Status and body of a call of our own.

        Raises:
            OSError, aiohttp.ClientError: the server does not answer.
            asyncio.TimeoutError: it has not answered after `limit_s` seconds.
        """
        async with self._session.get(
            self._url + path, timeout=aiohttp.ClientTimeout(total=limit_s)
        ) as answer:
            return answer.status, await answer.read()

    def open(self) -> None:
        """The server can answer: no call waits from now on."""
        self._is_open.set()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def _forward(self, scope: Message, receive: Receive, send: Send) -> None:
        body = _Body(receive)
        names = {name.lower() for name, _ in scope["headers"]}
        if names & {b"content-length", b"transfer-encoding"}:
            parts = body.parts()
        else:
            parts = None
            body.is_over.set()
        answering = asyncio.ensure_future(self._answer(scope, parts, send))
        leaving = asyncio.ensure_future(body.wait_for_client_to_leave())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            # Also if this call is cancelled, which is how Ray Serve says that the client has left.
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, scope: Message, body: AsyncIterator[bytes] | None, send: Send) -> None:
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in _forwarded_headers(scope)
        ]
        url = URL(self._url + _target(scope), encoded=True)
        if scope["method"] == "POST":
            await self._wait_until_open()
        has_begun = False
        try:
            async with self._session.request(
                scope["method"], url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                head = {"type": "http.response.start", "status": answer.status}
                await send({**head, "headers": _returned_headers(answer.raw_headers, scope)})
                has_begun = True
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError) as error:
            if has_begun:
                raise  # so that the client sees a broken answer, not a complete one
            await _refuse(send, f"the server behind this ingress does not answer: {error}")

    async def _wait_until_open(self) -> None:
        if self._num_held >= self._most_held or self._is_open.is_set():
            return
        self._num_held += 1
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_open.wait(), self._hold_s)
        finally:
            self._num_held -= 1


class _Body:
    """The rest of a call as its client sends it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False
        self.is_over = asyncio.Event()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body. Ends with an error if the client leaves before its end."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._has_left = True
                self.is_over.set()
                raise ConnectionResetError("the client has left")
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                self.is_over.set()
                return

    async def wait_for_client_to_leave(self) -> None:
        """Return when the client has left. It may do so after it has sent everything."""
        await self.is_over.wait()
        while not self._has_left:
            message = await self._receive()
            self._has_left = message["type"] == "http.disconnect"


def _forwarded_headers(scope: Message) -> list[tuple[bytes, bytes]]:
    """The call's headers, except those of the connection and those that its Connection header names."""
    named = {
        name.strip().lower()
        for header, value in scope["headers"]
        if header.lower() == b"connection"
        for name in value.split(b",")
    }
    return [(name, value) for name, value in scope["headers"] if name.lower() not in HOP_BY_HOP | named]


def _returned_headers(headers: Sequence[tuple[bytes, bytes]], scope: Message) -> list[tuple[bytes, bytes]]:
    """The answer's headers, except those of the connection and those that Ray Serve adds itself."""
    asked = dict(scope["headers"]).get(REQUEST_ID)  # Ray Serve makes one if the call has none
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in HOP_BY_HOP | ADDED_BY_RAY and (name.lower(), value) != (REQUEST_ID, asked)
    ]


def _target(scope: Message) -> str:
    """Path and query for the server: without the prefix of this application's route."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1").partition("?")[0]
    prefix = scope.get("root_path", "").rstrip("/")
    if prefix and path.startswith(prefix):
        path = path.removeprefix(prefix)
    query = scope.get("query_string", b"").decode("latin-1")
    return (path or "/") + (f"?{query}" if query else "")


async def _refuse(send: Send, reason: str) -> None:
    text = reason.replace("\\", " ").replace('"', "'").replace("\n", " ")
    body = f'{{"error": {{"message": "{text}", "type": "server_error", "param": null, "code": "ingress"}}}}'
    head = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": head})
    await send({"type": "http.response.body", "body": body.encode()})


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
