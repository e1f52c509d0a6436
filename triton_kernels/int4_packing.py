"""How 4-bit numbers lie in memory, and how a kernel makes 16-bit numbers of them.

`packed` is uint8 [..., K / 128, N, 64]. Two bytes next to each other are a word: bits 0-3 of word c of a
block are its input c, bits 4-7 input 32 + c, bits 8-11 input 64 + c, bits 12-15 input 96 + c. So two words,
one register of a thread, are pairs of neighbours in each quarter of the block. A mask, and one shift for both
last quarters, brings a pair to where bfloat16 has its bits. A group of 32 inputs is a quarter.

N outputs, K inputs.
"""

# A constexpr is a plain value inside of a kernel.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

BLOCK = 128
"""Inputs of a packed block."""
BLOCK_BYTES = BLOCK // 2
"""Of one output."""
QUARTER = BLOCK // 4
"""Inputs of a quarter of a block, and its words."""
MIDDLE = 8
"""Stands for 0 in weights without zero points."""
_BLOCK = tl.constexpr(BLOCK)
_QUARTER = tl.constexpr(QUARTER)
_MIDDLE = tl.constexpr(MIDDLE)
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


def pack_int4(numbers: Tensor) -> Tensor:
    """Numbers 0..15 [N, K] of any integer type -> uint8 [K / 128, N, 64].

    Raises:
        ValueError: K is no multiple of 128.
    """
    if numbers.shape[1] % BLOCK:
        raise ValueError(f"4-bit weights need a multiple of {BLOCK} inputs, got {numbers.shape[1]}")
    first, second, third, fourth = numbers.to(torch.uint8).unflatten(1, (-1, 4, QUARTER)).unbind(2)
    words = torch.stack([first | second << 4, third | fourth << 4], -1).flatten(-2)
    return words.transpose(0, 1).contiguous()


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of pack_int4: uint8 [N, K]."""
    low, high = packed.unflatten(-1, (QUARTER, 2)).unbind(-1)
    quarters = torch.stack([low & 15, low >> 4, high & 15, high >> 4], -2)
    return quarters.transpose(0, 1).flatten(1)


# The bits of a byte alone make a bfloat16 that is that byte times 2^-133, up to 255: below 2^-126 there is no
# leading one, and the first numbers that have one go on in the same steps. So no shift brings the upper four
# bits of a byte down but a multiplication, which takes a GPU half as long: 2^126, or 2^122 for these.
_FACTORS = "mov.b32 low, 0x7e807e80; mov.b32 high, 0x7c807c80; "
_TWO_QUARTERS = (
    "and.b32 a, {0}, 0x000f000f; and.b32 b, {0}, 0x00f000f0; "
    "fma.rn.bf16x2 {1}, a, low, {3}; fma.rn.bf16x2 {2}, b, high, {4}; "
)
LOW_BYTES = tl.constexpr(
    "{ .reg .b32 a, b, low, high; " + _FACTORS + _TWO_QUARTERS.format("$2", "$0", "$1", "$3", "$4") + "}"
)
"""Two words -> a pair of both first quarters, as of `int4_quarters`: $2 -> $0, $1; addends in $3, $4."""
HIGH_BYTES = tl.constexpr(
    "{ .reg .b32 a, b, c, low, high; shr.u32 c, $2, 8; "
    + _FACTORS
    + _TWO_QUARTERS.format("c", "$0", "$1", "$3", "$4")
    + "}"
)
"""The same of both last quarters."""
INT4_PAIRS = tl.constexpr(
    "{ .reg .b32 a, b, c, low, high; shr.u32 c, $4, 8; "
    + _FACTORS
    + _TWO_QUARTERS.format("$4", "$0", "$1", "$5", "$6")
    + _TWO_QUARTERS.format("c", "$2", "$3", "$7", "$8")
    + "}"
)
"""The same of all four: $4 -> $0..$3, addends in $5..$8."""


@triton.jit
def int4_quarters(words, first, second, third, fourth, dtype: tl.constexpr):
    """Words, int16, of whole numbers -> the numbers of each quarter less its zero points, four tensors.

    They are divided by `int4_divisor(dtype)`.

    Args:
        first, second, third, fourth: the quarters' zero points; each broadcasts to the words' shape.
    """
    first, second = int4_base(first, dtype), int4_base(second, dtype)
    third, fourth = int4_base(third, dtype), int4_base(fourth, dtype)
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            INT4_PAIRS,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, first, second, third, fourth],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        return (
            (bits & 15).to(dtype) + first,
            (bits >> 4 & 15).to(dtype) + second,
            (bits >> 8 & 15).to(dtype) + third,
            (bits >> 12 & 15).to(dtype) + fourth,
        )


@triton.jit
def int4_divisor(dtype: tl.constexpr):
    """What the numbers of `int4_quarters` have to be multiplied by; a power of two."""
    return 128.0 if dtype == tl.bfloat16 and not _INTERPRETED else 1.0


@triton.jit
def int4_base(zeros, dtype: tl.constexpr):
    """What int4_quarters adds for these zero points: of `dtype`, exact."""
    return (zeros.to(tl.float32) * (-1.0 / int4_divisor(dtype))).to(dtype)


@triton.jit
def quarter_values(pointers, block, N, GROUP: tl.constexpr):
    """Scales or zero points of a block's quarters, four tensors with a last dimension of 1.

    Args:
        pointers: to the outputs' values of the first group, of any shape.
        block: of the same shape, or a number.
    """
    row = block * (_BLOCK // GROUP)
    first = tl.expand_dims(tl.load(pointers + row * N), -1)
    third = first
    if GROUP < _BLOCK:
        third = tl.expand_dims(tl.load(pointers + (row + 2 * _QUARTER // GROUP) * N), -1)
    second = first
    fourth = third
    if GROUP == _QUARTER:
        second = tl.expand_dims(tl.load(pointers + (row + 1) * N), -1)
        fourth = tl.expand_dims(tl.load(pointers + (row + 3) * N), -1)
    return first, second, third, fourth


@triton.jit
def block_values(scales, zeros, block, N, dtype: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """The scales of a block's quarters, then the zero points; pointers as of `quarter_values`."""
    s0, s1, s2, s3 = quarter_values(scales, block, N, GROUP)
    if HAS_ZEROS:
        z0, z1, z2, z3 = quarter_values(zeros, block, N, GROUP)
        return s0, s1, s2, s3, z0, z1, z2, z3
    else:
        middle = tl.full([1, 1], _MIDDLE, dtype)
        return s0, s1, s2, s3, middle, middle, middle, middle
