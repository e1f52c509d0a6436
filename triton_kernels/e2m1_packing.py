"""How the 4-bit numbers of MXFP4 (e2m1) lie in memory, and how a kernel makes 16-bit numbers of them.

As int4_packing.py, `packed` is uint8 [..., K / 128, N, 64]: blocks of 32 words of 16 bits, and word c has the
inputs c, 32 + c, 64 + c and 96 + c of its block. But a word's bits lie so that few instructions bring those
of an input to where bfloat16 has its sign, two bits of its exponent and one of its mantissa (15, 8, 7, 6):

    input of word c   sign   exponent and mantissa   then
          c             15   8, 7, 6
     32 + c              9   2, 1, 0                 shifted left by 6
     64 + c              5   14, 13, 12 of word c^1  rotated left by 10 with that word, as 32 bits
     96 + c             11   4, 3 and 10             shifted left by 4, the last one right by 4

A scale s stands for 2^(s - 127). Scales are int32 [..., K / 128, N], the four of a block in a word, each
where bfloat16 has its exponent:

    inputs 0 to 31 and 64 to 95     bits 14 to 7 and 30 to 23
    32 to 63 and 96 to 127          the same bits of the word rotated left by 8

They are larger by SCALE_OFFSET than stored, so such a bfloat16 is 2^(s - 65). The words of outputs n and
n + 8 of a tile of 16 are neighbours, as a warp wants them; those behind the last whole tile keep their order.

N outputs, K inputs, G = K / 32.
"""

# A constexpr is a plain value inside of a kernel.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triton_kernels.int4_packing import QUARTER, pack_int4, unpack_int4

SCALE_OFFSET = 62
"""What is added to scales, at most 192, which so still have 8 bits. It makes up for 2^62 of the 2^126 by
which numbers of e2m1 are too small; the sums are multiplied by the rest."""
SCALE_TILE = 16
"""Outputs of a tile, whose words of scales are in an order of their own."""
_SCALE_OFFSET = tl.constexpr(SCALE_OFFSET)
_QUARTER = tl.constexpr(QUARTER)
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


