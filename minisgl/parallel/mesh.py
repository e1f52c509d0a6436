"""The ranks of one engine as a torch process group and its device meshes.

Promise: one process takes part in one group at a time; whoever joins leaves again through `Ranks.leave`,
which returns in bounded time even where other ranks are gone.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _abort_process_group

from minisgl.errors import ConfigError
from minisgl.parallel.regions import SharedMemory, share_memory
from triton_kernels.all_reduce import Regions

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120
"""How long a rank waits for the others where they meet, and for a collective on CPU."""
COME_TIMEOUT_S = 60
"""How long a rank that can't go on as planned waits for the others to say the same."""
LEAVE_TIMEOUT_S = 5
"""How long taking the group down may take."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    size: int
    mesh: DeviceMesh
    """All ranks in one dimension, "tp"."""
    device: torch.device
    store: Store
    """Where they met."""
    memory: SharedMemory | None = None
    """What small sums go through; None on CPU, and where the GPUs can't reach each other."""

    @property
    def group(self) -> str:
        """The process group's name, by which the collectives' ops find it."""
        return self.mesh.get_group().group_name

    @property
    def sums_are_ours(self) -> bool:
        """Whether small sums go through `memory`, by our kernel."""
        return self.memory is not None and self.memory.in_use

    @property
    def regions(self) -> Regions | None:
        """Of `memory`."""
        return None if self.memory is None else self.memory.regions

    def mesh_of_copies(self, num_shards: int) -> DeviceMesh:
        """The ranks as [num_shards, copies]: neighbours hold the same shard."""
        places = torch.arange(self.size).view(num_shards, -1)
        return DeviceMesh(self.device.type, places, mesh_dim_names=("shard", "copy"))

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values; every rank must ask."""
        return _minimum(value, self.device)

    def agree(self, value: int) -> bool:
        """Whether all ranks have the same value; every rank must ask."""
        return self.minimum(value) == -self.minimum(-value)

    def all_come(self, place: str) -> bool:
        """Whether all ranks call this with the same `place` within `COME_TIMEOUT_S`.

        It takes no collective: a rank that does not come may be waiting in one.
        """
        self.store.set(f"{place}/{self.rank}", "here")
        try:
            self.store.wait(
                [f"{place}/{rank}" for rank in range(self.size)], timedelta(seconds=COME_TIMEOUT_S)
            )
        except RuntimeError:  # how torch says that time is up
            return False
        return True

    def leave(self) -> None:
        """Take the process group down; collectives are over for this process.

        On a GPU, graphs that hold collectives must be gone: NCCL waits for their end.
        """
        if dist.is_initialized():
            _in_bounded_time(dist.destroy_process_group)


def open_store(place: str, size: int) -> Store:
    """Where ranks meet: the absolute path of a file that need not be there, or what `serve_store` gave."""
    if place.startswith("/"):
        return FileStore(place, size)
    host, _, port = place.rpartition(":")
    return TCPStore(host, int(port), timeout=timedelta(seconds=JOIN_TIMEOUT_S))


def serve_store(host: str) -> tuple[Store, str]:
    """A place for ranks on several hosts, at a free port of this one: it is there as long as the store is."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def join(rank: int, size: int, store: Store, device: torch.device, *, one_host: bool = True) -> Ranks:
    """Meet the other ranks at `store`; gloo on CPU, NCCL on CUDA.

    Args:
        one_host: all ranks are here, each with the GPU of its number.

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
    """Break off what waits for other ranks on a GPU; from any thread, and nothing works afterwards.

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
    """Call it; when it takes too long, leave it to a thread that ends with the process."""
    thread = threading.Thread(target=function, name="leave-ranks", daemon=True)
    thread.start()
    thread.join(LEAVE_TIMEOUT_S)
    if thread.is_alive():
        logger.warning("torch has not let go of the other ranks after %d s; going on", LEAVE_TIMEOUT_S)
