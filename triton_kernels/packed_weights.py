"""Weights of linear layers in layouts that a CPU's libraries multiply by faster.

    bfloat16, on processors with AVX-512        oneDNN's own order
    float32 that float16 holds, on any x86      float16 in FBGEMM's own order: half of the bytes to read

A checkpoint in bfloat16 is float32 where the processor has no instructions for bfloat16. Its numbers have
eight significant bits and float16 has eleven, so with a power of two that brings a weight's largest element
close to float16's largest, float16 holds them. Products and sums stay float32.

N outputs, K inputs.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

PACKED_FOR_ROWS = 8
"""oneDNN's hint for packing. What it chooses for 8 rows is as fast for 1 and for 512 as what it chooses for
these."""
LARGEST_POWER = 14
"""Elements are brought below 2 ** (LARGEST_POWER + 1); float16 ends below 2 ** 16."""
ELEMENTS_AT_ONCE = 1 << 25
"""Of a weight that FBGEMM packs in one call, which nothing can stop: a second. More pieces are slower."""
ELEMENTS_CHECKED_AT_ONCE = 1 << 22
"""So that copies of them take little memory."""
ROUNDING = 2.0**-25
"""Half of float16's smallest number: how far from float16 an element may be, once the largest is 2 ** 14 or
more. So elements with eight significant bits are exact down to 2 ** -31 of the largest; smaller ones are off
by at most 2 ** -39 of it."""

Packed = tuple[torch.ScriptObject, ...]

_multiply = torch.ops.quantized.linear_dynamic_fp16.default._op
"""A product of one row takes 100 us, and finding out whether an object such as `packed` overrides torch's
functions 25: 22 in C++, unless that is disabled, and 3 in Python, which `_op` leaves out."""


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is of one of these layouts."""
    return weight.is_mkldnn or isinstance(weight, HalfWeight)


def can_pack(weight: Tensor) -> bool:
    """Whether `pack_weight` takes it: a plain one of bfloat16, on a processor with AVX-512."""
    return (
        weight.dtype == torch.bfloat16
        and not weight.is_mkldnn
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_weight(weight: Tensor) -> Tensor:
    """A copy of weight [N, K] in the layout that oneDNN's products read, with the shape and type of `weight`.

    Only `linear` takes it, with any number of rows.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)


class HalfWeight(Tensor):
    """A float32 weight [N, K] that is kept as float16; `halve_weight` makes one.

    Only `linear` takes it, with any number of rows. It is a tensor so that it can be a parameter, but besides
    its shape and type only `detach` works.

    Args:
        packed: FBGEMM's copies of all rows times `factor`, some rows in each.
    """

    # As torch's notes on tensor subclasses have it; its own annotation misses it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __new__(
        cls, shape: torch.Size, packed: tuple[torch.ScriptObject, ...], factor: float
    ) -> "HalfWeight":
        """Make the shell that torch sees."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=torch.device("cpu"))

    def __init__(self, shape: torch.Size, packed: Packed, factor: float) -> None:
        self.packed = packed
        self.factor = factor

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            (weight,) = arguments
            return cls(weight.shape, weight.packed, weight.factor)
        raise NotImplementedError(f"{function} of a packed weight: needs what `unpack_weight` returns")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Without the elements, for which torch would ask."""
        return f"HalfWeight{tuple(self.shape)}"

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The op `linear` for x, float32 [rows, K]."""
        with torch._C.DisableTorchFunctionSubclass():
            parts = [_multiply(x, part) for part in self.packed]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if self.factor != 1:
            y.mul_(1 / self.factor)
        return y if bias is None else y.add_(bias)


def can_halve(weight: Tensor) -> bool:
    """Whether to try `halve_weight`: a plain float32 weight of an x86."""
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and not is_packed(weight)
        and torch.backends.quantized.engine in ("x86", "fbgemm")
    )


def halve_weight(weight: Tensor, goes_on: Callable[[], bool] = lambda: True) -> HalfWeight | None:
    """A copy of weight [N, K] in half of the memory; None = float16 does not hold its elements.

    It takes some 30 ns an element.

    Args:
        goes_on: is asked now and then; False = return None.
    """
    if not weight.numel():
        return None
    low, high = (extreme.item() for extreme in weight.aminmax())
    peak = max(-low, high)
    if not 0 < peak < math.inf:
        return None
    factor = 1.0
    if not _is_held(weight, factor, 0, goes_on):
        factor = 2.0 ** (LARGEST_POWER - math.frexp(peak)[1] + 1)
        if not _is_held(weight, factor, ROUNDING, goes_on):
            return None
    packed = []
    for rows in weight.split(max(ELEMENTS_AT_ONCE // weight.shape[1], 1)):
        if not goes_on():
            return None
        scaled = rows if factor == 1 else rows * factor
        packed.append(torch.ops.quantized.linear_prepack_fp16(scaled, None))
    return HalfWeight(weight.shape, tuple(packed), factor)


def _is_held(weight: Tensor, factor: float, rounding: float, goes_on: Callable[[], bool]) -> bool:
    """Whether float16 is never further than `rounding` from an element times `factor`."""
    for rows in weight.split(max(ELEMENTS_CHECKED_AT_ONCE // weight.shape[1], 1)):
        scaled = rows * factor
        # Not "greater than": where both are infinite, the difference is no number.
        if not goes_on() or not (scaled.half().float() - scaled).abs_().max() <= rounding:
            return False
    return True


def unpack_weight(packed: Tensor) -> Tensor:
    """The weight [N, K] that was packed, or halved, which may have lost bits (`ROUNDING`)."""
    if not isinstance(packed, HalfWeight):
        return packed.to_dense()
    rows = [torch.ops.quantized.linear_unpack_fp16(part)[0] for part in packed.packed]
    return torch.cat(rows).div_(packed.factor)
