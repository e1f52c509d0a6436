"""Rank 0's connection to the other ranks: starts them, sends them step plans and watches them.

Promise: when a rank ends for any reason, all others end soon, and rank 0 raises the reason: a `ConfigError`
if a setting or the model is at fault, else an `EngineDeadError`. Rank 0 never waits for a rank that has
ended. After `close`, no process is left.
"""

import logging
import shutil
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from minisgl.config import ResolvedConfig
from minisgl.engine.ranks.job import Job, JobAnswers, attempt_store
from minisgl.engine.ranks.rank_processes import RankProcesses
from minisgl.errors import (
    DEVICE_FAULT_EXIT_CODE,
    ConfigError,
    DeviceFaultError,
    EngineDeadError,
    MinisglError,
)
from minisgl.ipc.transport import LeaderSocket, RankAddresses, make_ipc_dir
from minisgl.scheduler.plan import StepPlan, TokenMasks

if TYPE_CHECKING:  # it imports torch
    from minisgl.parallel.mesh import Ranks

logger = logging.getLogger(__name__)

STORE = "store"
"""The name of the file in the sockets' directory that is the ranks' torch store."""
START_TIMEOUT_S = 300.0
"""How long a rank may take until it joins: time for its imports."""
STOP_S = 3.0
"""How long a rank may take to end when told to stop."""
ABORT_S = 5.0
"""How long `stop` waits until collectives with a lost rank are aborted."""
REASON_S = 1.0
"""How long `cause_of` waits for the end of a rank that may have caused an error."""
LAST_REPORT_MS = 100
"""How long to wait for the last message of a rank that has ended."""
CHECKED_STEPS = 64
"""Number of steps between comparisons of the ranks' tokens."""


class FollowerConfig(msgspec.Struct, frozen=True):
    """The line on the stdin of a rank above 0."""

    engine: ResolvedConfig
    model_folder: str
    ipc_dir: str | None
    """The directory to remove if rank 0 is killed, by a rank that it started; None = none."""
    rank: int
    addresses: RankAddresses
    store: str
    """The address of the ranks' torch store, see `parallel.mesh.open_store`."""
    log_level: str


