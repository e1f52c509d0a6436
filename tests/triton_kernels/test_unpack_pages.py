"""Pages out of pools of FP8."""

import pytest
import torch

from triton_kernels.e4m3 import FP8
from triton_kernels.unpack_pages import empty_pages, unpack_pages, unpack_pages_reference


@pytest.mark.parametrize("lengths", [[37], [5, 0, 64, 16, 0, 33], [1] * 130, [0, 0]], ids=len)
@pytest.mark.parametrize(("page_size", "head"), [(16, (3, 64)), (64, (2, 128))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernel_equals_the_reference(
    lengths: list[int], page_size: int, head: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    pages_of = [-(-length // page_size) for length in lengths]
    num_pages = sum(pages_of) + 3
    wide = torch.randn(2, num_pages, page_size, head[0] + 1, head[1], generator=generator) * 8
    pools = wide.to(FP8).to(device)[:, :, :, : head[0]]  # strided
    ids = torch.randperm(num_pages, generator=generator).tolist()
    page_table = torch.full((len(lengths) + 2, max(pages_of) + 1), -1, dtype=torch.int32)
    row_ids = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].int()
    for row, count in zip(row_ids.tolist(), pages_of, strict=True):
        page_table[row, :count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
    on_host = (page_table, row_ids, torch.tensor(lengths, dtype=torch.int32), torch.tensor([0.7, 1.3]))
    rows = [tensor.to(device) for tensor in on_host]
    found = []
    for unpack in (unpack_pages_reference, unpack_pages):
        out = empty_pages(pools[0], rows[0], len(lengths), sum(lengths) + 40, dtype)
        for tensor in out:
            tensor.fill_(-7)
        unpack(out, *pools, *rows)
        found.append(out)
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)
    used = sum(pages_of)
    assert not used or (found[1].k_cache[:used] != -7).any()
    assert (found[1].k_cache[used:] == -7).all()
