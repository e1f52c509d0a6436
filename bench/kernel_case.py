"""What a case of bench/kernels.py is: a check, calls that rotate through input sets, what they cost."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

COLD_BYTES = 240 << 20  # four times the L2 of an H200
MAX_SETS = 64


class Case(NamedTuple):
    """One line of the table: how to check it and what to time."""

    op: str
    shape: str
    work: float  # bytes or FLOP of one call
    unit: str  # "TB/s" or "TFLOP/s"
    check: Callable[[], float]  # relative error; raises if wrong in a way that has no size
    calls: list[Callable[[], Any]]  # one per input set
    set_bytes: int  # memory one call touches


def relative_error(got: Tensor, expected: Tensor) -> float:
    """By norm, in float64; NaN or infinity in `got` raises."""
    if not got.isfinite().all():
        raise ValueError("not finite")
    expected = expected.double()
    return ((got.double() - expected).norm() / expected.norm()).item()


def poison(nbytes: int) -> None:
    """Leave NaN in the memory that the allocator will hand out next."""
    pieces = [torch.full((max(1, nbytes // 4),), float("nan"), device="cuda") for _ in range(4)]
    del pieces


def num_sets(set_bytes: int) -> int:
    """Input sets to rotate through, so that a call finds nothing of its own in L2."""
    at_least = 1 if set_bytes >= 1 << 30 else 2
    return max(at_least, min(MAX_SETS, math.ceil(COLD_BYTES / set_bytes)))
