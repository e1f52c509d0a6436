"""The sockets between the server processes and one engine process, and between the engine's ranks: the only
user of zmq.

Promise: messages arrive in the order they were sent and none is dropped while both processes live
(PUSH/PULL pairs without a high-water mark; the server's cap on open requests bounds the queues).
The endpoints are ipc files in a private directory, two for each server process and for each further rank,
so two instances never meet; ranks on other hosts come over TCP.
"""

import tempfile
from contextlib import suppress
from pathlib import Path
from socket import AF_INET6, SOCK_STREAM, getaddrinfo

import msgspec
import zmq
import zmq.asyncio

from minisgl.errors import ConfigError, EngineDeadError
from minisgl.messages import IDS_PER_SERVER, StepOutput, ToEngine, ToServer

TO_ENGINE = "to_engine"
TO_SERVER = "to_server"
TO_RANK = "to_rank"
FROM_RANK = "from_rank"
LONGEST_PATH = 100
"""A unix socket's path may have 107 bytes; the file names and a margin come off that."""
CONNECT_MS = 5000
"""How long the engine waits for each server process's end: the first was there before it, others may start
at the same time."""
LAST_WORDS_MS = 1000
"""How long the engine's `close` may wait for its last message (a `Fatal`) to leave."""


def make_ipc_dir() -> Path:
    """A new directory, mode 0700, with a path short enough for unix sockets. The caller removes it.

    Raises:
        ConfigError: no directory could be made.
    """
    errors = []
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(parent) > LONGEST_PATH - 30:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="minisgl-", dir=parent))
        except OSError as error:
            errors.append(str(error))
    raise ConfigError(f"no private directory for the sockets could be made; set TMPDIR ({'; '.join(errors)})")