def pack_e2m1(codes: Tensor) -> Tensor:
    """Codes 0..15 [N, K] of any integer type, a sign and three bits -> uint8 [K / 128, N, 64].

    Raises:
        ValueError: K is no multiple of 128.
    """
    words = pack_int4(codes).view(torch.int16).int()  # the first input in the lowest bits
    a, b, c, d = (words >> shift & 15 for shift in (0, 4, 8, 12))
    other = _of_the_other_word(c)
    first = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 6 | (b & 7)
    second = (c & 8) << 2 | (other & 7) << 12 | (d & 8) << 8 | (d & 6) << 2 | (d & 1) << 10
    return (first | second).to(torch.int16).view(torch.uint8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The inverse of pack_e2m1: uint8 [N, K]."""
    words = packed.view(torch.int16).int()
    a = (words >> 12 & 8) | (words >> 6 & 7)
    b = (words >> 6 & 8) | (words & 7)
    c = (words >> 2 & 8) | (_of_the_other_word(words) >> 12 & 7)
    d = (words >> 8 & 8) | (words >> 2 & 6) | (words >> 10 & 1)
    return unpack_int4((a | b << 4 | c << 8 | d << 12).to(torch.int16).view(torch.uint8))


def _of_the_other_word(words: Tensor) -> Tensor:
    """The same with neighbours exchanged."""
    return words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def pack_scales(scales: Tensor) -> Tensor:
    """Scales, uint8 [N, G], at most 192 (not checked), G a multiple of 4 -> int32 [G / 4, N]."""
    a, b, c, d = (scales.long() + SCALE_OFFSET).unflatten(-1, (-1, 4)).unbind(-1)
    words = a << 7 | c << 23 | b >> 1 | (b & 1) << 31 | d >> 1 << 16 | (d & 1) << 15
    return _in_tiles(words.t(), 2, SCALE_TILE // 2).to(torch.int32)


def unpack_scales(words: Tensor) -> Tensor:
    """The inverse of pack_scales: int32 [G / 4, N] -> uint8 [N, G]."""
    bits = _in_tiles(words, SCALE_TILE // 2, 2).t().long() & 0xFFFFFFFF
    rotated = bits << 8 | bits >> 24
    four = torch.stack([bits >> 7, rotated >> 7, bits >> 23, rotated >> 23], -1) & 255
    return (four - SCALE_OFFSET).to(torch.uint8).flatten(-2)


def _in_tiles(words: Tensor, rows: int, columns: int) -> Tensor:
    """words [..., N] with each whole tile, as a matrix [rows, columns], transposed."""
    whole = words.shape[-1] // SCALE_TILE * SCALE_TILE
    tiles = words[..., :whole].unflatten(-1, (-1, rows, columns)).transpose(-1, -2).flatten(-3)
    return torch.cat([tiles, words[..., whole:]], -1)


@triton.jit
def place_of_scale(outputs, N: tl.constexpr):
    """Where pack_scales puts the scale of each output."""
    place = (outputs & -16) | ((outputs & 7) << 1) | ((outputs >> 3) & 1)
    if N % 16 == 0:
        return place
    else:
        return tl.where(outputs < N // 16 * 16, place, outputs)


@triton.jit
def scales_as_bf16(words):
    """2^(s - 65) of a word's scales, two bfloat16 in int32 each: of the first and third quarter of a block
    (the first in the low bits), and of the second and fourth."""
    bits = words.to(tl.uint32, bitcast=True)
    rotated = ((bits << 8) | (bits >> 24)).to(tl.int32, bitcast=True)
    return words & 0x7F807F80, rotated & 0x7F807F80


@triton.jit
def scales_as_f32(words):
    """2^(s - 127) of each of a word's four scales."""
    first, second = scales_as_bf16(words)
    return _f32(first << 16), _f32(second << 16), _f32(first & 0x7F800000), _f32(second & 0x7F800000)


@triton.jit
def _f32(exponents):
    return (exponents - (_SCALE_OFFSET << 23)).to(tl.float32, bitcast=True)


E2M1_PAIRS = tl.constexpr(
    "{ .reg .b32 a, b, zero; mov.b32 zero, 0x80008000; "
    "and.b32 a, $4, 0x81c081c0; fma.rn.bf16x2 $0, a, $5, zero; "
    "shl.b32 a, $4, 6; and.b32 a, a, 0x81c081c0; fma.rn.bf16x2 $1, a, $6, zero; "
    "shf.l.wrap.b32 a, $4, $4, 10; and.b32 a, a, 0x81c081c0; fma.rn.bf16x2 $2, a, $7, zero; "
    "shl.b32 a, $4, 4; and.b32 a, a, 0x81808180; shr.u32 b, $4, 4; "
    "lop3.b32 a, b, 0x00400040, a, 0xea; fma.rn.bf16x2 $3, a, $8, zero; }"
)
"""Two words -> a pair of each quarter, times a pair: $4 -> $0..$3, $5..$8. The bits of e2m1 where those of
bfloat16 are make a number 2^126 too small."""


@triton.jit
def e2m1_quarters(words, dtype: tl.constexpr):
    """Words, int16 [rows, 32] -> the numbers of each quarter, four tensors of the same shape."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        big = tl.full([1, 1], 8.507059173023462e37, tl.bfloat16)  # 2^126
        return tl.inline_asm_elementwise(
            E2M1_PAIRS,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, big, big, big, big],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        even, odd = tl.split(tl.reshape(bits, [bits.shape[0], _QUARTER // 2, 2]))
        other = tl.reshape(tl.join(odd, even), bits.shape)
        a = (bits >> 12 & 8) | (bits >> 6 & 7)
        b = (bits >> 6 & 8) | (bits & 7)
        c = (bits >> 2 & 8) | (other >> 12 & 7)
        d = (bits >> 8 & 8) | (bits >> 2 & 6) | (bits >> 10 & 1)
        return _e2m1(a, dtype), _e2m1(b, dtype), _e2m1(c, dtype), _e2m1(d, dtype)


@triton.jit
def _e2m1(codes, dtype: tl.constexpr):
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(dtype)
