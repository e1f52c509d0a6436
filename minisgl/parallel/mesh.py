"""The ranks of one engine: a torch process group and its device meshes.

Promise: a process is in one group at a time, and leaves it through `Ranks.leave`, which returns in bounded
time even if other ranks have ended.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _abort_process_group

from minisgl.errors import ConfigError
from minisgl.parallel.regions import SharedMemory, share_memory
from triton_kernels.all_reduce import Regions

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120
"""How long a rank waits for the others at the rendezvous, and for a collective on CPU."""
REACH_TIMEOUT_S = 60
"""How long a rank waits for the others' answers in the store."""
POLL_S = 0.001
"""Time between two looks into the store."""
LEAVE_TIMEOUT_S = 5
"""How long destroying the group may take."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    size: int
    mesh: DeviceMesh
    """All ranks in one dimension, "tp"."""
    device: torch.device
    store: Store
    """The store of the rendezvous."""
    memory: SharedMemory | None = None
    """Memory for small sums; None on CPU, and if the GPUs can't reach each other's memory."""
    lost: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set when another rank has ended, so that nothing waits for its answers. Only rank 0 sets it."""

    @property
    def group(self) -> str:
        """The process group's name, by which the collectives' ops find it."""
        return self.mesh.get_group().group_name

    @property
    def sums_use_kernel(self) -> bool:
        """Whether our kernel computes small sums, through `memory`."""
        return self.memory is not None and self.memory.in_use

    @property
    def regions(self) -> Regions | None:
        """The regions of `memory`; None without it."""
        return None if self.memory is None else self.memory.regions

    def mesh_of_copies(self, num_shards: int) -> DeviceMesh:
        """The ranks as a mesh [num_shards, copies], in which neighbouring ranks hold the same shard."""
        places = torch.arange(self.size).view(num_shards, -1)
        return DeviceMesh(self.device.type, places, mesh_dim_names=("shard", "copy"))

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values. A collective: every rank must call it."""
        return _minimum(value, self.device)

    def agree(self, value: int) -> bool:
        """Whether all ranks have the same value. A collective: every rank must call it."""
        return self.minimum(value) == -self.minimum(-value)

    def all_ranks_reach(self, place: str) -> bool:
        """Whether all ranks call this with the same `place` within `REACH_TIMEOUT_S`.

        This uses the store and no collective, because a missing rank may be waiting in a collective.
        """
        self.store.set(f"{place}/{self.rank}", "here")
        keys = [f"{place}/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + REACH_TIMEOUT_S
        while not self.store.check(keys):
            if self.lost.wait(POLL_S) or time.monotonic() > deadline:
                return False
        return True

    def leave(self) -> None:
        """Destroy the process group; this process can run no collective afterwards.

        On a GPU, delete the CUDA graphs with collectives first: NCCL waits until they are gone.
        """
        if dist.is_initialized():
            _in_bounded_time(dist.destroy_process_group)


def open_store(place: str, size: int) -> Store:
    """Open the ranks' store.

    Args:
        place: an absolute file path, or host:port of a store that torchrun serves. With a name behind a
            slash, it is a part of that store.
    """
    if place.startswith("/"):
        return FileStore(place, size)
    address, _, part = place.partition("/")
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), timeout=timedelta(seconds=JOIN_TIMEOUT_S))
    return PrefixStore(part, store) if part else store


def join(rank: int, size: int, store: Store, device: torch.device, *, one_host: bool = True) -> Ranks:
    """Join the other ranks at `store`; gloo on CPU, NCCL on CUDA.

    Args:
        one_host: all ranks are on this host, and rank i uses GPU i.

    Raises:
        ConfigError: this process is in a process group already.
    """
    if dist.is_initialized():
        raise ConfigError(
            "this process is in a torch.distributed group already, so no engine with --tp can run in it; "
            "close the other one first (LLM.close)"
        )
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        device_id=device if device.type == "cuda" else None,
    )
    mesh = DeviceMesh(device.type, torch.arange(size), mesh_dim_names=("tp",))
    memory = None
    if device.type == "cuda" and one_host:
        name = mesh.get_group().group_name
        memory = share_memory(name, rank, size, device, lambda value: _minimum(value, device))
    return Ranks(rank, size, mesh, device, store, memory)


def abort(ranks: Ranks | None) -> None:
    """Abort all waiting for other ranks on the GPU, from any thread. The group is unusable afterwards.

    Args:
        ranks: None if this process has not joined yet.
    """
    if ranks is not None and ranks.memory is not None:
        ranks.memory.release()
    if dist.is_initialized():
        _abort_process_group()


def _minimum(value: int, device: torch.device) -> int:
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor.item())


def _in_bounded_time(function: Callable[[], None]) -> None:
    """Call `function` in a daemon thread, and wait for it at most LEAVE_TIMEOUT_S."""
    thread = threading.Thread(target=function, name="leave-ranks", daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    if thread.is_alive():
        logger.warning("torch has not let go of the other ranks after %d s; going on", LEAVE_TIMEOUT_S)
