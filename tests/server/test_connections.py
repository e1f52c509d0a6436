"""Connections that are idle or too many: closed in time, and /health goes on answering."""

import asyncio
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import web
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder

from minisgl.server.http.connections import Connections
from minisgl.server.http.listener import Listener

IDLE_S = 0.7
OPEN_FILES = 160
SHELL = f'ulimit -n {OPEN_FILES} && exec "$@"'
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
BIG = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAIT = b'{"prompt": "@wait hi", "max_tokens": 100}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("connections") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(folder, keep_alive_timeout_s=IDLE_S) as running:
        yield running.ready()


@pytest.fixture(scope="module", params=[1, 2])
def small(request: pytest.FixtureRequest, folder: Path) -> Iterator[RunningServer]:
    """One process, or two, that may open few files."""
    with RunningServer(folder, api_workers=request.param, wrap=("bash", "-c", SHELL, "sh")) as running:
        yield running.ready()


def connect(server: RunningServer, first: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT_S)
    made.sendall(first)
    return made


def is_closed(made: socket.socket) -> bool:
    """Whether the server has closed it; what it sent before is passed over."""
    made.setblocking(False)
    try:
        while made.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /version HT",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Long: a",
        GET,
        GET + GET + b"GET",
    ],
    ids=["nothing", "half a line", "headers that go on", "a whole call", "two calls and more"],
)
def test_a_connection_without_a_call_is_closed_in_time(server: RunningServer, sent: bytes) -> None:
    began = time.monotonic()
    with closing(connect(server, sent)) as made:
        eventually(lambda: is_closed(made), "closed")
    assert IDLE_S * 0.9 < time.monotonic() - began < IDLE_S + 2.0


def test_headers_that_come_byte_by_byte_gain_no_time(server: RunningServer) -> None:
    with closing(connect(server, b"GET /version HTTP/1.1\r\nX-Long: ")) as made:

        def drip() -> bool:
            try:
                made.send(b"a")
            except OSError:
                return True
            return is_closed(made)

        eventually(drip, "closed", IDLE_S + 2.0)


def test_a_call_may_take_longer_than_an_idle_connection(server: RunningServer) -> None:
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(WAIT)}\r\n\r\n"
    began = time.monotonic()
    with closing(connect(server, head.encode() + WAIT)) as waiting, closing(connect(server)) as idle:
        eventually(lambda: is_closed(idle), "closed")
        assert time.monotonic() - began < IDLE_S + 2.0
        assert server.complete("@go")[0] == 200
        assert read_until(waiting, b"0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_its_answers_is_closed(server: RunningServer) -> None:
    time.sleep(2 * IDLE_S)  # by now the server has closed the connections of earlier tests
    before = num_files(server.process.pid)
    with closing(connect(server, BIG * 200)):
        eventually(lambda: num_files(server.process.pid) > before, "open")
        eventually(lambda: num_files(server.process.pid) == before, "closed")


def test_a_client_that_reads_slowly_has_its_answer() -> None:
    async def scenario() -> None:
        loop, now = asyncio.get_running_loop(), [0.0]
        loop.time = lambda: now[0]
        connections = Connections(10, 60.0)
        made = connections.add(Mock())
        transport = Mock()
        made.connection_made(transport)
        for now[0], num_unread in ((60.0, 1000), (120.0, 999), (180.0, 1), (240.0, 1)):
            transport.get_write_buffer_size.return_value = num_unread
            assert not transport.abort.called
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert transport.abort.called
        connections.close()

    asyncio.run(scenario())


def test_the_longest_idle_connection_makes_room_unless_its_answer_is_still_read() -> None:
    async def scenario() -> None:
        loop, now = asyncio.get_running_loop(), [0.0]
        loop.time = lambda: now[0]
        connections = Connections(6, 60.0)  # three and three more
        transports = [Mock() for _ in range(6)]
        for now[0], transport in enumerate(transports):
            transport.get_write_buffer_size.return_value = 5 if transport is transports[0] else 0
            connections.add(Mock()).connection_made(transport)
        assert [transport.abort.called for transport in transports] == [False, True, True, True, False, False]
        connections.close()

    asyncio.run(scenario())


def test_health_is_answered_beyond_the_limit_of_idle_connections(small: RunningServer) -> None:
    with ExitStack() as held:
        for _ in range(2 * OPEN_FILES):
            held.enter_context(closing(connect(small, b"GET /version HT")))
        for _ in range(6):
            assert small.health()[0] == 200
            assert small.complete("@say fine")[0] == 200
    lines = [line for line in small.errors.read_text().splitlines() if "open files" in line]
    assert 1 <= sum("connections are open" in line for line in lines) <= 2  # of each process
    assert len(small.errors.read_text().splitlines()) < 20


def test_health_is_answered_beyond_the_limit_of_busy_connections(small: RunningServer) -> None:
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(WAIT)}\r\n\r\n"
    engine = small.health()[1]["engine_pid"]
    with ExitStack() as held:
        busy, refused = [], 0
        while refused < 5:
            made = held.enter_context(closing(connect(small, head.encode() + WAIT)))
            answer = read_until(made, b"\r\n\r\n")
            if answer.startswith(b"HTTP/1.1 200"):
                busy.append(made)
                continue
            refused += 1
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"Connection: close" in answer
            assert b"Retry-After" in answer
            assert small.health()[0] == 200
        assert 20 < len(busy) < 2 * OPEN_FILES
        os.kill(engine, signal.SIGUSR1)  # the engine ends what runs
        for made in busy:
            assert read_until(made, b"0\r\n\r\n")
    eventually(lambda: small.complete("@say fine")[0] == 200, "well")
    assert len(small.errors.read_text().splitlines()) < 20


