"""Connects the hosts of an engine ("nodes"): a TCP connection from every other node to node 0.

The connection carries the configuration of a node's ranks as lines of JSON, and stays open while both ends
run. There is no authentication, so the network between nodes must be trusted, also because of NCCL.

Promise: a node detects the end of the other process at once, and of its machine within LOST_S.
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
from minisgl.ipc.transport import RankAddresses

LOST_S = 4
"""Seconds of silence after which a machine counts as lost."""
RETRY_S = 0.5
"""Seconds between a node's attempts to connect, because it may start before node 0."""
ANSWER_S = 10
"""Seconds in which node 0 must say whether a node can join."""

Message = TypeVar("Message")


class Hello(msgspec.Struct, frozen=True):
    """Node -> node 0: introduces a node. All fields but `node_rank` must be equal on all nodes."""

    version: str
    nnodes: int
    tp: int
    model_digest: str
    """Digest of config.json."""
    node_rank: int


class NodeRank(msgspec.Struct, frozen=True):
    """A rank that a node must start."""

    rank: int
    addresses: RankAddresses


class Welcome(msgspec.Struct, frozen=True):
    """Node 0 -> node: the ranks to start, or why the node can't join."""

    refusal: str = ""
    engine: ResolvedConfig | None = None
    ranks: tuple[NodeRank, ...] = ()
    store: str = ""
    """The address of the ranks' torch store."""


class RankEnded(msgspec.Struct, frozen=True):
    """Node -> node 0: a rank ended without being told to."""

    rank: int
    how: str
    is_device_fault: bool = False


class Connection:
    """Sends and receives one message at a time. One thread may send while another one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lines = connected.makefile("rb")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # TCP keepalive: the operating system probes a silent machine, even while this process is busy.
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
        """Send a message. It is dropped if the other end has closed."""
        with contextlib.suppress(OSError):
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set how long `receive` waits, in seconds; None = without limit."""
        self._socket.settimeout(timeout_s)

    def receive(self, kind: type[Message]) -> Message | None:
        """Wait for the next message. None: the other end has closed, was too slow, or sent nonsense."""
        try:
            line = self._lines.readline()
            return msgspec.json.decode(line, type=kind) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Close the connection. `receive` then returns None at both ends. It may be called twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class NodeListener:
    """Node 0's end of the connections: admits the other nodes and watches them.

    Args:
        welcome: returns the `Welcome` of a node, given its number.
        on_end: called once for each node, from a thread, with its number and the end of one of its ranks, or
            None if the whole node is lost.

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
        _start_thread(self._accept_nodes)

    def missing(self) -> list[int]:
        """The nodes that have not joined yet."""
        with self._lock:
            return [node for node in range(1, self._expected.nnodes) if node not in self._nodes]

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all nodes have ended, then close. It may be called twice."""
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()
        deadline = time.monotonic() + timeout_s
        for connection, thread in nodes:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
            connection.close()

    def _accept_nodes(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return  # closed
            _start_thread(self._watch, Connection(connected))

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
        """Admit a node. Returns why it can't join, or an empty string if it has joined."""
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
    """Connect a node to node 0, which may start later, and join.

    Raises:
        ConfigError: node 0 refuses this node. The message says why.
        EngineDeadError: node 0 did not answer, or has ended.
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
    connection.set_timeout(ANSWER_S)
    connection.send(hello)
    welcome = connection.receive(Welcome)
    connection.set_timeout(None)
    if welcome is None or welcome.refusal:
        connection.close()
        if welcome is None:
            raise EngineDeadError(f"node 0 at --rdzv {rdzv} ended, or is no minisgl")
        raise ConfigError(f"node 0 at --rdzv {rdzv} does not let this node in: {welcome.refusal}")
    return connection, welcome


def model_digest(folder: Path) -> str:
    """A digest of the model's config.json, by which nodes check that they have the same model."""
    return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()[:16]


def _start_thread(run: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=run, args=arguments, name="nodes", daemon=True).start()
