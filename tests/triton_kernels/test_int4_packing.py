"""The order of 4-bit numbers, number by number."""

import pytest
import torch

from triton_kernels.e2m1_packing import SCALE_OFFSET, pack_e2m1, pack_scales, unpack_e2m1, unpack_scales
from triton_kernels.int4_packing import pack_int4, unpack_int4


def some_numbers() -> torch.Tensor:
    return torch.randint(0, 16, (3, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_each_number_lies_where_the_module_says() -> None:
    numbers = some_numbers()
    packed = pack_int4(numbers.int())
    assert packed.shape == (2, 3, 64)
    for output in range(3):
        for k in range(256):
            block, within = divmod(k, 128)
            quarter, word = divmod(within, 32)
            low, high = packed[block, output, 2 * word : 2 * word + 2].tolist()
            assert (low | high << 8) >> 4 * quarter & 15 == numbers[output, k]


def test_unpacking_is_the_inverse() -> None:
    numbers = some_numbers()
    assert torch.equal(unpack_int4(pack_int4(numbers)), numbers)


def test_the_bits_of_a_byte_are_a_bfloat16_that_a_power_of_two_makes_its_numbers() -> None:
    """What INT4_PAIRS relies on: for the lower four bits a factor of 2^126, for the upper ones 2^122."""
    for byte in range(256):
        for bits, factor in ((byte & 15, 2.0**126), (byte & 0xF0, 2.0**122)):
            as_bfloat16 = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)
            number = byte & 15 if factor == 2.0**126 else byte >> 4
            assert as_bfloat16.double() * factor == number / 128


def test_a_width_that_is_no_multiple_of_128_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 128 inputs, got 192"):
        pack_int4(torch.zeros(4, 192, dtype=torch.int32))


def test_bits_of_e2m1_are_where_its_document_says():
    rng = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (3, 256), generator=rng)
    packed = pack_e2m1(codes)
    assert packed.shape == (2, 3, 64)
    assert torch.equal(unpack_e2m1(packed), codes.to(torch.uint8))
    places = {0: (15, (8, 7, 6)), 32: (9, (2, 1, 0)), 64: (5, (14, 13, 12)), 96: (11, (4, 3, 10))}
    words = packed.view(torch.int16).int() & 0xFFFF
    for block, row, word in ((0, 0, 0), (0, 1, 7), (1, 2, 30)):
        for first, (sign, others) in places.items():
            code = int(codes[row, block * 128 + first + word])
            own = int(words[block, row, word])
            holder = int(words[block, row, word ^ 1]) if first == 64 else own
            bits = [own >> sign & 1, *(holder >> place & 1 for place in others)]
            assert bits == [code >> 3 & 1, code >> 2 & 1, code >> 1 & 1, code & 1]


@pytest.mark.parametrize("outputs", [32, 24, 5])
def test_scales_of_e2m1_are_where_its_document_says(outputs: int) -> None:
    rng = torch.Generator().manual_seed(3)
    scales = torch.randint(0, 193, (outputs, 8), generator=rng).to(torch.uint8)
    words = pack_scales(scales)
    assert (words.shape, words.dtype) == ((2, outputs), torch.int32)
    assert torch.equal(unpack_scales(words), scales)
    in_order = [*range(outputs)]
    for tile in range(outputs // 16):
        in_order[16 * tile : 16 * tile + 16] = [16 * tile + n + half for n in range(8) for half in (0, 8)]
    for block in range(2):
        for place, output in enumerate(in_order):
            word = int(words[block, place]) & 0xFFFFFFFF
            rotated = (word << 8 | word >> 24) & 0xFFFFFFFF
            four = [word >> 7, rotated >> 7, word >> 23, rotated >> 23]
            stored = scales[output, 4 * block : 4 * block + 4].tolist()
            assert [bits & 255 for bits in four] == [s + SCALE_OFFSET for s in stored]
