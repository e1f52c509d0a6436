"""Bans tokens by bit masks, before sampling.

    out[r, t] = -inf          where mask_of[r] >= 0 and bit t % 32 of masks[mask_of[r], t // 32] is 0
    out[r, t] = logits[r, t]  elsewhere

R rows of the batch, V vocabulary, M masks of W = ceil(V / 32) words.

Cost: R*V logits read and written, M*W*4 bytes read: memory-bound.
"""

# A kernel launch looks like a call, but it takes plain numbers for constexpr parameters.
# pyright: reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import ceil_div

_BLOCK_WORDS = 64
WORD_BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """W: int32 words of one mask."""
    return ceil_div(vocab_size, WORD_BITS)


def token_mask_reference(logits: Tensor, mask_of: Tensor, masks: Tensor) -> Tensor:
    """The same as token_mask, in plain torch."""
    vocab_size = logits.shape[1]
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    allowed = ((masks[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size].bool()
    everything = torch.ones(1, vocab_size, dtype=torch.bool, device=logits.device)
    rows = torch.where(mask_of < 0, len(masks), mask_of).long()
    return logits.masked_fill(~torch.cat([allowed, everything])[rows], float("-inf"))


@triton.jit
def _token_mask_kernel(
    logits_ptr,
    mask_of_ptr,
    masks_ptr,
    out_ptr,
    vocab_size: tl.constexpr,
    num_words: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    tokens = words[:, None] * 32 + tl.arange(0, 32)[None, :]
    exists = tokens < vocab_size
    logits = tl.load(logits_ptr + row * vocab_size + tokens, exists, other=0.0)
    place = tl.load(mask_of_ptr + row)
    if place >= 0:
        mask = tl.load(masks_ptr + place.to(tl.int64) * num_words + words, words < num_words, other=0)
        allowed = ((mask[:, None] >> tl.arange(0, 32)[None, :]) & 1) != 0
        logits = tl.where(allowed, logits, float("-inf")).to(logits.dtype)
    tl.store(out_ptr + row * vocab_size + tokens, logits, exists)


def token_mask_triton(logits: Tensor, mask_of: Tensor, masks: Tensor) -> Tensor:
    """Launch the kernel on any device."""
    num_rows, vocab_size = logits.shape
    out = torch.empty_like(logits)
    num_words = masks.shape[1]
    grid = (num_rows, ceil_div(num_words, _BLOCK_WORDS))
    _token_mask_kernel[grid](logits, mask_of, masks, out, vocab_size, num_words, _BLOCK_WORDS)
    return out


def token_mask(logits: Tensor, mask_of: Tensor, masks: Tensor) -> Tensor:
    """The logits, with -inf for the tokens that a row's mask does not have.

    Args:
        logits: [R, V], contiguous.
        mask_of: int32 [R], the row's mask; negative = the row has none.
        masks: int32 [M, W], M >= 1; bit t % 32 of word t // 32 is 1 if token t is allowed.
    """
    if logits.device.type == "cpu":
        return token_mask_reference(logits, mask_of, masks)
    return token_mask_triton(logits.contiguous(), mask_of, masks)
