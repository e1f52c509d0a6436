"""The end of a step: write each row's new token and context length into the persistent row tables.

    for r with 0 <= row_ids[r] < max_rows:
        last_token[row_ids[r]]  = max(tokens[r], 0)
        context_len[row_ids[r]] = new_context_len[r]

R rows of the batch, B rows of the tables. A negative token means that none was sampled: 0 is stored, because
the row's next step may be launched already and looks its last token up. Entries of padding rows
(row_ids[r] >= max_rows) change nothing. Real rows must appear once; of duplicates, one value wins.

Cost: 12*R bytes read, 8*R written: a launch.
"""

# A kernel launch looks like a call, but it takes plain numbers for constexpr parameters.
# pyright: reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import ceil_div

_BLOCK_R = 128


def advance_rows_reference(
    row_ids: Tensor,
    tokens: Tensor,
    new_context_len: Tensor,
    last_token: Tensor,
    context_len: Tensor,
    max_rows: int,
) -> None:
    """The same as advance_rows, in plain torch."""
    real = (row_ids >= 0) & (row_ids < max_rows)
    rows = row_ids[real].long()
    last_token[rows] = tokens[real].clamp(min=0)
    context_len[rows] = new_context_len[real]


@triton.jit(do_not_specialize=["num_entries"])
def _advance_rows_kernel(
    row_ids_ptr,
    tokens_ptr,
    new_context_len_ptr,
    last_token_ptr,
    context_len_ptr,
    num_entries,
    max_rows: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    entries = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = tl.load(row_ids_ptr + entries, entries < num_entries, other=max_rows)
    real = (rows >= 0) & (rows < max_rows)
    tokens = tl.load(tokens_ptr + entries, real, other=0)
    lengths = tl.load(new_context_len_ptr + entries, real, other=0)
    tl.store(last_token_ptr + rows, tl.maximum(tokens, 0), real)
    tl.store(context_len_ptr + rows, lengths, real)


def advance_rows_triton(
    row_ids: Tensor,
    tokens: Tensor,
    new_context_len: Tensor,
    last_token: Tensor,
    context_len: Tensor,
    max_rows: int,
) -> None:
    """Launch the kernel on any device."""
    num_entries = row_ids.shape[0]
    grid = (ceil_div(num_entries, _BLOCK_R),)
    _advance_rows_kernel[grid](
        row_ids, tokens, new_context_len, last_token, context_len, num_entries, max_rows, _BLOCK_R
    )


def advance_rows(
    row_ids: Tensor,
    tokens: Tensor,
    new_context_len: Tensor,
    last_token: Tensor,
    context_len: Tensor,
    max_rows: int,
) -> None:
    """Scatter tokens and new_context_len (int32 [R]) into the tables last_token and context_len (int32 [B]).

    A negative token is stored as 0.
    Entries whose row_ids (int32 [R]) is not in [0, max_rows) are padding and write nothing.
    """
    if row_ids.device.type == "cpu":
        advance_rows_reference(row_ids, tokens, new_context_len, last_token, context_len, max_rows)
    else:
        advance_rows_triton(row_ids, tokens, new_context_len, last_token, context_len, max_rows)
