"""The sockets between the server processes and one engine process, between its ranks, and to routers.

Promise: messages arrive in the order they were sent, and none is dropped while both processes live.
(PUSH/PULL pairs have no high-water mark; the server's cap on open requests bounds the queues.)
Endpoints are ipc files in a private directory, two for each server process and each further rank, so two
instances never share one. Ranks on other hosts connect over TCP, and routers where the user says (only
`EventSockets` drops messages: they have numbers and can be asked for again). Zmq is used only here and by the
connections from elsewhere (`door.py`, `door_keys.py`, `server_line.py`).
"""

import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from socket import AF_INET6, SOCK_STREAM, getaddrinfo
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from minisgl.errors import ConfigError, EngineDeadError
from minisgl.ipc.messages import (
    IDS_PER_SERVER,
    SLICE_BYTES,
    SLICE_REQUESTS,
    AddRequest,
    StepOutput,
    ToEngine,
    ToServer,
)

Message = TypeVar("Message")

TO_ENGINE = "to_engine"
TO_SERVER = "to_server"
TO_RANK = "to_rank"
FROM_RANK = "from_rank"
MAX_PATH_BYTES = 100
"""A unix socket's path may have 107 bytes; this limit leaves a margin."""
CONNECT_MS = 5000
"""How long the engine waits for each server process's socket, and a rank for rank 0's. The first server
process starts before the engine; others may start at the same time."""
CLOSE_LINGER_MS = 1000
"""How long the engine's `close` waits until its last message (a `Fatal`) is sent."""


def make_ipc_dir() -> Path:
    """Make a directory, mode 0700, with a path short enough for unix sockets. The caller removes it.

    Raises:
        ConfigError: no directory could be made.
    """
    errors = []
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(parent) > MAX_PATH_BYTES - 40:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="minisgl-", dir=parent))
        except OSError as error:
            errors.append(str(error))
    raise ConfigError(f"no private directory for the sockets could be made; set TMPDIR ({'; '.join(errors)})")


def _connected_inbox(context: zmq.Context, endpoints: list[str]) -> zmq.Socket:
    """A PULL socket connected to all of these: the other ends can send. Waits up to CONNECT_MS for each."""
    inbox = plain_socket(context, zmq.PULL)
    handshake = inbox.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    for endpoint in endpoints:
        inbox.connect(endpoint)
    for _ in endpoints:
        if handshake.poll(CONNECT_MS):
            handshake.recv_multipart()
    inbox.disable_monitor()
    return inbox


class EngineSocket:
    """The engine's end, used with blocking calls from the engine's only loop.

    Args:
        num_servers: number of server processes; they are numbered from 0.
    """

    def __init__(self, ipc_dir: str | Path, num_servers: int = 1) -> None:
        self._context = zmq.Context()
        # A server may answer the first message at once.
        self._inbox = _connected_inbox(
            self._context, [_endpoint(ipc_dir, TO_ENGINE, index) for index in range(num_servers)]
        )
        self._outboxes = [plain_socket(self._context, zmq.PUSH) for _ in range(num_servers)]
        for index, outbox in enumerate(self._outboxes):
            outbox.connect(_endpoint(ipc_dir, TO_SERVER, index))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """The messages that wait, in order; when none does, wait up to `timeout_ms` (0 = don't wait).

        Messages behind `SLICE_REQUESTS` new requests or `SLICE_BYTES` wait for the next call, so that adding
        requests never holds the engine for long between two steps.
        """
        return receive_slice(self._inbox, self._decoder, timeout_ms)

    def send(self, message: ToServer, server: int | None = None) -> None:
        """Queue `message` for one server process, or for all; never waits for it to be read."""
        data = self._encoder.encode(message)
        for outbox in self._outboxes if server is None else [self._outboxes[server]]:
            outbox.send(data)

    def send_outputs(self, step: StepOutput) -> None:
        """Queue a step's outputs, each for the server process that owns the request."""
        if len(self._outboxes) == 1:
            self.send(step)
            return
        shares: dict[int, StepOutput] = {}
        for output in step.outputs:
            server = output.request_id // IDS_PER_SERVER
            shares.setdefault(server, StepOutput([])).outputs.append(output)
        for server, share in shares.items():
            self.send(share, server)

    def close(self) -> None:
        """Close all sockets once queued messages are sent, or after `CLOSE_LINGER_MS`. May be repeated."""
        self._inbox.close(linger=0)
        for outbox in self._outboxes:
            outbox.close(linger=CLOSE_LINGER_MS)
        self._context.term()


