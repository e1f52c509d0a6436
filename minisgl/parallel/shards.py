"""Finds the part of a checkpoint tensor that a rank holds.

Promise: without ranks, torch's DTensor is not imported (that takes longer than reading a small model).
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter


class LocalShard(NamedTuple):
    """The part of a tensor that this rank holds."""

    memory: Tensor
    """The memory that the checkpoint is copied into."""
    place: tuple[slice, ...] | None
    """The slices of the whole tensor; None = zeros, because another rank holds the values."""


def shard_of(tensor: Tensor) -> LocalShard:
    """This rank's part of a DTensor, or the whole of a plain tensor."""
    if type(tensor) in (Tensor, Parameter):
        return LocalShard(tensor, tuple(slice(0, size) for size in tensor.shape))
    # Lazy: see the module's promise.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements) and mesh.get_local_rank() != 0:
        return LocalShard(tensor.to_local(), None)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    place = tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
    return LocalShard(tensor.to_local(), place)
