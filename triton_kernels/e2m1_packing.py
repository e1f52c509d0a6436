"""How the 4-bit numbers of MXFP4 (e2m1) lie in memory, and how a kernel makes 16-bit numbers of them.

As int4_packing.py, `packed` is uint8 [..., K / 128, N, 64]: blocks of 32 words of 16 bits, and word c has the
inputs c, 32 + c, 64 + c and 96 + c of its block. But a word's bits lie so that few instructions bring those
of an input to where bfloat16 has its sign, two bits of its exponent and one of its mantissa (15, 8, 7, 6):

    input of word c   sign   exponent and mantissa   then
          c             15   8, 7, 6
     32 + c              9   2, 1, 0                 shifted left by 6
     64 + c              5   14, 13, 12 of word c^1  rotated left by 10 with that word, as 32 bits
     96 + c             11   4, 3 and 10             shifted left by 4, the last one right by 4

N outputs, K inputs.
"""

# A constexpr is a plain value inside of a kernel.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triton_kernels.int4_packing import QUARTER, pack_int4, unpack_int4

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
