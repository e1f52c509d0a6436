"""Between the hosts of an engine ("nodes"): a TCP connection from each other node to node 0.

It brings a node what its ranks have to know, and lives as long as both ends do. Lines of JSON. Whoever can
reach the port can join: the network between nodes has to be trusted, as NCCL's traffic has.

Promise: the end of the process at the other end is noticed at once, that of its machine within LOST_S.
"""

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from minisgl import __version__
from minisgl.config import ResolvedConfig, split_rdzv
from minisgl.errors import ConfigError, EngineDeadError
from minisgl.transport import RankAddresses

LOST_S = 4
"""How long a machine may be silent."""
RETRY_S = 0.5
"""A node that comes before node 0 does tries again after so long."""
ANSWER_S = 10
"""How long node 0 may take to say whether a node can join."""

Message = TypeVar("Message")


class Hello(msgspec.Struct, frozen=True):
    """Node -> node 0: who I am; all but the number must be equal."""

    version: str
    nnodes: int
    tp: int
    model_digest: str
    """Of config.json."""
    node_rank: int


class NodeRank(msgspec.Struct, frozen=True):
    """A rank that a node is to start."""

    rank: int
    addresses: RankAddresses


class Welcome(msgspec.Struct, frozen=True):
    """Node 0 -> node: what to start, or why it can't join."""

    refusal: str = ""
    engine: ResolvedConfig | None = None
    ranks: tuple[NodeRank, ...] = ()
    store: str = ""
    """Where the ranks meet."""


class RankEnded(msgspec.Struct, frozen=True):
    """Node -> node 0: it was not asked to."""

    rank: int
    how: str


class Connection:
    """One message after the other, each way; sending and receiving may be in different threads."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lines = connected.makefile("rb")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The system asks a silent machine whether it is there, whatever this process is busy with.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", 1),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", LOST_S - 1),
            ("TCP_USER_TIMEOUT", 1000 * LOST_S),
        ):
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; nothing happens if the other end is gone."""
        with contextlib.suppress(OSError):
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def wait_at_most(self, timeout_s: float | None) -> None:
        """From now on `receive` gives up after so long; None = never."""
        self._socket.settimeout(timeout_s)

    def receive(self, kind: type[Message]) -> Message | None:
        """The next message, waiting for it; None = the other end is gone, too slow, or speaks no sense."""
        try:
            line = self._lines.readline()
            return msgspec.json.decode(line, type=kind) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """The other end receives None; so does who is receiving here. May be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class NodeListener:
    """Node 0's end: lets in the other nodes and watches them.

    Args:
        welcome: what a node, by its number, has to know.
        on_end: called once for each node, from a thread, with its number and the end of one of its ranks, or
            None where the whole node is gone.

    Raises:
        ConfigError: `--rdzv` names no address of this host, or its port is taken.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        folder: Path,
        welcome: Callable[[int], Welcome],
        on_end: Callable[[int, RankEnded | None], None],
    ) -> None:
        self._expected = Hello(__version__, config.nnodes, config.tp, model_digest(folder), 0)
        self._welcome = welcome
        self._on_end = on_end
        self._lock = threading.Lock()
        self._nodes: dict[int, tuple[Connection, threading.Thread]] = {}
        self._closed = False
        host, port = split_rdzv(config.rdzv or "")
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"--rdzv {config.rdzv} must name node 0, which is this host, and a free port ({error})"
            ) from error
        _in_thread(self._let_in)

    def missing(self) -> list[int]:
        """Nodes that have not come yet."""
        with self._lock:
            return [node for node in range(1, self._expected.nnodes) if node not in self._nodes]

    def close(self, timeout_s: float) -> None:
        """Wait until all nodes have ended, so long at most, then end the connections. May be called twice."""
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        self._listener.close()
        deadline = time.monotonic() + timeout_s
        for connection, thread in nodes:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
            connection.close()

    def _let_in(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return  # closed
            _in_thread(self._watch, Connection(connected))

    def _watch(self, connection: Connection) -> None:
        hello = connection.receive(Hello)
        if hello is not None:
            refusal = self._admit(hello, connection)
            connection.send(Welcome(refusal=refusal) if refusal else self._welcome(hello.node_rank))
            if not refusal:
                ended = connection.receive(RankEnded)
                with self._lock:
                    closed = self._closed
                if not closed:
                    self._on_end(hello.node_rank, ended)
        connection.close()

    def _admit(self, hello: Hello, connection: Connection) -> str:
        """Why a node can't join; empty = it has joined."""
        ours = self._expected
        for name, is_ours, is_theirs in (
            ("minisgl's version", ours.version, hello.version),
            ("--nnodes", ours.nnodes, hello.nnodes),
            ("--tp", ours.tp, hello.tp),
            ("the model's config.json", ours.model_digest, hello.model_digest),
        ):
            if is_ours != is_theirs:
                return f"{name} must be the same on all nodes: node 0 has {is_ours}, this one {is_theirs}"
        if not 0 < hello.node_rank < ours.nnodes:
            return f"--node-rank {hello.node_rank} is none of 1 to {ours.nnodes - 1}"
        with self._lock:
            if hello.node_rank in self._nodes or self._closed:
                return f"--node-rank {hello.node_rank} has joined already"
            self._nodes[hello.node_rank] = (connection, threading.current_thread())
        return ""


def connect(rdzv: str, hello: Hello, timeout_s: float) -> tuple[Connection, Welcome]:
    """A node's end: connect to node 0, which may come later, and be let in.

    Raises:
        ConfigError: node 0 refuses; the message says why.
        EngineDeadError: there is no node 0, or it ended.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = Connection(socket.create_connection(split_rdzv(rdzv), timeout=LOST_S))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"node 0 did not answer at --rdzv {rdzv} for {timeout_s:g} s ({error})"
                ) from error
            time.sleep(RETRY_S)
    connection.wait_at_most(ANSWER_S)
    connection.send(hello)
    welcome = connection.receive(Welcome)
    connection.wait_at_most(None)
    if welcome is None or welcome.refusal:
        connection.close()
        if welcome is None:
            raise EngineDeadError(f"node 0 at --rdzv {rdzv} ended, or is no minisgl")
        raise ConfigError(f"node 0 at --rdzv {rdzv} does not let this node in: {welcome.refusal}")
    return connection, welcome


def model_digest(folder: Path) -> str:
    """By which nodes see that they have the same model; the weights are not read for it."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]


def _in_thread(run: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=run, args=arguments, name="nodes", daemon=True).start()
