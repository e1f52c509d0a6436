"""Prefill attention: the reference against torch's own attention, the kernel against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batch import PagedBatch, attention_by_sdpa, paged_batch

from triton_kernels.paged_prefill import (
    PrefillConfig,
    paged_prefill,
    paged_prefill_reference,
    paged_prefill_triton,
)

TINY = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)


def arguments(batch: PagedBatch):
    longest = int(batch.row_start.diff().max())
    return (*batch[:6], batch.row_start, longest)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 0.0), (0, 3.0), (1, 0.5)])
def test_reference_equals_torch_attention(window, softcap):
    batch = paged_batch(
        1, [300, 9, 0, 1, 40], [290, 9, 0, 1, 3], 6, 2, 40, 8, 40, dtype=torch.float64, padding_tokens=5
    )
    expected = attention_by_sdpa(batch, 0.3, window, softcap)
    got = paged_prefill_reference(*arguments(batch), 0.3, window, softcap)
    torch.testing.assert_close(got, expected)


def test_cpu_launcher_is_the_reference():
    batch = paged_batch(2, [5, 9], [5, 2], 4, 4, 16, 4, 4)
    assert torch.equal(paged_prefill(*arguments(batch), 0.3), paged_prefill_reference(*arguments(batch), 0.3))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_takes_every_head_dim(head_dim, dtype, device):
    batch = paged_batch(head_dim, [70, 3], [50, 1], 4, 2, head_dim, 16, 8, dtype=dtype, device=device)
    expected = attention_by_sdpa(batch, head_dim**-0.5)
    got = paged_prefill_triton(*arguments(batch), head_dim**-0.5).cpu().double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert (got - expected).norm() <= tolerance * expected.norm()


@settings(max_examples=24)
@given(
    rows=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 3, 5, 7, 8, 16]),
    kv_heads=st.integers(1, 2),
    page_size=st.sampled_from([1, 2, 4, 16, 64, 256]),
    options=st.sampled_from([(0, 0.0), (1, 0.0), (30, 0.0), (0, 5.0), (17, 2.0)]),
    padding_tokens=st.sampled_from([0, 1, 40]),
    seed=st.integers(0, 1000),
)
def test_kernel_equals_torch_attention(rows, group, kv_heads, page_size, options, padding_tokens, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    new_tokens = [new for _, new in rows]
    contexts = [prefix + new if new else 0 for prefix, new in rows]
    batch = paged_batch(
        seed,
        contexts,
        new_tokens,
        group * kv_heads,
        kv_heads,
        16,
        page_size,
        -(-128 // page_size),
        device=device,
        padding_tokens=padding_tokens,
    )
    if batch.q.shape[0] == 0:
        return
    expected = attention_by_sdpa(batch, 0.25, *options)
    config = TINY._replace(block_m=32) if seed % 2 else TINY
    got = paged_prefill_triton(*arguments(batch), 0.25, *options, config=config).cpu()
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-4)


def test_padding_tokens_are_zero_even_where_q_is_nan(device):
    batch = paged_batch(3, [20, 0], [20, 0], 3, 1, 16, 4, 8, device=device, padding_tokens=50)
    batch.q[20:] = float("nan")
    for attend in (paged_prefill_triton, paged_prefill):
        got = attend(*arguments(batch), 0.25)
        assert (got[20:] == 0).all()
        assert not got.isnan().any()


def test_more_rows_than_a_search_block(device):
    new_tokens = [1] * 140
    new_tokens[3], new_tokens[137], new_tokens[20] = 0, 17, 30
    contexts = [n + 2 if n else 0 for n in new_tokens]
    batch = paged_batch(4, contexts, new_tokens, 1, 1, 16, 16, 4, device=device)
    got = paged_prefill_triton(*arguments(batch), 0.25, config=TINY).cpu()
    torch.testing.assert_close(got.double(), attention_by_sdpa(batch, 0.25), atol=1e-5, rtol=1e-4)
