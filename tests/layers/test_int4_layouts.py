"""Packed 4-bit numbers of each format, back in the order of their features."""

import pytest
import torch
from int4_models import AWQ_ORDER, words

from minisgl.layers.int4_layouts import (
    numbers_view,
    unpacked_numbers,
    unpacked_zeros,
    zeros_shape,
)
from minisgl.model_config.quantization import Int4Layout

PACKED = {
    Int4Layout.COMPRESSED: lambda numbers: words(numbers, 1),
    Int4Layout.AWQ: lambda numbers: words(numbers.t(), 1, AWQ_ORDER),
    Int4Layout.GPTQ: lambda numbers: words(numbers.t(), 0),
    Int4Layout.GPTQ_V2: lambda numbers: words(numbers.t(), 0),
    Int4Layout.COMPUTED: lambda numbers: (numbers[:, ::2] + 16 * numbers[:, 1::2]).to(torch.uint8),
}


@pytest.mark.parametrize("layout", Int4Layout)
def test_numbers_come_back_from_the_memory_that_they_were_loaded_into(layout: Int4Layout) -> None:
    numbers = torch.randint(0, 16, (40, 96), generator=torch.Generator().manual_seed(1))
    stored = PACKED[layout](numbers)
    memory = torch.zeros(40 * 96 // 2, dtype=torch.uint8)
    view = numbers_view(memory, layout, 40, 96)
    assert view.shape == stored.shape
    view.copy_(stored)
    assert torch.equal(unpacked_numbers(view, layout), numbers.to(torch.uint8))


def test_awq_has_its_outputs_in_an_order_of_its_own() -> None:
    word = torch.tensor([[0x75316420]], dtype=torch.int32)
    assert unpacked_numbers(word, Int4Layout.AWQ).flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_zero_points_of_compressed_tensors_are_padded_to_whole_words() -> None:
    zeros = torch.randint(0, 16, (13, 3), generator=torch.Generator().manual_seed(2))  # [outputs, groups]
    stored = words(zeros, 0)
    assert stored.shape == zeros_shape(Int4Layout.COMPRESSED, 13, 3) == (2, 3)
    assert torch.equal(unpacked_zeros(stored, Int4Layout.COMPRESSED, 13), zeros.t().to(torch.uint8))


def test_zero_points_of_the_first_gptq_are_stored_less_one() -> None:
    stored = torch.tensor([[0x76543210], [-1]], dtype=torch.int32)
    assert zeros_shape(Int4Layout.GPTQ, 8, 2) == stored.shape
    assert unpacked_zeros(stored, Int4Layout.GPTQ, 8).tolist() == [list(range(1, 9)), [16] * 8]
    assert unpacked_zeros(stored, Int4Layout.GPTQ_V2, 8).tolist() == [list(range(8)), [15] * 8]
