"""MXFP4: the stored blocks against transformers' own conversion, and rounding against every number."""

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from triton_kernels.mxfp4 import (
    NUMBERS,
    dequantize_mxfp4,
    dequantize_mxfp4_codes,
    mxfp4_blocks,
    mxfp4_codes,
    mxfp4_scales,
    quantize_mxfp4,
)


def test_stored_blocks_are_the_numbers_that_transformers_makes_of_them() -> None:
    rng = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=rng, dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), generator=rng, dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
        assert torch.equal(dequantize_mxfp4(blocks, scales, dtype), theirs)


def test_packing_is_the_inverse_of_unpacking() -> None:
    blocks = torch.randint(0, 256, (5, 2, 16), dtype=torch.uint8)
    codes = mxfp4_codes(blocks)
    assert codes[0, :4].tolist() == [blocks[0, 0, 0] % 16, blocks[0, 0, 0] // 16, blocks[0, 0, 1] % 16,
                                     blocks[0, 0, 1] // 16]  # fmt: skip
    assert torch.equal(mxfp4_blocks(codes), blocks)


def test_every_scale_is_a_power_of_two_in_bfloat16_too() -> None:
    scales = torch.arange(256, dtype=torch.uint8)
    powers = mxfp4_scales(scales)
    assert powers[:255].double().tolist() == [2.0 ** (s - 127) for s in range(255)]
    assert powers[255].isnan()
    assert torch.equal(powers[:255].bfloat16().float(), powers[:255])


def test_rounding_goes_to_the_nearest_number_and_keeps_numbers_of_the_format() -> None:
    table = torch.tensor(NUMBERS)
    exact = torch.cat([table, -table]) * 0.25  # a block that has the largest number
    codes, scales = quantize_mxfp4(exact[None])
    assert torch.equal(dequantize_mxfp4_codes(codes, scales)[0], exact)
    weight = torch.randn(20, 96, generator=torch.Generator().manual_seed(1))
    weight[3, :32] = 0.0
    codes, scales = quantize_mxfp4(weight)
    powers = mxfp4_scales(scales).repeat_interleave(32, 1)
    got = dequantize_mxfp4_codes(codes, scales)
    distances = (weight[..., None] - table * powers[..., None]).abs()
    assert torch.equal((weight - got).abs(), distances.amin(-1))
    assert (weight / powers).abs().max() < 8
    assert torch.equal(got[3, :32], torch.zeros(32))


def test_halfway_between_two_numbers_rounding_is_to_even() -> None:
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    block = torch.tensor([6.0, *halves, *(-half for half in halves), *[0.0] * 17])
    codes, scales = quantize_mxfp4(block[None])
    got = dequantize_mxfp4_codes(codes, scales)[0, 1:8].tolist()
    assert got == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
