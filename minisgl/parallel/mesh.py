"""The ranks of one engine as a torch process group and its device meshes.

Promise: one process takes part in one group at a time; whoever joins leaves again through `Ranks.leave`.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _abort_process_group

from minisgl.errors import ConfigError

JOIN_TIMEOUT_S = 120
"""How long a rank waits for the others where they meet, and for a collective on CPU."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    size: int
    mesh: DeviceMesh
    """All ranks in one dimension, "tp"."""
    device: torch.device

    @property
    def group(self) -> str:
        """The process group's name, by which the collectives' ops find it."""
        return self.mesh.get_group().group_name

    def mesh_of_copies(self, num_shards: int) -> DeviceMesh:
        """The ranks as [num_shards, copies]: neighbours hold the same shard."""
        places = torch.arange(self.size).view(num_shards, -1)
        return DeviceMesh(self.device.type, places, mesh_dim_names=("shard", "copy"))

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values; every rank must ask."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.mesh.get_group())
        return int(tensor.item())

    def leave(self) -> None:
        """Take the process group down; collectives are over for this process."""
        if dist.is_initialized():
            dist.destroy_process_group()


def join(rank: int, size: int, store: Path, device: torch.device) -> Ranks:
    """Meet the other ranks at `store`, a file that all of them can reach; gloo on CPU, NCCL on CUDA.

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
        store=dist.FileStore(str(store), size),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        device_id=device if device.type == "cuda" else None,
    )
    mesh = DeviceMesh(device.type, torch.arange(size), mesh_dim_names=("tp",))
    return Ranks(rank, size, mesh, device)


def abort_collectives() -> None:
    """Break off what waits for other ranks on a GPU; from any thread, and nothing works afterwards."""
    _abort_process_group()
