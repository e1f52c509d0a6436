"""The order of 4-bit numbers, number by number."""

import pytest
import torch

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


def test_a_width_that_is_no_multiple_of_128_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 128 inputs, got 192"):
        pack_int4(torch.zeros(4, 192, dtype=torch.int32))