class ServerSocket:
    """One server process's end. Make and use it inside one asyncio event loop."""

    def __init__(self, ipc_dir: str | Path, index: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        # A plain socket, because sending never waits. A separate one can't consume the inbox's wake-ups.
        self._outbox = plain_socket(self._context, zmq.PUSH)
        self._inbox.bind(_endpoint(ipc_dir, TO_SERVER, index))
        self._outbox.bind(_endpoint(ipc_dir, TO_ENGINE, index))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToServer)

    async def receive(self) -> ToServer:
        """The next message; waits for one. Cancelling it loses nothing."""
        while not await self._inbox.poll():
            pass
        # Only this method reads the socket, so the message that poll announced is there.
        data = await self._inbox.recv(zmq.NOBLOCK)
        return self._decoder.decode(data)

    def send(self, message: ToEngine) -> None:
        """Queue `message` for the engine without waiting.

        Raises:
            EngineDeadError: no engine is connected, or this end is closed.
        """
        if self._outbox.closed:
            raise EngineDeadError("the connection to the engine is closed")
        try:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("no engine process is connected") from None

    def close(self) -> None:
        """Close both sockets at once and drop undelivered messages; may be called twice."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()


class RankAddresses(msgspec.Struct, frozen=True):
    """The endpoints to which the sockets of one rank (1 or higher) connect."""

    plans: str
    reports: str


class LeaderSocket:
    """Rank 0's end of the sockets to the other `size - 1` ranks. Make it before theirs.

    Args:
        place: a directory for the sockets, where all ranks are on this host; else this host's name or
            address, by which the ranks reach it over TCP.

    Raises:
        ConfigError: `place` does not name this host.
    """

    def __init__(self, place: Path | str, size: int) -> None:
        self._context = zmq.Context()
        self._inbox = plain_socket(self._context, zmq.PULL)
        reports = _bind(self._inbox, place, FROM_RANK, 0)
        self._outboxes = [plain_socket(self._context, zmq.PUSH) for _ in range(1, size)]
        self._addresses: dict[int, RankAddresses] = {}
        for rank, outbox in enumerate(self._outboxes, start=1):
            plans = _bind(outbox, place, TO_RANK, rank)
            self._addresses[rank] = RankAddresses(plans, reports)

    def addresses(self, rank: int) -> RankAddresses:
        """The endpoints of a rank (1 or higher)."""
        return self._addresses[rank]

    def send(self, data: bytes) -> None:
        """Queue `data` for every other rank; never waits, even if a rank is gone."""
        for outbox in self._outboxes:
            with suppress(zmq.Again):
                outbox.send(data, zmq.NOBLOCK)

    def receive(self, timeout_ms: int) -> list[bytes]:
        """Everything waiting; when nothing is, wait up to `timeout_ms` (0 = don't wait)."""
        messages: list[bytes] = []
        while self._inbox.poll(0 if messages else timeout_ms):
            messages.append(self._inbox.recv(zmq.NOBLOCK))
        return messages

    def close(self) -> None:
        """Close all sockets once queued messages are sent, or after `CLOSE_LINGER_MS`. May be repeated."""
        self._inbox.close(linger=0)
        for outbox in self._outboxes:
            outbox.close(linger=CLOSE_LINGER_MS)
        self._context.term()


class FollowerSocket:
    """The end of one rank, 1 or higher."""

    def __init__(self, addresses: RankAddresses) -> None:
        self._context = zmq.Context()
        # Rank 0 drops what it sends to a rank that is not connected.
        self._inbox = _connected_inbox(self._context, [addresses.plans])
        self._outbox = plain_socket(self._context, zmq.PUSH)
        self._outbox.connect(addresses.reports)

    def receive(self) -> bytes:
        """The next message of rank 0; waits for one."""
        return self._inbox.recv()

    def send(self, data: bytes) -> None:
        """Queue `data` for rank 0; never waits for it to be read."""
        self._outbox.send(data)

    def close(self) -> None:
        """Close both sockets once queued messages are sent, or after `CLOSE_LINGER_MS`. May be repeated."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=CLOSE_LINGER_MS)
        self._context.term()


class EventSockets:
    """Sends numbered messages to any number of subscribers, and answers those that missed some.

    `wake` belongs to one thread, and everything else to another one, which waits in `wait`.
    The frames are those of vLLM 0.33: topic, number (8 bytes, big-endian), message.

    Args:
        endpoint: tcp:// or ipc://. One with a wildcard (tcp://*:5557) or an ipc:// path is bound; another
            one is connected to, as vLLM does.
        replay_endpoint: bound; None = nobody can ask for messages again.
        num_kept: the most messages that wait for a slow subscriber; it loses others. Also the most that
            `answer` sends.

    Raises:
        ConfigError: an endpoint can't be used.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: bytes, num_kept: int) -> None:
        self._topic = topic
        self._context = zmq.Context()
        self._waker = plain_socket(self._context, zmq.PUSH)
        self._wakes = plain_socket(self._context, zmq.PULL)
        self._events = zmq.Socket(self._context, zmq.PUB)
        self._replays = zmq.Socket(self._context, zmq.ROUTER)
        self._poller = zmq.Poller()
        for socket in (self._wakes, self._replays):
            self._poller.register(socket, zmq.POLLIN)
        try:
            self._wakes.bind("inproc://wake")
            self._waker.connect("inproc://wake")
            self._events.setsockopt(zmq.SNDHWM, num_kept)
            must_bind = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
            self.endpoint = _open(self._events, "--kv-events-endpoint", endpoint, must_bind)
            # Reads are confirmed only after half of the limit, so a full answer needs twice its size.
            self._replays.setsockopt(zmq.SNDHWM, 2 * (num_kept + 1))
            self.replay_endpoint = None
            if replay_endpoint is not None:
                flag = "--kv-events-replay-endpoint"
                self.replay_endpoint = _open(self._replays, flag, replay_endpoint, True)
        except BaseException:
            self.close()
            raise

    def wake(self) -> None:
        """Let `wait` return; nothing after `close`."""
        with suppress(zmq.ZMQError):
            self._waker.send(b"", zmq.NOBLOCK)  # refused: many wakes wait already

    def wait(self) -> list[tuple[bytes, int]]:
        """Wait for a `wake` or a question; returns (subscriber, first number wanted) of each question."""
        self._poller.poll()
        while self._wakes.poll(0):
            self._wakes.recv(zmq.NOBLOCK)
        questions = []
        while self._replays.poll(0):
            frames = self._replays.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 3:  # who asks, an empty frame, the number
                questions.append((frames[0], int.from_bytes(frames[2][:8], "big")))
        return questions

    def publish(self, number: int, message: bytes) -> None:
        """Send a message to every subscriber; never waits."""
        self._events.send_multipart((self._topic, number.to_bytes(8, "big"), message))

    def answer(self, subscriber: bytes, messages: Iterable[tuple[int, bytes]]) -> None:
        """Send (number, message) pairs to the one who asked, then the end: number -1 without a message."""
        for number, message in messages:
            self._reply(subscriber, self._topic, number, message)
        self._reply(subscriber, b"", -1, b"")

    def _reply(self, subscriber: bytes, topic: bytes, number: int, message: bytes) -> None:
        frames = (subscriber, b"", topic, number.to_bytes(8, "big", signed=True), message)
        with suppress(zmq.ZMQError):  # it has left meanwhile
            self._replays.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        """Close all sockets once published messages are sent, or after `CLOSE_LINGER_MS`."""
        for socket in (self._waker, self._wakes, self._events, self._replays):
            socket.close(linger=CLOSE_LINGER_MS)
        self._context.term()


def _open(socket: zmq.Socket, flag: str, endpoint: str, must_bind: bool) -> str:
    """Bind or connect; returns the address, with the port that the system chose."""
    try:
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if not must_bind:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"{flag} {endpoint} can't be used: {error}; give a free address") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _bind(socket: zmq.Socket, place: Path | str, name: str, index: int) -> str:
    """Bind in a directory, or to a free TCP port of this host; returns the endpoint to connect to."""
    if isinstance(place, str):
        return _bind_tcp(socket, place)
    endpoint = _endpoint(place, name, index)
    socket.bind(endpoint)
    return endpoint


