"""How the experts' 4-bit numbers lie in memory, and how a kernel makes 16-bit numbers of them.

`packed` is uint8 [..., K / 128, N, 64]. Two bytes next to each other are a word: bits 0-3 of word c of a
block are its input c, bits 4-7 input 32 + c, bits 8-11 input 64 + c, bits 12-15 input 96 + c. So two words,
one register of a thread, are pairs of neighbours in each quarter of the block, and a pair takes a shift and a
mask to get where bfloat16 has its bits; and a group of 32 inputs is a quarter. N outputs, K inputs.
"""

# A constexpr is a plain value inside of a kernel.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triton_kernels.quantize_int4 import int4_base

QUARTER = 32
"""Inputs of a quarter of a block, and its words."""
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


def pack_expert(numbers: Tensor) -> Tensor:
    """Numbers 0..15 [N, K] of any integer type, K a multiple of 128 -> uint8 [K / 128, N, 64]."""
    quarters = numbers.to(torch.uint8).unflatten(1, (-1, 4, QUARTER)).unbind(2)
    return _words(*quarters).transpose(0, 1).contiguous()


def unpack_expert(packed: Tensor) -> Tensor:
    """The inverse of pack_expert: uint8 [N, K]."""
    low, high = packed.unflatten(-1, (QUARTER, 2)).unbind(-1)
    quarters = torch.stack([low & 15, low >> 4, high & 15, high >> 4], -2)
    return quarters.transpose(0, 1).flatten(1)


def repack_expert(packed: Tensor) -> None:
    """From quantize_int4.py's order, in place: uint8 [K / 128, N, 64]."""
    first, second = packed.unflatten(-1, (2, QUARTER)).unbind(-2)
    packed.copy_(_words(first & 15, second & 15, first >> 4, second >> 4))


def _words(first: Tensor, second: Tensor, third: Tensor, fourth: Tensor) -> Tensor:
    """Quarters of numbers [..., 32] -> bytes [..., 64]."""
    return torch.stack([first | second << 4, third | fourth << 4], -1).flatten(-2)


# Two words to four pairs of numbers. The bits of e2m1 where those of bfloat16 are make a number 2^126 too
# small. In one line, because torch.compile copies a constant into code of its own.
_E2M1 = tl.constexpr(
    "{ .reg .b32 a, b, big, zero; "
    "mov.b32 big, 0x7e807e80; "
    "mov.b32 zero, 0x80008000; "
    "shl.b32 a, $4, 6; and.b32 a, a, 0x01c001c0; shl.b32 b, $4, 12; "
    "lop3.b32 a, b, 0x80008000, a, 0xea; fma.rn.bf16x2 $0, a, big, zero; "
    "shl.b32 a, $4, 2; and.b32 a, a, 0x01c001c0; shl.b32 b, $4, 8; "
    "lop3.b32 a, b, 0x80008000, a, 0xea; fma.rn.bf16x2 $1, a, big, zero; "
    "shr.b32 a, $4, 2; and.b32 a, a, 0x01c001c0; shl.b32 b, $4, 4; "
    "lop3.b32 a, b, 0x80008000, a, 0xea; fma.rn.bf16x2 $2, a, big, zero; "
    "shr.b32 a, $4, 6; and.b32 a, a, 0x01c001c0; "
    "lop3.b32 a, $4, 0x80008000, a, 0xea; fma.rn.bf16x2 $3, a, big, zero; }"
)
# The same of whole numbers: in the low bits of 128.0 they are added to it; then the base is added.
_INT4 = tl.constexpr(
    "{ .reg .b32 a, one; "
    "mov.b32 one, 0x3f803f80; "
    "lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, a, one, $5; "
    "shr.u32 a, $4, 4; "
    "lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $1, a, one, $6; "
    "shr.u32 a, $4, 8; "
    "lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $2, a, one, $7; "
    "shr.u32 a, $4, 12; "
    "lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $3, a, one, $8; }"
)


@triton.jit
def e2m1_quarters(words, dtype: tl.constexpr):
    """Words, int16, of codes of e2m1 -> the numbers of each quarter, four tensors of the same shape."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _E2M1,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        return _e2m1(bits, dtype), _e2m1(bits >> 4, dtype), _e2m1(bits >> 8, dtype), _e2m1(bits >> 12, dtype)


@triton.jit
def _e2m1(codes, dtype: tl.constexpr):
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(dtype)


@triton.jit
def int4_quarters(words, first, second, third, fourth, dtype: tl.constexpr):
    """Words, int16, of whole numbers -> the numbers of each quarter less its zero points, four tensors.

    Args:
        first, second, third, fourth: the quarters' zero points; each broadcasts to the words' shape.
    """
    first, second = int4_base(first, dtype), int4_base(second, dtype)
    third, fourth = int4_base(third, dtype), int4_base(fourth, dtype)
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _INT4,
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
