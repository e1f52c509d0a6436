"""The device's side of every running request: its last token, length, pages and sampling parameters.

Promise: the tables never move, so a captured graph may read and write them; the last line belongs to
nobody and is what padding rows use (length 0, all its pages the scratch page, greedy).

B = max_rows + 1 rows, C pages a row may have.
"""

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.scheduler.plan import SCRATCH_PAGE, RowInit


class Rows(nn.Module):
    """Persistent tables, indexed by row id. Buffers, so that torch.compile sees static addresses."""

    last_token: Tensor  # int32 [B]  what the next decode feeds
    context_len: Tensor  # int32 [B]  tokens in the pool
    page_table: Tensor  # int32 [B, C]
    temperature: Tensor  # float32 [B]
    top_k: Tensor  # int32 [B]  0 = off
    top_p: Tensor  # float32 [B]
    min_p: Tensor  # float32 [B]
    seed: Tensor  # int64 [B]

    def __init__(self, max_rows: int, max_pages_per_row: int, device: torch.device) -> None:
        super().__init__()
        self.max_rows = max_rows
        num_lines = max_rows + 1

        def table(name: str, dtype: torch.dtype, *shape: int) -> None:
            self.register_buffer(name, torch.zeros(num_lines, *shape, dtype=dtype, device=device))

        table("last_token", torch.int32)
        table("context_len", torch.int32)
        table("page_table", torch.int32, max_pages_per_row)
        self.page_table.fill_(SCRATCH_PAGE)
        table("temperature", torch.float32)
        table("top_k", torch.int32)
        table("top_p", torch.float32)
        table("min_p", torch.float32)
        table("seed", torch.int64)
        self.top_p.fill_(1.0)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def init_rows(self, inits: tuple[RowInit, ...]) -> None:
        """Write the sampling parameters of rows that change hands."""
        device = self.seed.device
        index = torch.tensor([init.row for init in inits]).to(device)
        floats = torch.tensor([(init.temperature, init.top_p, init.min_p) for init in inits]).to(device)
        integers = torch.from_numpy(np.array([(init.top_k, init.seed) for init in inits], dtype=np.int64))
        integers = integers.to(device)
        self.temperature[index] = floats[:, 0]
        self.top_p[index] = floats[:, 1]
        self.min_p[index] = floats[:, 2]
        self.top_k[index] = integers[:, 0].int()
        self.seed[index] = integers[:, 1]
