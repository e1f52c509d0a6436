"""Device tables of all running requests: last token, length, pages and sampling parameters.

Promise: the tables never move, so a recorded graph can read and write them. The last line is for padding
rows: length 0, only the scratch page, greedy sampling.

B = max_rows + 1 lines, C most pages of a row. Each group of layers has a page table (`page_tables`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minisgl.kvcache.page_allocator import SCRATCH_PAGE
from triton_kernels.launch import align_up
from triton_kernels.read_rows import RowState, read_rows
from triton_kernels.registry import KERNELS


class Rows(nn.Module):
    """Tables indexed by row id. They are buffers, so that torch.compile sees static addresses."""

    last_token: Tensor  # int32 [B]  input of the next decode
    context_len: Tensor  # int32 [B]  tokens in the pool
    page_table: Tensor  # int32 [B, C]  of group 0
    temperature: Tensor  # float32 [B]
    top_k: Tensor  # int32 [B]  0 = off
    top_p: Tensor  # float32 [B]
    min_p: Tensor  # float32 [B]
    seed: Tensor  # int64 [B]
    decode_row_start: Tensor  # int32 [at least B + 1]  0, 1, 2, ...: the row_start of every decode batch

    def __init__(
        self,
        max_rows: int,
        max_pages_per_row: int,
        page_size: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        super().__init__()
        self.max_rows = max_rows
        self.page_size = page_size
        self.sample = KERNELS.sample  # --kernel may replace it
        num_lines = max_rows + 1

        def table(name: str, dtype: torch.dtype, *shape: int) -> None:
            self.register_buffer(name, torch.zeros(num_lines, *shape, dtype=dtype, device=device))

        table("last_token", torch.int32)
        table("context_len", torch.int32)
        # One buffer for the page tables of all groups, so that one copy updates them; each is aligned.
        table_size = num_lines * max_pages_per_row
        stride = align_up(table_size) if num_groups > 1 else table_size
        self.page_entries = torch.full((num_groups * stride,), SCRATCH_PAGE, dtype=torch.int32, device=device)
        self.page_tables: list[Tensor] = []
        for group in range(num_groups):
            entries = self.page_entries[group * stride : group * stride + table_size]
            self.page_tables.append(entries.view(num_lines, max_pages_per_row))
            self.register_buffer(f"page_table_{group}" if group else "page_table", self.page_tables[-1])
        table("temperature", torch.float32)
        table("top_k", torch.int32)
        table("top_p", torch.float32)
        table("min_p", torch.float32)
        table("seed", torch.int64)
        decode_row_start = torch.arange(align_up(num_lines) + 1, dtype=torch.int32, device=device)
        self.register_buffer("decode_row_start", decode_row_start)
        self.top_p.fill_(1.0)

    def read(self, row_ids: Tensor) -> RowState:
        """Read the lines of `row_ids`, int32 [R], and compute the slot of each row's next token."""
        return read_rows(
            row_ids,
            self.last_token,
            self.context_len,
            self.page_table,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            self.page_size,
        )

    def slots(self, row_ids: Tensor, group: int) -> Tensor:
        """The slot of each row's next token in the pages of a group, int32 [R]."""
        tables = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        pages = self.page_tables[group]
        state = read_rows(row_ids, self.last_token, self.context_len, pages, *tables, self.page_size)
        return state.slot_mapping

    @contextmanager
    def filled_for_measuring(self, vocab_size: int) -> Iterator[None]:
        """Within this context, rows have different tokens and share page 1, which no request uses yet.

        Measurements need it: tokens without a slot, such as padding, reach no expert.
        """
        self.last_token.copy_(torch.arange(len(self.last_token)) * 7919 % vocab_size)
        for page_table in self.page_tables:
            page_table[: self.max_rows].fill_(SCRATCH_PAGE + 1)
        try:
            yield
        finally:
            self.last_token.zero_()
            self.context_len.zero_()
            self.page_entries.fill_(SCRATCH_PAGE)

    def init_rows(self, staged: list[Tensor]) -> None:
        """Write the sampling parameters of rows that go to another request.

        Args:
            staged: the arrays of `inputs.pack_row_inits`, on the device.
        """
        row, *values = staged
        index = row.long()  # convert it once; an assignment to `table[row]` would convert it for each table
        tables = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed)
        for table, value in zip(tables, values, strict=True):
            table.index_copy_(0, index, value.view(table.dtype))
