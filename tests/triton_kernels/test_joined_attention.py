"""Rows that decode beside prompts, by the kernels: as torch's backend computes them one row at a time."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minisgl.attention import torch as torch_backend
from minisgl.attention import triton as triton_backend
from minisgl.attention.interface import Attend, AttentionInputs, JoinedDecodes
from minisgl.layers.attention import Attention
from triton_kernels.decode_config import num_arrivals
from triton_kernels.paged_decode import paged_decode_triton
from triton_kernels.paged_prefill import paged_prefill_triton

ROWS, CONTEXT = 12, 40
KV_HEADS, HEADS, HEAD_DIM = 2, 4, 16
KERNELS: Any = SimpleNamespace(paged_prefill=paged_prefill_triton, paged_decode=paged_decode_triton)
"""Also where there is no GPU, in the interpreter."""


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(
    ("num_decodes", "room", "chunks", "padding"),
    [
        (3, 4, [(5, 20), (1, 7), (9, 9)], 0),
        (1, 4, [(2, 2)], 3),
        (4, 4, [(17, 30)], 1),
        (3, 4, [(1, 7), (1, 20)], 0),  # every row has one token
        (0, 4, [(6, 11)], 0),
    ],
)
def test_both_are_attended_to_as_if_the_others_were_not_there(
    num_decodes: int, room: int, chunks: list[tuple[int, int]], padding: int, window: int, device: str
) -> None:
    """chunks: new tokens and length of each row."""
    torch.manual_seed(0)
    page_size = 4
    pages_per_row = CONTEXT // page_size
    pools = torch.full((2, 1 + ROWS * pages_per_row, page_size, KV_HEADS, HEAD_DIM), float("nan"))
    page_table = 1 + torch.randperm(ROWS * pages_per_row).view(ROWS, pages_per_row).int()
    page_table[-1] = 0  # padding rows'
    lengths = [*torch.randint(1, CONTEXT, (num_decodes,)).tolist(), *[length for _, length in chunks]]
    for row, length in enumerate(lengths):
        for position in range(length):
            page = page_table[row, position // page_size]
            pools[:, page, position % page_size] = torch.randn(2, KV_HEADS, HEAD_DIM)
    empty = room - num_decodes
    row_ids = [*range(num_decodes), *[ROWS - 1] * empty, *range(num_decodes, len(lengths))]
    context_len = [*lengths[:num_decodes], *[0] * empty, *lengths[num_decodes:]]
    row_start = [num_decodes]
    for num_new, _ in chunks:
        row_start.append(row_start[-1] + num_new)
    q = torch.randn(max(row_start[-1], room) + padding, HEADS, HEAD_DIM)

    def attended(attend: Attend, place: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out, and the counters afterwards."""
        ints = partial(torch.tensor, dtype=torch.int32, device=place)
        table, ids, context = page_table.to(place), ints(row_ids), ints(context_len)
        slots = torch.zeros(len(q), dtype=torch.int32, device=place)
        arrivals = torch.zeros(num_arrivals(room, KV_HEADS), dtype=torch.int32, device=place)
        counting = torch.arange(room + 1, dtype=torch.int32, device=place)
        decodes = AttentionInputs(
            table, ids[:room], context[:room], slots[:room], counting, 1, is_decode=True, arrivals=arrivals
        )
        joined = JoinedDecodes(decodes, context[:room] > 0)
        inputs = AttentionInputs(
            table,
            ids[room:],
            context[room:],
            slots,
            ints(row_start),
            max(num_new for num_new, _ in chunks),
            decodes=joined,
        )
        layer = Attention(HEADS, KV_HEADS, HEAD_DIM, attend, window=window)
        layer.k_cache, layer.v_cache = pools.to(place)
        return layer.attend_pool(q.to(place), inputs).cpu(), arrivals.cpu()

    expected, _ = attended(torch_backend.attend, "cpu")
    got, arrivals = attended(partial(triton_backend.attend, kernels=KERNELS), device)
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[: row_start[-1]], expected[: row_start[-1]], rtol=0, atol=2e-5)
    assert not arrivals.any(), "the counters are not zeros again"
