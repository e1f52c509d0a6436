"""Accepts connections from a listening socket, as fast as `Connections` allows.

Promise: when the process or the system runs out of file descriptors, the listener waits and logs one line per
minute. (asyncio's own servers retry once per backlog entry and log each failure.) What aiohttp refuses before
any handler runs, such as a bad header, gets OpenAI's error object and a request id like any other refusal.
"""

import asyncio
import itertools
import socket
import ssl
import uuid
from collections.abc import Callable

from aiohttp import web

from minisgl.server.http.connections import Connections
from minisgl.server.http.errors import Fault, error_body, fault_of
from minisgl.server.http.middleware import json_answer

BATCH = 128
"""Connections accepted in a row before other tasks get to run."""
RETRY_S = 0.2
MAX_REASON_CHARS = 200


class HttpProtocol(web.RequestHandler):
    """aiohttp's protocol object for a connection, with JSON instead of plain text for its own errors."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer where aiohttp could not parse a request, or the middleware itself failed."""
        super().handle_error(request, status, exc, message)  # logs; raises if an answer has begun
        if status < 500:
            reason = " ".join((message or "").split())[:MAX_REASON_CHARS].rstrip(" ^")
            body = error_body(Fault(status, "invalid_http", f"the request can't be read: {reason}"))
        else:
            body = error_body(fault_of(Exception()))  # no details
        answer = json_answer(body, status, {"X-Request-Id": uuid.uuid4().hex})
        answer.force_close()
        return answer


class Listener:
    """Accepts connections until `close`. Create and close it in one event loop.

    Args:
        sock: a listening socket; `close` closes it.
        make_http: creates aiohttp's protocol object for a connection.
        handshake_s: limit on a TLS handshake.
    """

    def __init__(
        self,
        sock: socket.socket,
        connections: Connections,
        make_http: Callable[[], web.RequestHandler],
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._connections = connections
        self._make_http = make_http
        self._tls = tls
        self._handshake_s = handshake_s
        self._opening: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.ensure_future(self._accept_all())

    async def close(self) -> None:
        """Stop accepting connections and close the socket."""
        tasks = {self._accepting, *self._opening}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._sock.close()

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            await self._connections.wait_for_room()
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except ConnectionAbortedError:
                continue  # the client left before its connection was accepted
            except OSError as error:
                self._connections.handle_shortage(f"a connection can't be taken ({error.strerror or error})")
                await asyncio.sleep(RETRY_S)
                continue
            http = self._make_http()
            http.__class__ = HttpProtocol  # aiohttp's server has no option for the class
            connection = self._connections.add(http)
            task = loop.create_task(connection.open(sock, self._tls, self._handshake_s))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
            if number % BATCH == 0:
                await asyncio.sleep(0)
