"""The ranks of an engine as workers of a torchrun job: torchrun starts, watches and restarts all of them.

Rank 0 says to each other rank in the job's store what it must run. A restarted job may have the store of the
one before, so each rank asks under a name of its own, and only that is answered.

Promise: nothing that an earlier start of the job left in the store is believed.
"""

import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from minisgl.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:  # it imports torch
    from torch._C._distributed_c10d import Store

ANSWER_S = 300.0
"""How long a rank waits for rank 0, which waits for the server first."""
LOOK_S = 0.1


class Job(NamedTuple):
    """This process's place in a torchrun job."""

    rank: int
    size: int
    local_rank: int
    ranks_per_host: int
    host: str
    """Of rank 0."""
    port: int
    """Of the job's store, on that host."""

    @property
    def store(self) -> str:
        """The store's address, see `parallel.mesh.open_store`."""
        return f"{self.host}:{self.port}"


def job_from(environ: Mapping[str, str]) -> Job | None:
    """The job that torchrun put this process into; None = it did not start it.

    Raises:
        ConfigError: torchrun's variables can't be read, or its hosts have different numbers of ranks.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    try:
        rank, size, local_rank, local_size, port = (int(environ[name]) for name in names)
        host = environ["MASTER_ADDR"]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"torchrun's environment lacks a variable or has a wrong one: {error}") from None
    if size % local_size or rank % local_size != local_rank:
        raise ConfigError(
            f"all hosts need the same --nproc-per-node of torchrun, got {local_size} here and {size} in all"
        )
    return Job(rank, size, local_rank, local_size, host, port)


class JobAnswers:
    """Rank 0's answers to the other ranks, given from a thread of its own until `close`.

    Args:
        line: what a rank gets, by its number.
    """

    def __init__(self, store: "Store", size: int, line: Callable[[int], bytes]) -> None:
        self._store = store
        self._size = size
        self._line = line
        self._is_over = threading.Event()
        threading.Thread(target=self._answer, name="job-answers", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._is_over.set()

    def _answer(self) -> None:
        answered: set[bytes] = set()
        while not self._is_over.wait(LOOK_S):
            for rank in range(1, self._size):
                if not self._store.check([_asks(rank)]):
                    continue
                name = self._store.get(_asks(rank))
                if name not in answered:
                    answered.add(name)
                    self._store.set(_answers(rank, name.decode()), self._line(rank).decode())


def ask(store: "Store", rank: int) -> bytes:
    """What rank 0 says to this rank; waits for it.

    Raises:
        EngineDeadError: rank 0 did not answer within `ANSWER_S`.
    """
    name = uuid.uuid4().hex
    store.set(_asks(rank), name)
    try:
        store.wait([_answers(rank, name)], timedelta(seconds=ANSWER_S))
        return store.get(_answers(rank, name))
    except RuntimeError as error:  # torch's errors of a store that is slow or gone
        raise EngineDeadError(f"rank 0 of the job did not answer within {ANSWER_S:g} s ({error})") from None


def attempt_store(address: str) -> str:
    """The address of a part of the store that no other start of the job uses."""
    return f"{address}/{uuid.uuid4().hex}"


def _asks(rank: int) -> str:
    return f"minisgl/asks/{rank}"


def _answers(rank: int, name: str) -> str:
    return f"minisgl/answers/{rank}/{name}"
