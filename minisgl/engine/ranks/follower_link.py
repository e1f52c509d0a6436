"""Rank 0's hold on the other ranks: it starts them, sends them its step plans and watches them.

Promise: a rank that ends, however it does, ends all others within a moment and is an `EngineDeadError` with
its reason at rank 0, which is never left waiting for a rank that is gone; after `close` no process is left.
"""

import logging
import shutil
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from minisgl.config import ResolvedConfig, split_rdzv
from minisgl.engine.node_link import NodeListener, NodeRank, RankEnded, Welcome
from minisgl.engine.rank_processes import RankProcesses
from minisgl.errors import EngineDeadError, MinisglError
from minisgl.scheduler.plan import StepPlan
from minisgl.transport import LeaderSocket, RankAddresses, make_ipc_dir

if TYPE_CHECKING:  # it imports torch
    from minisgl.parallel.mesh import Ranks

logger = logging.getLogger(__name__)

STORE = "store"
"""The file in the sockets' directory where the ranks meet."""
RECORD_GRAPH = b"record"
"""In place of a plan: record a graph. No plan is encoded so."""
START_TIMEOUT_S = 300.0
"""How long a rank may take until it is ready to meet the others (its imports, and other nodes to come)."""
STOP_S = 3.0
"""How long a rank may take to end when asked to."""
ABORT_S = 5.0
"""How long `close` waits for collectives that are broken off."""
REASON_S = 1.0
"""How long an error waits for the end of a rank that may have caused it."""
LAST_REPORT_MS = 100
"""How long what a rank said last may be on its way."""
CHECKED_STEPS = 64
"""After so many steps the ranks' tokens are compared."""


class FollowerConfig(msgspec.Struct, frozen=True):
    """The line on a further rank's stdin."""

    engine: ResolvedConfig
    model_folder: str
    ipc_dir: str | None
    """What to remove when rank 0 is gone; None on other nodes."""
    rank: int
    addresses: RankAddresses
    store: str
    """Where the ranks meet, see `parallel.mesh.open_store`."""
    log_level: str


