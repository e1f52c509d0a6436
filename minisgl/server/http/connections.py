"""The open connections of a server process: limits their number and closes idle ones.

Promise: a connection without a call in progress is closed after `idle_timeout_s`, whether its client is
silent, sends headers without end, or does not read its answer. Beyond the limit, the longest idle connections
are closed. If none is idle, only `RESERVED` more are accepted; their calls are answered at once.
"""

import asyncio
import logging
import os
import resource
import socket
import ssl
from typing import Any, cast

from aiohttp import web

from minisgl.server.http.middleware import Handler

log = logging.getLogger(__name__)

OTHER_FILES = 64
"""Open files that a serving process needs besides connections: sockets, logs, libraries."""
RESERVED = 16
"""Connections beyond the limit, for health checks and for 503 answers."""
MIN_IDLE_S = 0.25
"""Connections idle for less than this are not closed to make room; their call may be on the way."""
ROOM_POLL_S = 0.1
LOG_EVERY_S = 60.0
UNLIMITED = 1 << 20


def connections_that_fit() -> int:
    """How many connections fit into the limit on open files, beside the files open now and OTHER_FILES."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return UNLIMITED
    try:
        num_open = len(os.listdir("/dev/fd"))
    except OSError:  # /dev/fd is not mounted
        num_open = OTHER_FILES
    return max(2, allowed - num_open - OTHER_FILES)


class Connection:
    """The asyncio protocol of one connection: forwards all to aiohttp's protocol and reports its end."""

    def __init__(self, owner: "Connections", http: web.RequestHandler) -> None:
        self.http = http
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self.last_num_unread = 0
        """Unread bytes at the last `check_read_progress`; 0 = no check since the last call began."""

    async def open(self, sock: socket.socket, tls: ssl.SSLContext | None, handshake_s: float) -> None:
        """Create the transport of an accepted socket. With TLS this waits for the client's handshake."""
        self._opening = asyncio.current_task()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: cast(Any, self), sock, ssl=tls, ssl_handshake_timeout=handshake_s if tls else None
            )
        except OSError as error:
            log.debug("a connection came to nothing: %s", error)
        finally:
            self._opening = None
            if self._transport is None:
                self._owner.remove(self)

    def end(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        elif self._opening is not None:
            self._opening.cancel()

    @property
    def num_unread(self) -> int:
        """Bytes of the answer that the client has not read yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def check_read_progress(self) -> bool:
        """Whether the client has read since the last check and has more to read. Records this check."""
        before, self.last_num_unread = self.last_num_unread, self.num_unread
        return self.last_num_unread > 0 and (before == 0 or self.last_num_unread < before)

    # asyncio calls this and the methods below.
    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.http.connection_made(transport)

    def connection_lost(self, error: BaseException | None) -> None:
        self._owner.remove(self)
        self.http.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self.http.data_received(data)

    def eof_received(self) -> None:
        self.http.eof_received()

    def pause_writing(self) -> None:
        self.http.pause_writing()

    def resume_writing(self) -> None:
        self.http.resume_writing()


class Connections:
    """All connections of one server process. Create, use and close it in one event loop.

    Args:
        most: maximum number of open connections. RESERVED of them, at most half, lie beyond the limit.
        idle_timeout_s: a connection without a call in progress is closed after this time.
    """

    def __init__(self, most: int, idle_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._most = most
        self._limit = most - min(RESERVED, most // 2)
        self._idle_timeout_s = idle_timeout_s
        self._open: dict[web.RequestHandler, Connection] = {}
        self._idle_since: dict[Connection, float] = {}  # ordered, the longest idle first
        self._timer: asyncio.TimerHandle | None = None
        self._room_freed: asyncio.Future[None] = self._loop.create_future()
        self._next_log_at = 0.0

    @property
    def is_full(self) -> bool:
        """Whether more connections than the limit have a call in progress, so that calls get a 503."""
        return len(self._open) - len(self._idle_since) > self._limit

    @property
    def _is_over_limit(self) -> bool:
        return len(self._open) > self._limit

    def install(self, app: web.Application) -> None:
        """Install the middleware that tracks calls, before every other middleware of `app`."""
        app.middlewares.insert(0, self._track_call)

    async def wait_for_room(self) -> None:
        """Return when one more connection may be opened."""
        while len(self._open) >= self._most:
            self._make_room()
            self._room_freed = self._loop.create_future()
            await asyncio.wait([self._room_freed], timeout=ROOM_POLL_S)

    def add(self, http: web.RequestHandler) -> Connection:
        """Add a connection, idle until its first call. Beyond the limit a longer idle one is closed."""
        connection = self._open[http] = Connection(self, http)
        self._mark_idle(connection)
        if self._is_over_limit:
            self.handle_shortage(f"{len(self._open)} connections are open")
        return connection

    def handle_shortage(self, what: str) -> None:
        """Close an idle connection, and log a warning at most once per LOG_EVERY_S."""
        self._make_room()
        if self._loop.time() < self._next_log_at:
            return
        self._next_log_at = self._loop.time() + LOG_EVERY_S
        log.warning(
            "%s, and the limit on open files (%d) leaves room for %d: idle ones are closed, and where that "
            "is not enough, calls get a 503; raise the hard limit (ulimit -Hn)",
            what,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            self._limit,
        )

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self._open.pop(connection.http, None)
        self._idle_since.pop(connection, None)
        if not self._room_freed.done():
            self._room_freed.set_result(None)

    def close(self) -> None:
        """Stop closing idle connections."""
        if self._timer is not None:
            self._timer.cancel()

    @web.middleware
    async def _track_call(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = self._open.get(request.protocol)
        if connection is None:  # the connection has already ended
            return await handler(request)
        self._idle_since.pop(connection, None)
        connection.last_num_unread = 0
        try:
            response = await handler(request)
        finally:
            if connection.http in self._open:
                self._mark_idle(connection)
        if self._is_over_limit:
            response.force_close()
        return response

    def _mark_idle(self, connection: Connection) -> None:
        """The connection is idle from now on."""
        self._idle_since.pop(connection, None)
        self._idle_since[connection] = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle_timeout_s, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connections whose idle time is over, and schedule the next check."""
        self._timer = None
        now = self._loop.time()
        while self._idle_since:
            connection, since = next(iter(self._idle_since.items()))
            if since + self._idle_timeout_s > now:
                self._timer = self._loop.call_at(since + self._idle_timeout_s, self._close_idle)
                return
            if connection.check_read_progress():
                self._mark_idle(connection)
            else:
                self._end(connection)

    def _make_room(self) -> None:
        """Close the longest idle connection, preferably one whose client has read its answer."""
        chosen = None
        for connection, since in self._idle_since.items():
            if self._loop.time() - since < MIN_IDLE_S:
                break
            chosen = chosen or connection
            if connection.num_unread == 0:
                chosen = connection
                break
        if chosen is not None:
            self._end(chosen)

    def _end(self, connection: Connection) -> None:
        del self._idle_since[connection]
        connection.end()