class Joining(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Rank -> rank 0: this rank is about to join the process group."""

    rank: int


class Failed(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Rank -> rank 0, the last message: the error that ends this rank."""

    rank: int
    message: str
    is_user_error: bool = False
    """The user can mend it, as in `messages.Fatal`."""
    is_device_fault: bool = False


class Checksum(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Rank -> rank 0: the checksum of all tokens up to a step."""

    rank: int
    num_steps: int
    value: int


class Started(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Rank -> rank 0: this rank is ready for plans."""

    rank: int
    weights_bytes: int
    """Bytes of its share of the weights."""
    load_ms: float
    """Milliseconds that loading or making the weights took."""
    peak_host_bytes: int


FromFollower = Joining | Failed | Checksum | Started


class Loss(NamedTuple):
    """The end of a rank that was not told to end."""

    rank: int
    reason: str
    is_device_fault: bool


class TokenChecksum:
    """A running checksum of the tokens that a rank sampled."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.value = 0

    def add(self, tokens: Sequence[int]) -> bool:
        """Add a step's tokens. Returns True if the ranks should compare checksums now."""
        self.value = zlib.crc32(array("q", tokens).tobytes(), self.value)
        self.num_steps += 1
        return self.num_steps % CHECKED_STEPS == 0


class FollowerLink:
    """Starts and controls the other ranks of an engine with `config.tp` ranks.

    Args:
        ipc_dir: a private directory for the sockets, which the caller removes. None: this object makes and
            removes one. A job needs none.
        on_lost: called with the reason, and whether it is a GPU fault, when a rank has ended, from another
            thread. The main thread may be waiting for that rank on the device.
        job: torchrun has started the other ranks, and ends this one when it loses one of them.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_folder: Path,
        *,
        ipc_dir: Path | None,
        on_lost: Callable[[str, bool], None],
        job: Job | None = None,
    ) -> None:
        self._config = config
        self._made_dir: Path | None = None
        if job is None:
            if ipc_dir is None:
                ipc_dir = self._made_dir = make_ipc_dir()
            place, self._store = ipc_dir, str(ipc_dir / STORE)
        else:
            # No directory: these ranks would leave it, because torchrun kills them.
            place, self._store = job.host, attempt_store(job.store)
        self._lock = threading.Lock()
        self._closing = False  # the end of a rank is no loss from now on
        self._closed = False
        self._lost: Loss | None = None
        self._lost_event = threading.Event()
        self._reports: dict[int, Failed] = {}
        self._starts: dict[int, Started] = {}
        self._checksum = TokenChecksum()
        self._checksums: dict[
            int, dict[int, int]
        ] = {}  # steps -> rank -> value; deleted once all ranks have reported
        self._on_cuda = config.device == "cuda"
        self._on_lost = on_lost
        self._ranks: Ranks | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromFollower)
        self._processes = RankProcesses(self._on_rank_ended)
        self._answers: JobAnswers | None = None
        try:
            self._socket = LeaderSocket(place, config.tp)
        except BaseException:
            self._remove_made_dir()
            raise
        try:
            level = logging.getLevelName(logger.getEffectiveLevel()).lower()

            def line_of(rank: int) -> bytes:
                line = FollowerConfig(
                    config,
                    str(model_folder),
                    None if ipc_dir is None else str(ipc_dir),
                    rank,
                    self._socket.addresses(rank),
                    self._store,
                    level,
                )
                return msgspec.json.encode(line)

            if job is None:
                for rank in range(1, config.tp):
                    self._processes.start(rank, line_of(rank))
            else:
                # Lazy: it imports torch.
                from minisgl.parallel.mesh import open_store

                self._answers = JobAnswers(open_store(job.store, config.tp), config.tp, line_of)
        except BaseException:
            self.close()
            raise

    @property
    def store(self) -> str:
        """The address of the ranks' torch store."""
        return self._store

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1 and above, unless torchrun started them."""
        return self._processes.pids

    def wait_for_all(self) -> None:
        """Wait until every rank is about to join.

        Raises:
            ConfigError, EngineDeadError: a rank has ended, as in `raise_if_lost`, or took too long.
        """
        missing = set(range(1, self._config.tp))
        deadline = time.monotonic() + START_TIMEOUT_S
        while missing:
            for message in self._receive(100):
                if isinstance(message, Joining):
                    missing.discard(message.rank)
            self.raise_if_lost()
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"rank {min(missing)} of --tp was not ready after {START_TIMEOUT_S:g} s"
                )

    def wait_for_starts(self) -> list[Started]:
        """Wait until every rank is ready for plans. Returns their reports, ordered by rank.

        Raises:
            ConfigError, EngineDeadError: a rank has ended, as in `raise_if_lost`.
        """
        while len(self._starts) < self._config.tp - 1:
            self._receive(100)
            self.raise_if_lost()
        return [self._starts[rank] for rank in sorted(self._starts)]

    def set_ranks(self, ranks: "Ranks") -> None:
        """Register the joined process group, whose collectives are aborted when a rank is lost."""
        self._ranks = ranks
        if self._lost is not None:
            self._stop_waiting()

    def send(self, plan: StepPlan) -> None:
        """Send a plan to the other ranks, which execute plans in order."""
        self._socket.send(self._encoder.encode(plan))

    def send_masks(self, masks: TokenMasks) -> None:
        """Send the masks of the plan that was sent last."""
        self._socket.send(self._encoder.encode(masks))

    def compare_tokens(self, tokens: Sequence[int]) -> None:
        """Add the tokens of rank 0's step, and regularly compare checksums with the other ranks.

        Raises:
            EngineDeadError: the ranks disagree, or one has ended, so that these tokens are invalid.
        """
        self.raise_if_lost()
        if self._checksum.add(tokens):
            self._compare(Checksum(0, self._checksum.num_steps, self._checksum.value))
            self._receive(0)

    def raise_if_lost(self) -> None:
        """Do nothing while all ranks run.

        Raises:
            ConfigError: a rank has ended because of a setting or the model.
            DeviceFaultError: a rank has ended because of a fault of its GPU.
            EngineDeadError: a rank has ended for another reason. The message says which one and why.
        """
        if self._lost is not None:
            rank, reason, is_device_fault = self._lost
            if rank not in self._reports:
                self._receive(LAST_REPORT_MS)
            report = self._reports.get(rank)
            kind = EngineDeadError
            if is_device_fault or (report is not None and report.is_device_fault):
                kind = DeviceFaultError
            elif report is not None and report.is_user_error:
                kind = ConfigError
            raise kind(reason if report is None else f"rank {rank} of --tp: {report.message}")

    def cause_of(self, error: Exception) -> Exception:
        """The exception to raise for an error of rank 0: the loss of a rank if one was lost, else `error`.

        Rank 0's GPU fails, too, when a kernel reads the memory of a rank that has ended.
        """
        is_settled = isinstance(error, MinisglError) and not isinstance(error, DeviceFaultError)
        if is_settled or not self._lost_event.wait(REASON_S):
            return error
        try:
            self.raise_if_lost()
        except MinisglError as cause:
            return cause
        return error

    def stop(self) -> None:
        """Tell the other ranks to end. After a loss, wait until the collectives on this GPU are aborted."""
        with self._lock:
            self._closing = True
        if self._lost is None:
            self._socket.send(b"")
        else:
            self._lost_event.wait(ABORT_S)

    def close(self) -> None:
        """Wait for the end of the other ranks if they were told to stop, else kill them.

        It may be called twice.
        """
        with self._lock:
            if self._closed:
                return
            timeout_s = STOP_S if self._closing and self._lost is None else 0
            self._closing = self._closed = True
        self._processes.close(timeout_s)
        if self._answers is not None:
            self._answers.close()
        self._socket.close()
        self._remove_made_dir()

    def _remove_made_dir(self) -> None:
        if self._made_dir is not None:
            shutil.rmtree(self._made_dir, ignore_errors=True)

    def _on_rank_ended(self, rank: int, code: int, how: str) -> None:
        """Handle the end of a rank. Called from a thread, as rank 0 may wait for the device."""
        self._handle_loss(Loss(rank, f"rank {rank} of --tp ended ({how})", code == DEVICE_FAULT_EXIT_CODE))

    def _handle_loss(self, loss: Loss) -> None:
        with self._lock:
            if self._closing or self._lost is not None:
                return
            self._lost = loss
        logger.error("%s; all ranks end", loss.reason)
        self._on_lost(loss.reason, loss.is_device_fault)
        self._processes.kill()
        self._stop_waiting()
        self._lost_event.set()

    def _stop_waiting(self) -> None:
        """End all waits of this process for other ranks, in the store and on its GPU."""
        if self._ranks is not None:
            self._ranks.lost.set()
        if self._on_cuda:  # without all ranks, a collective never ends on a GPU; gloo detects a lost rank
            # Lazy: a rank imports this module for its messages before it loads torch.
            from minisgl.parallel.mesh import abort

            abort(self._ranks)

    def _receive(self, timeout_ms: int) -> list[FromFollower]:
        """Receive the ranks' messages, store their reports, and compare their checksums."""
        messages = [self._decoder.decode(data) for data in self._socket.receive(timeout_ms)]
        for message in messages:
            if isinstance(message, Failed):
                self._reports[message.rank] = message
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