class Joining(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Rank -> rank 0: I am on my way to where we meet."""

    rank: int


class Failed(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Rank -> rank 0, the last message: what went wrong."""

    rank: int
    message: str


class Checksum(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Rank -> rank 0: of all tokens up to a step."""

    rank: int
    num_steps: int
    value: int


class Started(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Rank -> rank 0: I am ready for plans."""

    rank: int
    weights_bytes: int
    """Of its share of the model."""
    load_ms: float
    """How long it took to load or make them."""
    peak_host_bytes: int


FromFollower = Joining | Failed | Checksum | Started


class TokenChecksum:
    """A running checksum of what a rank's steps sampled."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.value = 0

    def add(self, tokens: Sequence[int]) -> bool:
        """Take in a step's tokens; True when it is time to compare."""
        self.value = zlib.crc32(array("q", tokens).tobytes(), self.value)
        self.num_steps += 1
        return self.num_steps % CHECKED_STEPS == 0


class FollowerLink:
    """The other ranks of an engine with `config.tp` of them, running from here on.

    Args:
        ipc_dir: a private directory for the sockets, which somebody else removes; None = one of its own.
        on_lost: called with the reason when a rank has ended, from a thread of its own: this process may be
            waiting for that rank on the device, and then learns of it only if the wait can be broken.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_folder: Path,
        *,
        ipc_dir: Path | None,
        on_lost: Callable[[str], None],
    ) -> None:
        self._config = config
        self._owns_ipc_dir = ipc_dir is None
        self._ipc_dir = ipc_dir or make_ipc_dir()
        self._lock = threading.Lock()
        self._closing = False  # ends are no losses any more
        self._closed = False
        self._lost: tuple[int, str] | None = None  # which rank, and how it ended
        self._lost_event = threading.Event()
        self._reports: dict[int, str] = {}
        self._starts: dict[int, Started] = {}
        self._checksum = TokenChecksum()
        self._checksums: dict[int, dict[int, int]] = {}  # steps -> rank -> value, until all ranks have one
        self._on_cuda = config.device == "cuda"
        self._on_lost = on_lost
        self._ranks: Ranks | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromFollower)
        self._processes = RankProcesses(self._ended)
        self._nodes: NodeListener | None = None
        host = split_rdzv(config.rdzv)[0] if config.rdzv is not None else None
        try:
            self._socket = LeaderSocket(self._ipc_dir, config.tp, config.ranks_per_node, host)
        except BaseException:
            self._remove_ipc_dir()
            raise
        try:
            self._store = str(self._ipc_dir / STORE)
            if host is not None:
                # Lazy: it imports torch.
                from minisgl.parallel.mesh import serve_store

                self._served_store, self._store = serve_store(host)  # it lives as long as it is held
                self._nodes = NodeListener(config, model_folder, self._welcome, self._node_ended)
            level = logging.getLevelName(logger.getEffectiveLevel()).lower()
            for rank in range(1, config.ranks_per_node):
                line = FollowerConfig(
                    config,
                    str(model_folder),
                    str(self._ipc_dir),
                    rank,
                    self._socket.addresses(rank),
                    self._store,
                    level,
                )
                self._processes.start(rank, msgspec.json.encode(line))
        except BaseException:
            self.close()
            raise

    @property
    def store(self) -> str:
        """Where the ranks meet."""
        return self._store

    @property
    def pids(self) -> list[int]:
        """Process ids on this node, of rank 1 and on."""
        return self._processes.pids

    def wait_for_all(self) -> None:
        """Until every rank is about to join.

        Raises:
            EngineDeadError: one ended, or took too long.
        """
        missing = set(range(1, self._config.tp))
        deadline = time.monotonic() + START_TIMEOUT_S
        while missing:
            for message in self._receive(100):
                if isinstance(message, Joining):
                    missing.discard(message.rank)
            self.check()
            if time.monotonic() > deadline:
                away = self._nodes.missing() if self._nodes is not None else []
                what = f"node {away[0]} of --nnodes has not come" if away else ""
                what = what or f"rank {min(missing)} of --tp was not ready"
                raise EngineDeadError(f"{what} after {START_TIMEOUT_S:g} s")

    def wait_for_starts(self) -> list[Started]:
        """Until every rank is ready for plans; what they say, by rank.

        Raises:
            EngineDeadError: one ended.
        """
        while len(self._starts) < self._config.tp - 1:
            self._receive(100)
            self.check()
        return [self._starts[rank] for rank in sorted(self._starts)]

    def joined(self, ranks: "Ranks") -> None:
        """From now on this process may wait for the other ranks on its GPU, until one is lost."""
        self._ranks = ranks
        if self._lost is not None and self._on_cuda:
            self._abort()

    def send(self, plan: StepPlan) -> None:
        """Have the other ranks execute a plan after those before it."""
        self._socket.send(self._encoder.encode(plan))

    def record_graph(self) -> None:
        """Have the other ranks record the next of their missing graphs, which is the same for all."""
        self._socket.send(RECORD_GRAPH)

    def note(self, tokens: Sequence[int]) -> None:
        """Take in what a step sampled here; now and then compare with what the other ranks sampled.

        Raises:
            EngineDeadError: ranks disagree, or one has ended, so that these are no tokens.
        """
        self.check()
        if self._checksum.add(tokens):
            self._compare(Checksum(0, self._checksum.num_steps, self._checksum.value))
            self._receive(0)

    def check(self) -> None:
        """Whether all ranks still run.

        Raises:
            EngineDeadError: one has ended; the message says which and why.
        """
        if self._lost is not None:
            rank, reason = self._lost
            if rank not in self._reports:
                self._receive(LAST_REPORT_MS)
            raise EngineDeadError(self._reports.get(rank, reason))

    def explain(self, error: Exception) -> Exception:
        """What to raise for an error of rank 0: the loss of a rank, if that has caused it."""
        if isinstance(error, MinisglError) or not self._lost_event.wait(REASON_S):
            return error
        try:
            self.check()
        except EngineDeadError as cause:
            return cause
        return error

    def stop(self) -> None:
        """Ask the other ranks to end; after the loss of one, wait until nothing on this GPU waits for it."""
        with self._lock:
            self._closing = True
        if self._lost is None:
            self._socket.send(b"")
        else:
            self._lost_event.wait(ABORT_S)

    def close(self) -> None:
        """Wait for the other ranks to end if they were asked to, else end them; may be called twice."""
        with self._lock:
            if self._closed:
                return
            timeout_s = STOP_S if self._closing and self._lost is None else 0
            self._closing = self._closed = True
        self._processes.close(timeout_s)
        if self._nodes is not None:
            self._nodes.close(timeout_s)
        self._socket.close()
        self._remove_ipc_dir()

    def _remove_ipc_dir(self) -> None:
        if self._owns_ipc_dir:
            shutil.rmtree(self._ipc_dir, ignore_errors=True)

    def _welcome(self, node: int) -> Welcome:
        """What a node has to know; from a thread."""
        per_node = self._config.ranks_per_node
        ranks = range(node * per_node, (node + 1) * per_node)
        return Welcome(
            engine=self._config,
            ranks=tuple(NodeRank(rank, self._socket.addresses(rank)) for rank in ranks),
            store=self._store,
        )

    def _node_ended(self, node: int, ended: RankEnded | None) -> None:
        """From a thread."""
        if ended is None:
            self._lose(node * self._config.ranks_per_node, f"node {node} of --nnodes is gone")
        else:
            self._lose(ended.rank, f"rank {ended.rank} of --tp ended ({ended.how})")

    def _ended(self, rank: int, code: int, how: str) -> None:
        """From a thread for each rank, because rank 0 may be waiting for it on the device."""
        self._lose(rank, f"rank {rank} of --tp ended ({how})")

    def _lose(self, rank: int, reason: str) -> None:
        with self._lock:
            if self._closing or self._lost is not None:
                return
            self._lost = (rank, reason)
        logger.error("%s; all ranks end", reason)
        self._on_lost(reason)
        self._processes.kill()
        if self._nodes is not None:
            self._nodes.close(0)
        if self._on_cuda:
            self._abort()  # a collective without all its ranks never ends on a GPU; gloo notices
        self._lost_event.set()

    def _abort(self) -> None:
        # Lazy: a rank says who it is before it loads torch, through the messages above.
        from minisgl.parallel.mesh import abort

        abort(self._ranks)

    def _receive(self, timeout_ms: int) -> list[FromFollower]:
        """The ranks' messages; reports are kept and checksums compared."""
        messages = [self._decoder.decode(data) for data in self._socket.receive(timeout_ms)]
        for message in messages:
            if isinstance(message, Failed):
                self._reports[message.rank] = f"rank {message.rank} of --tp: {message.message}"
            elif isinstance(message, Started):
                self._starts[message.rank] = message
            elif isinstance(message, Checksum):
                self._compare(message)
        return messages

    def _compare(self, checksum: Checksum) -> None:
        values = self._checksums.setdefault(checksum.num_steps, {})
        values[checksum.rank] = checksum.value
        if len(set(values.values())) > 1:
            raise EngineDeadError(
                f"the ranks of --tp disagree about the tokens of the first {checksum.num_steps} steps; this "
                "is a bug in minisgl or a fault of a device"
            )
        if len(values) == self._config.tp:
            del self._checksums[checksum.num_steps]
