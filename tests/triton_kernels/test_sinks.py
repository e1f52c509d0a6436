"""Attention with sinks: all references and kernels against a softmax over one more key."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batch import PagedBatch, attention_by_sdpa, paged_batch, with_fp8_pools
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, eager_attention_forward

from triton_kernels.attention_reference import paged_decode_reference
from triton_kernels.decode_config import DecodeConfig
from triton_kernels.paged_decode import (
    Rope,
    paged_decode,
    paged_decode_triton,
    rope_paged_decode,
)
from triton_kernels.paged_prefill import PrefillConfig, paged_prefill, paged_prefill_triton

SMALL_DECODE = DecodeConfig(
    block_n=16,
    split_tokens=16,
    max_splits=12,
    num_warps=1,
    num_stages=2,
    few_programs_per_sm=3,
    some_programs_per_sm=2,
    many_programs_per_sm=1,
)
SMALL_PREFILL = PrefillConfig(16, 16, 4, 2)


def where(batch: PagedBatch) -> tuple[Any, Any, Any, Any, Any, Any]:
    return batch.q, batch.k_cache, batch.v_cache, batch.page_table, batch.row_ids, batch.context_len


def sinks_of(num_heads: int, device: str = "cpu") -> Tensor:
    """Some that take nearly all, some that take nearly nothing."""
    return torch.linspace(-6.0, 6.0, num_heads, device=device)


def test_a_sink_is_what_gpt_oss_adds_to_the_softmax() -> None:
    batch = paged_batch(3, [9], [9], 4, 2, 16, 16, 1)
    attention = GptOssAttention(GptOssConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=16), 0)
    attention.sinks.data = sinks_of(4)
    page = int(batch.page_table[batch.row_ids[0], 0])
    keys, values = (pool[page, :9].transpose(0, 1)[None] for pool in (batch.k_cache, batch.v_cache))
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    queries = batch.q.transpose(0, 1)[None]
    expected, _ = eager_attention_forward(attention, queries, keys, values, mask, scaling=0.25)
    got = paged_prefill(*where(batch), batch.row_start, 9, 0.25, sinks=attention.sinks.detach())
    torch.testing.assert_close(got, expected[0])


@settings(max_examples=10)
@given(
    contexts=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 8]),
    kv_heads=st.integers(1, 2),
    page_size=st.sampled_from([1, 16, 64]),
    options=st.sampled_from([(0, 0.0), (1, 0.0), (50, 0.0), (33, 2.0)]),
    seed=st.integers(0, 1000),
)
def test_decode_kernel_with_sinks(contexts, group, kv_heads, page_size, options, seed) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (group * kv_heads, kv_heads, 16, page_size, -(-310 // page_size))
    batch = paged_batch(seed, contexts, [1] * len(contexts), *shape, device=device)
    sinks = sinks_of(group * kv_heads, device)
    expected = attention_by_sdpa(batch, 0.25, *options, sinks=sinks)
    launch: Any = paged_decode_triton
    got = launch(*where(batch), 0.25, *options, config=SMALL_DECODE, sinks=sinks)
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=1e-4)
    reference = paged_decode_reference(*where(batch), 0.25, *options, sinks=sinks)
    torch.testing.assert_close(reference.cpu().double(), expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=5)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 8]),
    page_size=st.sampled_from([1, 16]),
    options=st.sampled_from([(0, 0.0), (1, 0.0), (20, 0.0), (20, 2.0)]),
    seed=st.integers(0, 1000),
)
def test_prefill_kernel_with_sinks(rows, group, page_size, options, seed) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    contexts, new = [n + before for n, before in rows], [n for n, _ in rows]
    shape = (2 * group, 2, 16, page_size, -(-110 // page_size))
    batch = paged_batch(seed, contexts, new, *shape, device=device, padding_tokens=3)
    sinks = sinks_of(2 * group, device)
    expected = attention_by_sdpa(batch, 0.25, *options, sinks=sinks)
    arguments: Any = (*where(batch), batch.row_start, max(new), 0.25, *options)
    got = paged_prefill_triton(*arguments, config=SMALL_PREFILL, sinks=sinks)
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        paged_prefill(*arguments, sinks=sinks).cpu().double(), expected, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("window", [0, 20])
def test_kernels_with_sinks_over_fp8_pools(window: int, device: str) -> None:
    shape: Any = (8, 2, 16, 16, 8)
    sinks = sinks_of(8, device)
    batch, exact, scales = with_fp8_pools(paged_batch(5, [90, 17], [1, 1], *shape, device=device))
    expected = attention_by_sdpa(exact, 0.25, window, sinks=sinks)
    options: Any = (0.25, window, 0.0, None, scales, SMALL_DECODE)
    got = paged_decode_triton(*where(batch), *options, sinks=sinks)
    assert (got.cpu().double() - expected).norm() < 2e-3 * expected.norm()
    batch, exact, scales = with_fp8_pools(paged_batch(6, [90, 17], [30, 2], *shape, device=device))
    expected = attention_by_sdpa(exact, 0.25, window, sinks=sinks)
    rows: Any = (*where(batch), batch.row_start, 30, 0.25, window, 0.0, scales, SMALL_PREFILL)
    got = paged_prefill_triton(*rows, sinks=sinks)
    assert (got.cpu().double() - expected).norm() < 2e-3 * expected.norm()


def test_rope_paged_decode_with_sinks(device: str) -> None:
    batch = paged_batch(7, [40, 9], [1, 1], 4, 2, 16, 16, 4, device=device)
    qkv = torch.randn(2, 8 * 16, device=device)
    angles = torch.rand(64, 8, device=device)
    last = batch.context_len - 1
    pages = batch.page_table[batch.row_ids.long(), (last // 16).long()]
    rope = Rope(torch.cat((angles.cos(), angles.sin()), 1), last, pages * 16 + last % 16)
    sinks = sinks_of(4, device)
    results = []
    for function, options in ((rope_paged_decode, {}), (paged_decode_triton, {"rope": rope})):
        pools: Any = (batch.k_cache.clone(), batch.v_cache.clone())
        rest: Any = (batch.page_table, batch.row_ids, batch.context_len, 0.25)
        first: Any = (qkv, rope) if function is rope_paged_decode else (qkv,)
        results.append(function(*first, *pools, *rest, sinks=sinks, **options))
        stored = batch._replace(k_cache=pools[0], v_cache=pools[1])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)
    without = paged_decode(*where(stored), 0.25)
    assert not torch.equal(results[0], without)
