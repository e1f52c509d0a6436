"""The collectives of a step, as ops that torch.compile puts into its graph unchanged.

    all_reduce_        x := the sum of all ranks' x
    all_reduce_norm    RMSNorm of residual + the sum of all ranks' x, and that sum
    all_gather         [N, C] on each rank -> [N, size * C], the ranks' columns one after the other

Small sums use our kernel and memory that the ranks' GPUs share (regions.py); the tuning table says up to
which size. Larger sums, and all on CPU, use torch's process group, which ops find by name.

Promise: ranks that call the ops in the same order all get the same bits.
"""

import logging
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from minisgl.parallel.mesh import Ranks
from minisgl.parallel.regions import SharedMemory
from triton_kernels.all_reduce import (
    AllReduceConfig,
    Regions,
    all_reduce,
    all_reduce_config,
    all_reduce_norm,
)
from triton_kernels.rms_norm import add_rms_norm

logger = logging.getLogger(__name__)

REGIONS = "Tensor? addresses, int rank, int capacity"
torch.library.define("minisgl::all_reduce_", f"(Tensor(a!) x, {REGIONS}, str group) -> ()")
torch.library.define(
    "minisgl::all_reduce_norm",
    f"(Tensor(a!) x, Tensor residual, Tensor weight, float eps, {REGIONS}, str group) -> (Tensor, Tensor)",
)
torch.library.define("minisgl::all_gather", "(Tensor x, int size, str group) -> Tensor")


class RankSum(nn.Module):
    """The sum over ranks; all layers of a model share one."""

    addresses: Tensor | None

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        regions = ranks.regions
        self.register_buffer("addresses", None if regions is None else regions.addresses, persistent=False)
        self.rank = ranks.rank
        self.capacity = 0 if regions is None else regions.capacity
        self.group = ranks.group

    def prepare(self, ranks: Ranks, width: int, dtype: torch.dtype, *, eps: float | None) -> None:
        """Compile and test the kernels for all numbers of rows. Every rank must call this once.

        If a kernel fails, all sums use the process group and a warning says so.

        Args:
            eps: the eps that `norm` will get; None = the model calls `forward` instead.
        """
        if ranks.memory is None:
            return
        inputs: dict[AllReduceConfig, Tensor] = {}
        num_rows = 1
        while num_rows * width * dtype.itemsize <= self.capacity:
            x = torch.full((num_rows, width), self.rank + 1, dtype=dtype, device=ranks.device)
            inputs.setdefault(all_reduce_config(x, ranks.size), x)
            num_rows *= 2
        if not ranks.agree(zlib.crc32(repr(list(inputs)).encode())):
            logger.warning(
                "the ranks' GPUs or tuning tables differ, so NCCL does all sums, which takes longer"
            )
            self._leave_memory(ranks.memory)
            return
        works, expected = True, ranks.size * (ranks.size + 1) // 2
        for config, x in inputs.items():
            if not config.shots or not works:
                continue
            if eps is None:
                total = self(x)
            else:
                weight = torch.ones(width, dtype=dtype, device=ranks.device)
                total = self.norm(x, torch.zeros_like(x), weight, eps)[1]
            # One at a time: if a kernel never ends, loading the next one might never end either.
            works = ranks.memory.wait_until_idle() and bool((total == expected).all())
        if not ranks.minimum(works):
            logger.warning("sums through memory that the GPUs share don't work here, so NCCL does them all")
            self._leave_memory(ranks.memory)

    def _leave_memory(self, memory: SharedMemory) -> None:
        """From now on through the process group."""
        self.addresses = None
        memory.in_use = False

    def forward(self, x: Tensor) -> Tensor:
        """x, contiguous [T, M], becomes the sum of all ranks' x."""
        torch.ops.minisgl.all_reduce_(x, self.addresses, self.rank, self.capacity, self.group)
        return x

    def norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(sum of all ranks' x + residual), sum + residual), each [T, M]; x is lost."""
        return torch.ops.minisgl.all_reduce_norm(
            x, residual, weight, eps, self.addresses, self.rank, self.capacity, self.group
        )


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """[N, C] -> [N, size * C]: each row is the ranks' rows one after the other."""
    return torch.ops.minisgl.all_gather(x, size, group)


@torch.library.impl("minisgl::all_reduce_", ("cpu", "cuda"))
def _all_reduce(x: Tensor, addresses: Tensor | None, rank: int, capacity: int, group: str) -> None:
    by_kernel = _by_kernel(x, addresses, rank, capacity)
    if by_kernel is None:
        dist.all_reduce(x, group=_group(group))
    else:
        all_reduce(x, *by_kernel)


@torch.library.register_fake("minisgl::all_reduce_")
def _all_reduce_fake(x: Tensor, addresses: Tensor | None, rank: int, capacity: int, group: str) -> None:
    pass


@torch.library.impl("minisgl::all_reduce_norm", ("cpu", "cuda"))
def _all_reduce_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    addresses: Tensor | None,
    rank: int,
    capacity: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    by_kernel = _by_kernel(x, addresses, rank, capacity)
    if by_kernel is None:
        dist.all_reduce(x, group=_group(group))
        return add_rms_norm(x, residual, weight, eps)
    return all_reduce_norm(x, residual, weight, eps, *by_kernel)


@torch.library.register_fake("minisgl::all_reduce_norm")
def _all_reduce_norm_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    addresses: Tensor | None,
    rank: int,
    capacity: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(residual)


@torch.library.impl("minisgl::all_gather", ("cpu", "cuda"))
def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    num_rows, num_columns = x.shape
    by_rank = x.new_empty(size * num_rows, num_columns)
    # The group's own method, because the public function's name changes between versions of torch.
    _group(group)._allgather_base(by_rank, x.contiguous()).wait()
    return by_rank.view(size, num_rows, num_columns).transpose(0, 1).reshape(num_rows, size * num_columns)


@torch.library.register_fake("minisgl::all_gather")
def _all_gather_fake(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0], size * x.shape[1])


def _by_kernel(
    x: Tensor, addresses: Tensor | None, rank: int, capacity: int
) -> tuple[Regions, AllReduceConfig] | None:
    """The kernel's arguments if it should sum x; None = use the process group."""
    if addresses is None or x.numel() * x.element_size() > capacity:
        return None
    config = all_reduce_config(x, addresses.shape[0])
    return (Regions(addresses, rank, capacity), config) if config.shots else None


def _group(name: str) -> dist.ProcessGroup:
    # torch's own compiled collectives find their group the same way.
    resolve: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
    return resolve(name)
