"""What ranks do together within a step, as ops that torch.compile takes into its graph as they are.

    all_reduce_   x := the sum of all ranks' x
    all_gather    [N, C] on each rank -> [N, size * C], the ranks' columns one after the other

Promise: every rank that calls one in the same order gets the same bits. Groups go by name, which torch's own
registry turns into the process group, so nothing is kept here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

torch.library.define("minisgl::all_reduce_", "(Tensor(a!) x, str group) -> ()")
torch.library.define("minisgl::all_gather", "(Tensor x, int size, str group) -> Tensor")


def all_reduce_(x: Tensor, group: str) -> None:
    """Put the sum of all ranks' `x` in its place; contiguous, any shape."""
    torch.ops.minisgl.all_reduce_(x, group)


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """[N, C] -> [N, size * C]: each row is the ranks' rows one after the other."""
    return torch.ops.minisgl.all_gather(x, size, group)


@torch.library.impl("minisgl::all_reduce_", ("cpu", "cuda"))
def _all_reduce(x: Tensor, group: str) -> None:
    dist.all_reduce(x, group=_group(group))


@torch.library.register_fake("minisgl::all_reduce_")
def _all_reduce_fake(x: Tensor, group: str) -> None:
    pass


@torch.library.impl("minisgl::all_gather", ("cpu", "cuda"))
def _all_gather(x: Tensor, size: int, group: str) -> Tensor:
    num_rows, num_columns = x.shape
    by_rank = x.new_empty(size * num_rows, num_columns)
    # The group's own method: the public function has another name from one torch to the next.
    _group(group)._allgather_base(by_rank, x.contiguous()).wait()
    return by_rank.view(size, num_rows, num_columns).transpose(0, 1).reshape(num_rows, size * num_columns)


@torch.library.register_fake("minisgl::all_gather")
def _all_gather_fake(x: Tensor, size: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0], size * x.shape[1])


def _group(name: str) -> dist.ProcessGroup:
    # How torch's own compiled collectives find their group, too.
    resolve: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
    return resolve(name)
