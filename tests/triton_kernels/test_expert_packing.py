"""The order of experts' 4-bit numbers, number by number."""

import torch

from triton_kernels.expert_packing import pack_expert, repack_expert, unpack_expert
from triton_kernels.quantize_int4 import pack_int4


def some_numbers() -> torch.Tensor:
    return torch.randint(0, 16, (3, 256), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_each_number_lies_where_the_module_says() -> None:
    numbers = some_numbers()
    packed = pack_expert(numbers)
    assert packed.shape == (2, 3, 64)
    for output in range(3):
        for k in range(256):
            block, within = divmod(k, 128)
            quarter, word = divmod(within, 32)
            low, high = packed[block, output, 2 * word : 2 * word + 2].tolist()
            assert (low | high << 8) >> 4 * quarter & 15 == numbers[output, k]


def test_unpacking_is_the_inverse() -> None:
    numbers = some_numbers()
    assert torch.equal(unpack_expert(pack_expert(numbers)), numbers)


def test_repacking_a_layer_s_order() -> None:
    packed = pack_int4(some_numbers())
    repack_expert(packed)
    assert torch.equal(packed, pack_expert(some_numbers()))
