"""Memory of each rank that the other ranks' GPUs can read and write: torch's symmetric memory.

Promise: all ranks get it or none does, and then each says so; multicast, which torch would use by itself,
stays off.
"""

import logging
import os
import time
from collections.abc import Callable

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from triton_kernels.all_reduce import MAX_RANKS, Regions, clear_region, region_bytes, release_flag

logger = logging.getLogger(__name__)

CAPACITY = 8 << 20
"""Bytes of a sum at most; NCCL adds up larger ones."""
SETTLE_S = 30
"""How long the first sums may take; the other ranks may have to compile the kernels still."""


class SharedMemory:
    """A rank's region and where it finds those of the others; all hold as long as this object lives.

    Attributes:
        in_use: sums go through it; False as soon as it turns out that they can't.
    """

    def __init__(self, group: str, rank: int, size: int, device: torch.device) -> None:
        self._region = symmetric_memory.empty(region_bytes(CAPACITY, size), dtype=torch.uint8, device=device)
        clear_region(self._region)
        torch.cuda.synchronize(device)
        # A group's name is a str; torch has a type of its own for it, and not in every version.
        handle = symmetric_memory.rendezvous(self._region, group)  # pyright: ignore[reportArgumentType]
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        self.regions = Regions(addresses, rank, CAPACITY)
        self.in_use = True
        # Made now: allocating while a kernel waits for a rank that is gone might wait, too.
        self._stream = torch.cuda.Stream(device)
        self._release_flag = release_flag(self._region)
        self._one = torch.ones(1, dtype=torch.int64, pin_memory=True)

    def has_settled(self) -> bool:
        """Whether the GPU gets done with what it has within `SETTLE_S`; if not, this rank is released."""
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + SETTLE_S
        while not done.query():
            if time.monotonic() > deadline:
                self.release()
                return False
            time.sleep(0.001)
        return True

    def release(self) -> None:
        """Let this rank's GPU wait for no other any more; from any thread."""
        with torch.cuda.stream(self._stream):
            self._release_flag.copy_(self._one, non_blocking=True)


def share_memory(
    group: str, rank: int, size: int, device: torch.device, minimum: Callable[[int], int]
) -> SharedMemory | None:
    """A region for each rank of a group on one host, whose GPUs have the ranks' numbers. All ranks must call.

    Returns:
        This rank's part; None on every rank where there is no such memory.

    Args:
        minimum: the smallest of what the ranks pass.
    """
    others = [other for other in range(size) if other != rank]
    reaches = size <= MAX_RANKS and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    if not minimum(reaches):
        logger.warning("the GPUs can't reach each other's memory, so NCCL does all sums, which takes longer")
        return None
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # torch asks nowhere else
    shared = None
    try:
        shared = SharedMemory(group, rank, size, device)
    except RuntimeError:
        logger.warning("torch can't share the GPUs' memory, so NCCL does all sums; it said:", exc_info=True)
    return shared if minimum(shared is not None) else None
