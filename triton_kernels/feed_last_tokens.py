"""Before a step that decodes and prefills at once: put the rows' last tokens where the host could not.

    for r with 0 <= row_ids[r] < max_rows:
        t = logit_index[r]
        if token_ids[t] == LAST_TOKEN:
            token_ids[t] = last_token[row_ids[r]]

R rows of the batch, T new tokens, B rows of the tables. Entries of padding rows (row_ids[r] >= max_rows)
change nothing. Real rows appear once, each with a token of its own.

Cost: 16*R bytes read, 4*R written at most: a launch.
"""

# Launching a kernel looks like calling it, but takes plain numbers for its constexpr parameters.
# pyright: reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import ceil_div

LAST_TOKEN = -1
"""In place of a token: the one that its row has sampled last, which only the device knows."""

_BLOCK_R = 128


def feed_last_tokens_reference(
    token_ids: Tensor, row_ids: Tensor, logit_index: Tensor, last_token: Tensor, max_rows: int
) -> None:
    """What feed_last_tokens means, in plain torch."""
    real = (row_ids >= 0) & (row_ids < max_rows)
    rows, index = row_ids[real].long(), logit_index[real].long()
    unknown = token_ids[index] == LAST_TOKEN
    token_ids[index[unknown]] = last_token[rows[unknown]]


@triton.jit(do_not_specialize=["num_entries"])
def _feed_last_tokens_kernel(
    token_ids_ptr,
    row_ids_ptr,
    logit_index_ptr,
    last_token_ptr,
    num_entries,
    max_rows: tl.constexpr,
    unknown: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    entries = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = tl.load(row_ids_ptr + entries, entries < num_entries, other=max_rows)
    real = (rows >= 0) & (rows < max_rows)
    places = tl.load(logit_index_ptr + entries, real, other=0)
    fed = tl.load(token_ids_ptr + places, real, other=0)
    tokens = tl.load(last_token_ptr + rows, real, other=0)
    tl.store(token_ids_ptr + places, tokens, real & (fed == unknown))


def feed_last_tokens_triton(
    token_ids: Tensor, row_ids: Tensor, logit_index: Tensor, last_token: Tensor, max_rows: int
) -> None:
    """The kernel, whatever the device."""
    num_entries = row_ids.shape[0]
    grid = (ceil_div(num_entries, _BLOCK_R),)
    _feed_last_tokens_kernel[grid](
        token_ids, row_ids, logit_index, last_token, num_entries, max_rows, LAST_TOKEN, _BLOCK_R
    )


def feed_last_tokens(
    token_ids: Tensor, row_ids: Tensor, logit_index: Tensor, last_token: Tensor, max_rows: int
) -> None:
    """Replace LAST_TOKEN in token_ids (int32 [T]) at logit_index (int32 [R]) by the rows' last_token [B].

    Entries whose row_ids (int32 [R]) is not in [0, max_rows) are padding and write nothing.
    """
    if token_ids.device.type == "cpu":
        feed_last_tokens_reference(token_ids, row_ids, logit_index, last_token, max_rows)
    else:
        feed_last_tokens_triton(token_ids, row_ids, logit_index, last_token, max_rows)
