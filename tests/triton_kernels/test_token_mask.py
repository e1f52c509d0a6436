"""Masks of tokens: rows without a mask keep their logits, others keep those of allowed tokens."""

import pytest
import torch

from triton_kernels.token_mask import num_mask_words, token_mask, token_mask_triton


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 4100])
def test_only_what_a_rows_mask_has_is_left(device, vocab_size):
    rng = torch.Generator().manual_seed(vocab_size)
    num_rows, num_masks = 7, 3
    logits = torch.randn(num_rows, vocab_size, generator=rng)
    logits[0, 0] = float("nan")
    mask_of = torch.tensor([-1, 2, 0, 1, 2, -5, 0], dtype=torch.int32)
    masks = torch.randint(-(2**31), 2**31, (num_masks, num_mask_words(vocab_size)), generator=rng).int()
    expected = logits.clone()
    for row, place in enumerate(mask_of.tolist()):
        for token in range(vocab_size):
            if place >= 0 and not int(masks[place, token // 32]) >> (token % 32) & 1:
                expected[row, token] = float("-inf")
    for apply in (token_mask, token_mask_triton):
        found = apply(logits.to(device), mask_of.to(device), masks.to(device)).cpu()
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
