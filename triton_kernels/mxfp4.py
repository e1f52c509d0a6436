"""MXFP4: blocks of 32 numbers of 4 bits (e2m1) that share a power of two (e8m0), as gpt-oss stores experts.

    w[..., 32 * g + i] = NUMBERS[code] * 2^(s[..., g] - 127)

As stored: `blocks` uint8 [..., G, 16], byte j of a block has the code of input 2j in its low and of input
2j + 1 in its high bits; `scales` uint8 [..., G], 255 = NaN. In gpt-oss, rows of gate and up take turns.

Plain torch, for any device. Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

import torch
from torch import Tensor

BLOCK_OF_SCALE = 32
"""Numbers that share a scale."""
BIAS = 127
"""Of a scale: it stands for 2^(s - BIAS)."""
LARGEST_SCALE = 192
"""That kernels take; they take numbers with scales below 58 for 0."""
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By code."""
LARGEST_EXPONENT = 2
"""Of the largest number, 6."""
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""What lies halfway between two numbers; at places of even index, rounding to even goes down."""


def mxfp4_codes(blocks: Tensor) -> Tensor:
    """The codes 0..15 of stored blocks: uint8 [..., G, 16] -> uint8 [..., 32 * G]."""
    return torch.stack([blocks & 15, blocks >> 4], -1).flatten(-3)


def mxfp4_blocks(codes: Tensor) -> Tensor:
    """The inverse of mxfp4_codes: uint8 [..., K] -> uint8 [..., K / 32, 16]."""
    low, high = codes.unflatten(-1, (-1, BLOCK_OF_SCALE // 2, 2)).unbind(-1)
    return low | high << 4


def mxfp4_scales(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The powers of two that e8m0 stands for, float32 or float64, of the same shape; NaN for 255."""
    powers = torch.ldexp(torch.ones_like(scales, dtype=dtype), scales.to(torch.int32) - BIAS)
    return powers.masked_fill(scales == 255, torch.nan)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of stored blocks: uint8 [..., G, 16] and uint8 [..., G] -> [..., 32 * G] of `dtype`.

    Exact in bfloat16, too, whose range is that of the scales.
    """
    return dequantize_mxfp4_codes(mxfp4_codes(blocks), scales, dtype)


def dequantize_mxfp4_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers of codes: uint8 [..., 32 * G] and uint8 [..., G] -> [..., 32 * G] of `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    table = torch.tensor(NUMBERS, dtype=wide, device=codes.device)
    numbers = table[codes.int()].unflatten(-1, (-1, BLOCK_OF_SCALE))
    return (numbers * mxfp4_scales(scales, wide).unsqueeze(-1)).flatten(-2).to(dtype)


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [..., K] rounded to MXFP4: (codes uint8 [..., K], scales uint8 [..., K / 32]).

    A block's scale follows from its largest number, as the specification says: of that number's power of two
    and the largest one of e2m1. Rounds to the nearest, ties to even; numbers beyond 6 become 6.

    Raises:
        ValueError: K is no multiple of 32.
    """
    if weight.shape[-1] % BLOCK_OF_SCALE:
        raise ValueError(f"MXFP4 needs a multiple of {BLOCK_OF_SCALE} inputs, got {weight.shape[-1]}")
    parts = weight.float().unflatten(-1, (-1, BLOCK_OF_SCALE))
    _, exponents = torch.frexp(parts.abs().amax(-1))  # of numbers in [0.5, 1)
    scales = (exponents - 1 - LARGEST_EXPONENT + BIAS).clamp(0, 254).to(torch.uint8)
    scaled = parts / mxfp4_scales(scales).unsqueeze(-1)
    size = scaled.abs()
    codes = torch.zeros_like(size, dtype=torch.uint8)
    for index, middle in enumerate(_BETWEEN):
        codes += size > middle if index % 2 == 0 else size >= middle
    codes |= torch.signbit(scaled).to(torch.uint8) << 3
    return codes.flatten(-2), scales