class EngineSocket:
    """The engine's end: plain blocking calls from the engine's one loop.

    Args:
        num_servers: server processes, with the ranks 0 to num_servers - 1.
    """

    def __init__(self, ipc_dir: str | Path, num_servers: int = 1) -> None:
        self._context = zmq.Context()
        self._inbox = _socket(self._context, zmq.PULL)
        self._outboxes = [_socket(self._context, zmq.PUSH) for _ in range(num_servers)]
        # A server may answer the first message at once: by then it must have somebody to send to.
        handshake = self._inbox.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        for rank in range(num_servers):
            self._inbox.connect(_endpoint(ipc_dir, TO_ENGINE, rank))
        for _ in range(num_servers):
            if handshake.poll(CONNECT_MS):
                handshake.recv_multipart()
        self._inbox.disable_monitor()
        for rank, outbox in enumerate(self._outboxes):
            outbox.connect(_endpoint(ipc_dir, TO_SERVER, rank))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """Everything waiting, in order; when nothing is, wait up to `timeout_ms` (0 = don't wait)."""
        messages: list[ToEngine] = []
        while self._inbox.poll(0 if messages else timeout_ms):
            messages.append(self._decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
        return messages

    def send(self, message: ToServer, server: int | None = None) -> None:
        """Queue `message` for one server process, or for all; never waits for it to be read."""
        data = self._encoder.encode(message)
        for outbox in self._outboxes if server is None else [self._outboxes[server]]:
            outbox.send(data)

    def send_outputs(self, step: StepOutput) -> None:
        """Queue what a step gave, each output for the server process whose request it is."""
        if len(self._outboxes) == 1:
            self.send(step)
            return
        shares: dict[int, StepOutput] = {}
        for output in step.outputs:
            rank = output.request_id // IDS_PER_SERVER
            shares.setdefault(rank, StepOutput([])).outputs.append(output)
        for rank, share in shares.items():
            self.send(share, rank)

    def close(self) -> None:
        """Close all sockets after what was sent is out, or after `LAST_WORDS_MS`; may be called twice."""
        self._inbox.close(linger=0)
        for outbox in self._outboxes:
            outbox.close(linger=LAST_WORDS_MS)
        self._context.term()


class ServerSocket:
    """One server process's end, to be made and used inside one asyncio event loop."""

    def __init__(self, ipc_dir: str | Path, rank: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        # A plain socket: sending never waits, and a socket of its own can't swallow the inbox's wake-ups.
        self._outbox = _socket(self._context, zmq.PUSH)
        self._inbox.bind(_endpoint(ipc_dir, TO_SERVER, rank))
        self._outbox.bind(_endpoint(ipc_dir, TO_ENGINE, rank))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToServer)

    async def receive(self) -> ToServer:
        """The next message; waits for one. Cancelling it loses nothing."""
        while not await self._inbox.poll():
            pass
        # Nobody else reads this socket, so the message that poll announced is there without waiting.
        data = await self._inbox.recv(zmq.NOBLOCK)
        return self._decoder.decode(data)

    def send(self, message: ToEngine) -> None:
        """Queue `message` for the engine without waiting.

        Raises:
            EngineDeadError: no engine is connected.
        """
        try:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("no engine process is connected") from None

    def close(self) -> None:
        """Close both sockets at once, dropping what was not delivered; may be called twice."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()


class RankAddresses(msgspec.Struct, frozen=True):
    """Where the sockets of rank 1 or higher connect."""

    plans: str
    reports: str


class LeaderSocket:
    """Rank 0's end of the sockets to the other ranks, `size - 1` of them. Made before they are.

    Args:
        num_local: ranks on this host, 0 to num_local - 1.
        host: this host's name or address, at which the others' ranks reach it over TCP.

    Raises:
        ConfigError: `host` is not this host's.
    """

    def __init__(self, ipc_dir: str | Path, size: int, num_local: int, host: str | None) -> None:
        self._context = zmq.Context()
        self._inbox = _socket(self._context, zmq.PULL)
        local_reports = _endpoint(ipc_dir, FROM_RANK, 0)
        self._inbox.bind(local_reports)
        remote_reports = local_reports if host is None else _bind_tcp(self._inbox, host)
        self._outboxes = [_socket(self._context, zmq.PUSH) for _ in range(1, size)]
        self._addresses: dict[int, RankAddresses] = {}
        for rank, outbox in enumerate(self._outboxes, start=1):
            if rank < num_local or host is None:
                plans = _endpoint(ipc_dir, TO_RANK, rank)
                outbox.bind(plans)
                self._addresses[rank] = RankAddresses(plans, local_reports)
            else:
                self._addresses[rank] = RankAddresses(_bind_tcp(outbox, host), remote_reports)

    def addresses(self, rank: int) -> RankAddresses:
        """Where a rank, not 0, connects."""
        return self._addresses[rank]

    def send(self, data: bytes) -> None:
        """Queue `data` for every other rank; never waits, also where a rank is gone."""
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
        """Close all sockets after what was sent is out, or after `LAST_WORDS_MS`; may be called twice."""
        self._inbox.close(linger=0)
        for outbox in self._outboxes:
            outbox.close(linger=LAST_WORDS_MS)
        self._context.term()


class FollowerSocket:
    """The end of rank 1 or higher."""

    def __init__(self, addresses: RankAddresses) -> None:
        self._context = zmq.Context()
        self._inbox = _socket(self._context, zmq.PULL)
        self._outbox = _socket(self._context, zmq.PUSH)
        self._inbox.connect(addresses.plans)
        self._outbox.connect(addresses.reports)

    def receive(self) -> bytes:
        """The next message of rank 0; waits for one."""
        return self._inbox.recv()

    def send(self, data: bytes) -> None:
        """Queue `data` for rank 0; never waits for it to be read."""
        self._outbox.send(data)

    def close(self) -> None:
        """Close both sockets, after what was sent is out or after `LAST_WORDS_MS`; may be called twice."""
        self._inbox.close(linger=0)
        self._outbox.close(linger=LAST_WORDS_MS)
        self._context.term()


def _bind_tcp(socket: zmq.Socket, host: str) -> str:
    """Bind to a free port; the endpoint to connect to."""
    try:
        family, _, _, _, address = getaddrinfo(host, None, type=SOCK_STREAM)[0]
        if family == AF_INET6:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(f"tcp://[{address[0]}]:*" if family == AF_INET6 else f"tcp://{address[0]}:*")
    except (OSError, zmq.ZMQError) as error:
        raise ConfigError(
            f"--rdzv must name node 0, which is this host; {host!r} is not its ({error})"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _socket(context: zmq.Context, kind: int) -> zmq.Socket:
    socket = zmq.Socket(context, kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def _endpoint(ipc_dir: str | Path, name: str, rank: int) -> str:
    return f"ipc://{ipc_dir}/{name}.{rank}"