def test_a_shortage_of_files_is_logged_once_and_passes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.server.http.listener.RETRY_S", 0.01)

    async def scenario() -> None:
        loop, num_failures = asyncio.get_running_loop(), 0
        accept = loop.sock_accept

        async def counted(sock: socket.socket) -> tuple[socket.socket, object]:
            nonlocal num_failures
            try:
                return await accept(sock)
            except OSError:
                num_failures += 1
                raise

        monkeypatch.setattr(loop, "sock_accept", counted)
        runner = web.AppRunner(web.Application())
        await runner.setup()
        assert runner.server is not None
        connections = Connections(10_000, 60.0)
        listening = socket.create_server(("127.0.0.1", 0), backlog=100)
        clients = [socket.create_connection(listening.getsockname()) for _ in range(10)]
        with few_files(beside=4):
            listener = Listener(listening, connections, runner.server, None, 1.0)
            while num_failures < 5:
                await asyncio.sleep(0.001)
            assert len(runner.server.connections) == 4
        while len(runner.server.connections) < 10:
            await asyncio.sleep(0.001)
        for client in clients:
            client.close()
        await listener.close()
        await runner.cleanup()
        connections.close()

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "ulimit" in record.getMessage()


@contextmanager
def few_files(beside: int) -> Iterator[None]:
    """This process may open only so many files more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + beside, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def read_until(made: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = made.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    return data


def test_a_failure_that_no_middleware_caught_is_answered_as_openais_object() -> None:
    async def fail(request: web.Request) -> web.Response:
        raise RuntimeError("of no interest to a client")

    async def scenario() -> bytes:
        app = web.Application()
        app.router.add_get("/version", fail)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        assert runner.server is not None
        connections = Connections(10, 60.0)
        listening = socket.create_server(("127.0.0.1", 0))
        listener = Listener(listening, connections, runner.server, None, 1.0)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(GET)
        answer = await reader.read()  # to the end of the connection
        writer.close()
        await listener.close()
        await runner.cleanup()
        connections.close()
        return answer

    head, _, body = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"X-Request-Id: " in head
    assert json.loads(body)["error"]["code"] == "internal_error"
    assert b"of no interest" not in body
