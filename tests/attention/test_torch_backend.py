"""The CPU's attention against the kernels' references, over pools that are NaN wherever it must not look."""

import pytest
import torch

from minisgl.attention import torch as torch_backend
from minisgl.attention.interface import AttentionInputs
from triton_kernels.paged_decode import paged_decode_reference
from triton_kernels.paged_prefill import paged_prefill_reference


def make_pool(contexts: list[int], page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k_cache, v_cache [P, S, 2, 24] and a page table int32 [R, C] of rows that own random pages."""
    counts = [-(-length // page_size) for length in contexts]
    order = (torch.randperm(sum(counts)) + 1).int().split(counts)
    caches = torch.full((2, sum(counts) + 1, page_size, 2, 24), float("nan"))
    page_table = torch.zeros(len(contexts), max(counts) + 1, dtype=torch.int32)
    for row, (length, pages) in enumerate(zip(contexts, order, strict=True)):
        page_table[row, : len(pages)] = pages
        for j in range(length):
            caches[:, pages[j // page_size], j % page_size] = torch.randn(2, 2, 24)
    return caches[0], caches[1], page_table


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (7, 0.0), (0, 0.5), (7, 2.0)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefill_equals_the_reference(
    page_size: int, window: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "QUERIES_AT_ONCE", 6)  # so that a row takes several blocks
    torch.manual_seed(page_size + window)
    contexts, new_tokens = [37, 9, 0, 1, 20], [30, 9, 0, 1, 6]
    k_cache, v_cache, page_table = make_pool(contexts, page_size)
    q = torch.randn(sum(new_tokens), 6 * 24 + 5)[:, : 6 * 24].unflatten(1, (6, 24))
    row_start = torch.tensor([0, *new_tokens]).cumsum(0).int()
    where = (page_table, torch.arange(5, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32))
    got = torch_backend.attend(
        q, k_cache, v_cache, AttentionInputs(*where, torch.empty(0), row_start, 30), 0.3, window, softcap
    )
    expected = paged_prefill_reference(q, k_cache, v_cache, *where, row_start, 30, 0.3, window, softcap)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (7, 0.0), (0, 0.5), (7, 2.0)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_decode_equals_the_reference(page_size: int, window: int, softcap: float) -> None:
    torch.manual_seed(page_size + window)
    contexts = [37, 1, 0, 16]
    k_cache, v_cache, page_table = make_pool(contexts, page_size)
    q = torch.randn(4, 6, 24)
    where = (page_table, torch.arange(4, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32))
    inputs = AttentionInputs(*where, torch.empty(0), torch.arange(5, dtype=torch.int32), 1)
    got = torch_backend.attend(q, k_cache, v_cache, inputs, 0.3, window, softcap)
    torch.testing.assert_close(
        got, paged_decode_reference(q, k_cache, v_cache, *where, 0.3, window, softcap), equal_nan=False
    )
    assert not got[2].any()
