"""The start of a step: gathers the entries of the row tables for each row of the batch in one launch.

    token_ids[r]    = last_token[row_ids[r]]
    positions[r]    = context_len[row_ids[r]]                 where the row's next token goes
    context_len[r]  = positions[r] + 1                        what the row sees once it is there
    slot_mapping[r] = page * S + p % S                        row = row_ids[r], p = positions[r],
                                                              page = page_table[row, p // S]
    and temperature, top_k, top_p, min_p, seed of the row

R rows of the batch, B rows of the tables, C pages a row may have, S page size. A row may occur several times
(padding does). The slot is -1 if p // S >= C or if the page is 0, the scratch page of padding rows: then
nothing is stored for the row, and it goes to no expert.

Cost: 40*R bytes read, 40*R written: a launch.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare, and plain numbers
# for its constexpr parameters.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import ceil_div

_BLOCK_R = 128


class RowState(NamedTuple):
    """One entry for each row of the batch, [R]."""

    token_ids: Tensor  # int32
    positions: Tensor  # int32
    context_len: Tensor  # int32
    slot_mapping: Tensor  # int32
    temperature: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64


def read_rows_reference(
    row_ids: Tensor,
    last_token: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    page_size: int,
) -> RowState:
    """The same as read_rows, in plain torch."""
    index = row_ids.long()
    positions = context_len[index]
    column = (positions // page_size).long()
    page = page_table[index, column.clamp(max=page_table.shape[1] - 1)]
    somewhere = (column < page_table.shape[1]) & (page > 0)
    slots = torch.where(somewhere, page * page_size + positions % page_size, -1)
    sampling = (table[index] for table in (temperature, top_k, top_p, min_p, seed))
    return RowState(last_token[index], positions, positions + 1, slots.int(), *sampling)


@triton.jit(do_not_specialize=["num_entries"])
def _read_rows_kernel(
    row_ids_ptr,
    last_token_ptr,
    context_len_ptr,
    page_table_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    token_ids_out_ptr,
    positions_out_ptr,
    context_len_out_ptr,
    slot_mapping_out_ptr,
    temperature_out_ptr,
    top_k_out_ptr,
    top_p_out_ptr,
    min_p_out_ptr,
    seed_out_ptr,
    num_entries,
    C: tl.constexpr,
    S: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    entries = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    there = entries < num_entries
    rows = tl.load(row_ids_ptr + entries, there, other=0)
    positions = tl.load(context_len_ptr + rows, there, other=0)
    inside = there & (positions // S < C)
    page = tl.load(page_table_ptr + rows.to(tl.int64) * C + positions // S, inside, other=0)
    tl.store(token_ids_out_ptr + entries, tl.load(last_token_ptr + rows, there, other=0), there)
    tl.store(positions_out_ptr + entries, positions, there)
    tl.store(context_len_out_ptr + entries, positions + 1, there)
    tl.store(slot_mapping_out_ptr + entries, tl.where(page > 0, page * S + positions % S, -1), there)
    tl.store(temperature_out_ptr + entries, tl.load(temperature_ptr + rows, there, other=0.0), there)
    tl.store(top_k_out_ptr + entries, tl.load(top_k_ptr + rows, there, other=0), there)
    tl.store(top_p_out_ptr + entries, tl.load(top_p_ptr + rows, there, other=0.0), there)
    tl.store(min_p_out_ptr + entries, tl.load(min_p_ptr + rows, there, other=0.0), there)
    tl.store(seed_out_ptr + entries, tl.load(seed_ptr + rows, there, other=0), there)


def read_rows_triton(
    row_ids: Tensor,
    last_token: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    page_size: int,
) -> RowState:
    """Launch the kernel on any device."""
    num_entries = row_ids.shape[0]

    def column(dtype: torch.dtype) -> Tensor:
        return torch.empty(num_entries, dtype=dtype, device=row_ids.device)

    int32, float32 = torch.int32, torch.float32
    state = RowState(
        *map(column, (int32, int32, int32, int32, float32, int32, float32, float32, torch.int64))
    )
    tables = (last_token, context_len, page_table, temperature, top_k, top_p, min_p, seed)
    grid = (ceil_div(num_entries, _BLOCK_R),)
    _read_rows_kernel[grid](
        row_ids, *tables, *state, num_entries, page_table.shape[1], page_size, _BLOCK_R, num_warps=1
    )
    return state


def read_rows(
    row_ids: Tensor,
    last_token: Tensor,
    context_len: Tensor,
    page_table: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    page_size: int,
) -> RowState:
    """The tables' entries of the rows in row_ids (int32 [R], each in 0..B-1), and where the next token goes.

    Args:
        last_token, context_len: int32 [B].
        page_table: int32 [B, C], contiguous.
        temperature, top_p, min_p: float32 [B].
        top_k: int32 [B].
        seed: int64 [B].
        page_size: tokens per page.
    """
    run = read_rows_reference if row_ids.device.type == "cpu" else read_rows_triton
    return run(
        row_ids, last_token, context_len, page_table, temperature, top_k, top_p, min_p, seed, page_size
    )
