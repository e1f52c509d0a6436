"""Host-side arithmetic of the launchers. Promise: torch.compile can trace all of it."""

import torch

ALIGNMENT = 4
"""Int32 values per 16 bytes. Arrays start at multiples of 16 bytes: Triton compiles another kernel for
unaligned pointers."""


def align_up(count: int) -> int:
    """`count` rounded up to the alignment, so that the array behind it is aligned, too."""
    return ceil_div(count, ALIGNMENT) * ALIGNMENT


def align_down(count: int) -> int:
    """`count` rounded down to the alignment."""
    return count // ALIGNMENT * ALIGNMENT


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n; n >= 1."""
    return 1 << (n - 1).bit_length()


@torch.compiler.assume_constant_result
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 2 elsewhere, where kernels run in Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@torch.compiler.assume_constant_result
def max_shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have on a CUDA device; a Hopper's elsewhere."""
    if device.type != "cuda":
        return 227 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
