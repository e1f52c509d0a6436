"""Memory of each rank that the other ranks' GPUs can read and write: torch's symmetric memory.

Promise: either all ranks get it or none does. Multicast, which torch would use by default, stays off.
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
"""Most bytes of a sum; NCCL computes larger sums."""
IDLE_TIMEOUT_S = 30
"""How long the first sums may take. Other ranks may still be compiling the kernels."""


class SharedMemory:
    """This rank's region and the addresses of the others'. The memory lives as long as this object.

    Attributes:
        in_use: sums use this memory; False once a test has shown that they can't.
    """

    def __init__(self, group: str, rank: int, size: int, device: torch.device) -> None:
        self._region = symmetric_memory.empty(region_bytes(CAPACITY, size), dtype=torch.uint8, device=device)
        clear_region(self._region)
        torch.cuda.synchronize(device)
        # Some versions of torch have their own type for a group's name, which is a str.
        handle = symmetric_memory.rendezvous(self._region, group)  # pyright: ignore[reportArgumentType]
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        self.regions = Regions(addresses, rank, CAPACITY)
        self.in_use = True
        # Allocated now: an allocation could block while a kernel waits for a rank that has ended.
        self._stream = torch.cuda.Stream(device)
        self._release_flag = release_flag(self._region)
        self._one = torch.ones(1, dtype=torch.int64, pin_memory=True)

    def wait_until_idle(self) -> bool:
        """Wait until the GPU is idle. After `IDLE_TIMEOUT_S` release this rank and return False."""
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while not done.query():
            if time.monotonic() > deadline:
                self.release()
                return False
            time.sleep(0.001)
        return True

    def release(self) -> None:
        """End all waiting of this rank's GPU for other ranks; callable from any thread."""
        with torch.cuda.stream(self._stream):
            self._release_flag.copy_(self._one, non_blocking=True)


def share_memory(
    group: str, rank: int, size: int, device: torch.device, minimum: Callable[[int], int]
) -> SharedMemory | None:
    """Allocate a region for each rank of a group on one host, where rank i uses GPU i. All ranks must call.

    Returns:
        This rank's part; None on all ranks if the GPUs or torch can't share memory.

    Args:
        minimum: a collective that returns the smallest of the ranks' values.
    """
    others = [other for other in range(size) if other != rank]
    reaches = size <= MAX_RANKS and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    if not minimum(reaches):
        logger.warning("the GPUs can't reach each other's memory, so NCCL does all sums, which takes longer")
        return None
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # torch has no other way to switch it off
    shared = None
    try:
        shared = SharedMemory(group, rank, size, device)
    except RuntimeError:
        logger.warning("torch can't share the GPUs' memory, so NCCL does all sums; it said:", exc_info=True)
    return shared if minimum(shared is not None) else None
