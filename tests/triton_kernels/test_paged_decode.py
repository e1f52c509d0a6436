"""Decode attention: the reference against torch's own attention, the kernel against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batch import PagedBatch, attention_by_sdpa, paged_batch

from triton_kernels.paged_decode import (
    DecodeConfig,
    num_arrivals,
    paged_decode,
    paged_decode_reference,
    paged_decode_triton,
)

TINY = DecodeConfig(block_n=16, split_tokens=64, max_splits=4, num_warps=1, num_stages=2, programs_per_sm=2)
"""Slices of 16 tokens; of more in rows of more than 128."""


def arguments(batch: PagedBatch):
    return batch.q, batch.k_cache, batch.v_cache, batch.page_table, batch.row_ids, batch.context_len


def decode_batch(seed: int, contexts: list[int], *shape: Any, **options: Any) -> PagedBatch:
    return paged_batch(seed, contexts, [1] * len(contexts), *shape, **options)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 0.0), (0, 3.0), (1, 0.5)])
def test_reference_equals_torch_attention(window, softcap):
    batch = decode_batch(1, [33, 1, 0, 16, 17], 6, 2, 40, 8, 8, dtype=torch.float64)
    expected = attention_by_sdpa(batch, 0.3, window, softcap)
    got = paged_decode_reference(*arguments(batch), 0.3, window, softcap)
    torch.testing.assert_close(got, expected)


def test_cpu_launcher_is_the_reference():
    batch = decode_batch(2, [5, 9], 4, 4, 16, 4, 4)
    assert torch.equal(paged_decode(*arguments(batch), 0.3), paged_decode_reference(*arguments(batch), 0.3))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_takes_every_head_dim(head_dim, dtype, device):
    batch = decode_batch(head_dim, [70, 3], 4, 2, head_dim, 16, 8, dtype=dtype, device=device)
    expected = attention_by_sdpa(batch, head_dim**-0.5)
    got = paged_decode_triton(*arguments(batch), head_dim**-0.5).cpu().double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert (got - expected).norm() <= tolerance * expected.norm()


@settings(max_examples=30)
@given(
    contexts=st.lists(st.integers(0, 300), min_size=1, max_size=5),
    group=st.sampled_from([1, 2, 3, 5, 7, 8, 16]),
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([1, 2, 4, 16, 64, 256]),
    options=st.sampled_from([(0, 0.0), (1, 0.0), (50, 0.0), (0, 5.0), (33, 2.0)]),
    seed=st.integers(0, 1000),
)
def test_kernel_equals_torch_attention(contexts, group, kv_heads, page_size, options, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    max_pages = -(-310 // page_size)
    batch = decode_batch(seed, contexts, group * kv_heads, kv_heads, 16, page_size, max_pages, device=device)
    expected = attention_by_sdpa(batch, 0.25, *options)
    got = paged_decode_triton(*arguments(batch), 0.25, *options, config=TINY).cpu()
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 40])
def test_a_row_alone_equals_the_row_in_a_batch_to_the_last_bit(window, device):
    """Alone, a row is taken slice by slice, but for the last, which has four splits; the batch is not."""
    contexts = [100, 0, 16, 17, 65, 1, 130, 290]
    copies = 1 if device == "cpu" else 40
    batch = decode_batch(5, contexts * copies, 3, 1, 16, 4, 80, device=device)
    together = paged_decode_triton(*arguments(batch), 0.25, window, config=TINY)
    for r in range(len(contexts)):
        alone = paged_decode_triton(
            batch.q[r : r + 1],
            batch.k_cache,
            batch.v_cache,
            batch.page_table,
            batch.row_ids[r : r + 1],
            batch.context_len[r : r + 1],
            0.25,
            window,
            config=TINY,
        )
        assert torch.equal(alone[0], together[r])


def test_a_result_does_not_depend_on_how_many_pages_a_row_may_have(device):
    batch = decode_batch(6, [90, 20], 4, 2, 16, 4, 30, device=device)
    wide = torch.cat((batch.page_table, torch.zeros_like(batch.page_table)), dim=1)
    narrow_out = paged_decode_triton(*arguments(batch), 0.25, config=TINY)
    wide_out = paged_decode_triton(*arguments(batch._replace(page_table=wide)), 0.25, config=TINY)
    assert torch.equal(narrow_out, wide_out)


def test_more_rows_than_a_search_block(device):
    contexts = [3] * 70
    contexts[7], contexts[31], contexts[68] = 0, 80, 40
    batch = decode_batch(7, contexts, 1, 1, 16, 16, 5, device=device)
    got = paged_decode_triton(*arguments(batch), 0.25, config=TINY._replace(programs_per_sm=1)).cpu()
    torch.testing.assert_close(got.double(), attention_by_sdpa(batch, 0.25), atol=1e-5, rtol=1e-4)


def test_rows_of_many_splits_are_folded_over_several_levels(device):
    """80, 65 and 9 slices of 16 tokens: 40, 33 and 5 splits, in trees of three and two levels."""
    config = DecodeConfig(16, split_tokens=16, max_splits=64, num_warps=1, num_stages=2, programs_per_sm=2)
    batch = decode_batch(8, [1280, 1025, 130, 16], 3, 1, 16, 16, 90, device=device)
    together = paged_decode_triton(*arguments(batch), 0.25, config=config)
    expected = attention_by_sdpa(batch, 0.25)
    torch.testing.assert_close(together.cpu().double(), expected, atol=1e-5, rtol=1e-4)
    alone = paged_decode_triton(
        batch.q[1:2],
        batch.k_cache,
        batch.v_cache,
        batch.page_table,
        batch.row_ids[1:2],
        batch.context_len[1:2],
        0.25,
        config=config,
    )
    assert torch.equal(alone[0], together[1])


def test_calls_share_their_counters_and_leave_zeros(device):
    batches = [
        decode_batch(9, [290, 0, 17], 4, 2, 16, 4, 80, device=device),
        decode_batch(10, [100] * 4, 4, 2, 16, 4, 80, device=device),
    ]
    arrivals = torch.zeros(num_arrivals(4, 2, torch.device(device)), dtype=torch.int32, device=device)
    for batch in (*batches, batches[0]):
        shared = paged_decode_triton(*arguments(batch), 0.25, arrivals=arrivals, config=TINY)
        assert torch.equal(shared, paged_decode_triton(*arguments(batch), 0.25, config=TINY))
        assert not arrivals.any()


def test_too_few_counters_are_refused(device):
    batch = decode_batch(11, [290, 0, 17], 4, 2, 16, 4, 80, device=device)
    few = torch.zeros(7, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="num_arrivals"):
        paged_decode_triton(*arguments(batch), 0.25, arrivals=few, config=TINY)