def _bind_tcp(socket: zmq.Socket, host: str) -> str:
    """Bind to a free TCP port; returns the endpoint to connect to."""
    try:
        family, _, _, _, address = getaddrinfo(host, None, type=SOCK_STREAM)[0]
        if family == AF_INET6:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(f"tcp://[{address[0]}]:*" if family == AF_INET6 else f"tcp://{address[0]}:*")
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(
            f"torchrun says that rank 0 is on {host!r}, which is no address of this host ({error}); give "
            "torchrun --local-addr"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def plain_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """A socket without a limit on queued messages, used with blocking calls."""
    socket = zmq.Socket(context, kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def receive_slice(
    inbox: zmq.Socket, decoder: msgspec.msgpack.Decoder[Message], timeout_ms: int
) -> list[Message]:
    """The messages that wait, up to a slice of new requests; see `EngineSocket.receive`. Skips empty ones."""
    messages: list[Message] = []
    num_requests = num_bytes = 0
    while num_requests < SLICE_REQUESTS and num_bytes < SLICE_BYTES:
        if not inbox.poll(0 if messages else timeout_ms):
            break
        data = inbox.recv(zmq.NOBLOCK)
        if not data:
            timeout_ms = 0
            continue
        message = decoder.decode(data)
        messages.append(message)
        num_bytes += len(data)
        num_requests += message.num_requests if isinstance(message, AddRequest) else 0
    return messages


def _endpoint(ipc_dir: str | Path, name: str, index: int) -> str:
    return f"ipc://{ipc_dir}/{name}.{index}"
