"""What launchers know of a GPU: the properties on which kernels and configurations depend.

Promise: nothing else in this library asks a device for its properties. What a GPU can do is said here once;
each op's default configuration takes a `Gpu` and fits it.
"""

from typing import NamedTuple

import torch

OLDEST = (8, 0)
"""The compute capability from which the kernels run: Ampere's bfloat16 and asynchronous copies."""
MOST_SHARED_BYTES = 227 * 1024
"""A Hopper's."""
COMPILER_BYTES = 1024
"""Shared memory of a program that launchers leave to the compiler, for barriers and reductions."""


class Gpu(NamedTuple):
    """The properties of a GPU."""

    capability: tuple[int, int]
    shared_bytes: int  # most shared memory of one program ("opt-in")
    multiprocessors: int

    @property
    def starts_early(self) -> bool:
        """Whether a kernel may start before the previous one has ended; see early_start.py."""
        return self.capability >= (9, 0)

    @property
    def has_fp8(self) -> bool:
        """Whether it multiplies numbers of e4m3, and converts to and from them."""
        return self.capability >= (8, 9)

    @property
    def has_tma(self) -> bool:
        """Whether it copies tiles by descriptors (TMA).

        Elsewhere Triton compiles descriptors to ordinary loads, but does not pipeline them.
        """
        return self.capability >= (9, 0)

    @property
    def is_hopper(self) -> bool:
        """Whether it runs kernels that are made for a Hopper's registers, shared memory and speed."""
        return self.capability == (9, 0)

    @property
    def has_wgmma(self) -> bool:
        """Whether it has Hopper's matrix instructions, which later GPUs do not have."""
        return self.is_hopper

    @property
    def multiplies_from_shared(self) -> bool:
        """Whether matrix instructions read their operands from shared memory: wgmma, tcgen05.

        Elsewhere (Ampere, Ada, Blackwell's GeForce and RTX PRO) operands take registers: smaller tiles.
        """
        return (9, 0) <= self.capability < (12, 0)

    def stages_that_fit(self, stages: int, stage_bytes: int, other_bytes: int = 0) -> int:
        """The most pipeline stages, up to `stages`, whose tiles fit; at least 1.

        A loop of n stages keeps n tiles in shared memory, or n - 1 if a tile goes through registers.
        """
        tiles = (self.shared_bytes - COMPILER_BYTES - other_bytes) // stage_bytes
        return max(1, min(stages, tiles if self.multiplies_from_shared else tiles + 1))


ELSEWHERE = Gpu((9, 0), MOST_SHARED_BYTES, 2)
"""Stands in for the GPU in Triton's interpreter: few programs, and a Hopper's configurations."""


def gpu_of(device: torch.device) -> Gpu:
    """The properties of a CUDA device; ELSEWHERE for other devices.

    torch.compile can't trace what is done with them: traced code calls a function that it takes for constant.
    """
    if device.type != "cuda":
        return ELSEWHERE
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        (properties.major, properties.minor),
        properties.shared_memory_per_block_optin,
        properties.multi_processor_count,
    )


@torch.compiler.assume_constant_result
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 elsewhere, where kernels run in Triton's interpreter."""
    return gpu_of(device).multiprocessors
