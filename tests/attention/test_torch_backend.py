"""The CPU's attention against the kernels' references, over pools that are NaN wherever it must not look."""

import pytest
import torch

from minisgl.attention import torch as torch_backend
from minisgl.attention.interface import AttentionInputs
from triton_kernels.attention_reference import paged_decode_reference, paged_prefill_reference


def make_pool(
    contexts: list[int], page_size: int, *, scattered: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k_cache, v_cache [P, S, 2, 24] and a page table int32 [R, C] of rows with random or adjacent pages."""
    counts = [-(-length // page_size) for length in contexts]
    pages = torch.randperm(sum(counts)) if scattered else torch.arange(sum(counts))
    order = (pages + 1).int().split(counts)
    caches = torch.full((2, sum(counts) + 1, page_size, 2, 24), float("nan"))
    page_table = torch.zeros(len(contexts), max(counts) + 1, dtype=torch.int32)
    for row, (length, pages) in enumerate(zip(contexts, order, strict=True)):
        page_table[row, : len(pages)] = pages
        for j in range(length):
            caches[:, pages[j // page_size], j % page_size] = torch.randn(2, 2, 24)
    return caches[0], caches[1], page_table


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (7, 0.0), (0, 0.5), (7, 2.0)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("scattered", [True, False])
def test_prefill_equals_the_reference(
    page_size: int, window: int, softcap: float, scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "QUERIES_AT_ONCE", 6)  # so that a row takes several blocks
    torch.manual_seed(page_size + window)
    contexts, new_tokens = [37, 9, 0, 1, 20], [30, 9, 0, 1, 6]
    k_cache, v_cache, page_table = make_pool(contexts, page_size, scattered=scattered)
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
@pytest.mark.parametrize("scattered", [True, False])
def test_decode_equals_the_reference(page_size: int, window: int, softcap: float, scattered: bool) -> None:
    torch.manual_seed(page_size + window)
    contexts = [37, 1, 0, 16]
    k_cache, v_cache, page_table = make_pool(contexts, page_size, scattered=scattered)
    q = torch.randn(4, 6, 24)
    where = (page_table, torch.arange(4, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32))
    inputs = AttentionInputs(*where, torch.empty(0), torch.arange(5, dtype=torch.int32), 1)
    got = torch_backend.attend(q, k_cache, v_cache, inputs, 0.3, window, softcap)
    torch.testing.assert_close(
        got, paged_decode_reference(q, k_cache, v_cache, *where, 0.3, window, softcap), equal_nan=False
    )
    assert not got[2].any()


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 0.0), (37, 0.0), (0, 0.5)])
@pytest.mark.parametrize("contexts", [[37, 30, 16], [37, 1, 0, 16], [37, 2, 2], [37]])
@pytest.mark.parametrize("few_keys", [36, 37])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 6)])
def test_a_decode_step_reads_few_keys_of_rows_at_once_and_equals_the_reference(
    contexts: list[int],
    window: int,
    softcap: float,
    few_keys: int,
    sinks: torch.Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_backend, "FEW_KEYS", few_keys)
    torch.manual_seed(window)
    k_cache, v_cache, page_table = make_pool(contexts, 4)
    num_rows = len(contexts)
    row_ids = torch.arange(num_rows, dtype=torch.int32).flip(0)
    lengths, starts = torch.tensor(contexts, dtype=torch.int32).flip(0), torch.arange(num_rows + 1).int()
    q = torch.randn(num_rows, 6, 24)
    inputs = AttentionInputs(page_table, row_ids, lengths, torch.empty(0), starts, 1, is_decode=True)
    inputs = torch_backend.with_rows_of_a_cpu(inputs, 4)
    # Not with an empty row, more padding than keys, a single row, or a row with too many keys.
    assert (inputs.few_keys is not None) == (contexts == [37, 30, 16] and few_keys == 37)
    got = torch_backend.attend(q, k_cache, v_cache, inputs, 0.3, window, softcap, sinks=sinks)
    where = (page_table, row_ids, lengths)
    expected = paged_decode_reference(q, k_cache, v_cache, *where, 0.3, window, softcap, sinks=sinks)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("context", "new_tokens"), [(1, 1), (40, 1), (23, 23), (23, 9)])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_one_row_alone_equals_the_reference(
    context: int, new_tokens: int, scattered: bool, strided: bool
) -> None:
    torch.manual_seed(context)
    k_cache, v_cache, page_table = make_pool([context], 4, scattered=scattered)
    if strided:  # the keys and values of a page side by side
        k_cache, v_cache = torch.stack((k_cache, v_cache), dim=1).unbind(1)
    q = torch.randn(new_tokens, 6, 24)
    where = (page_table, torch.zeros(1, dtype=torch.int32), torch.tensor([context], dtype=torch.int32))
    row_start = torch.tensor([0, new_tokens], dtype=torch.int32)
    inputs = AttentionInputs(*where, torch.empty(0), row_start, new_tokens)
    known = inputs._replace(rows=torch_backend.find_rows(inputs, 4))
    expected = paged_prefill_reference(q, k_cache, v_cache, *where, row_start, new_tokens, 0.3, 0, 0.0)
    for given in (inputs, known):
        torch.testing.assert_close(torch_backend.attend(q, k_cache, v_cache, given, 0.3), expected)
