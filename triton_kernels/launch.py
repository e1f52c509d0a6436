"""Host-side arithmetic of the launchers. Promise: torch.compile can trace all of it."""

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
