"""Prefill attention: the reference against torch's own attention, the kernel against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batch import PagedBatch, attention_by_sdpa, paged_batch, with_fp8_pools

from triton_kernels import paged_prefill_hopper as hopper
from triton_kernels.attention_reference import paged_prefill_reference
from triton_kernels.paged_prefill import PrefillConfig, paged_prefill, paged_prefill_triton

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("head_dim", "page_size", "group", "options"),
    [(16, 16, 1, (0, 0.0)), (40, 1, 5, (30, 0.0)), (128, 4, 4, (0, 5.0)), (64, 64, 16, (17, 2.0))],
)
def test_kernel_over_fp8_pools_equals_torch_attention(head_dim, page_size, group, options, dtype, device):
    batch = paged_batch(
        head_dim, [90, 3, 0, 40], [60, 3, 0, 1], 2 * group, 2, head_dim, page_size, -(-128 // page_size),
        dtype=dtype, device=device, padding_tokens=5,
    )  # fmt: skip
    batch, exact, scales = with_fp8_pools(batch)
    expected = attention_by_sdpa(exact, 0.25, *options)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for config in (None, TINY):
        got = paged_prefill_triton(*arguments(batch), 0.25, *options, config=config, kv_scales=scales)
        assert (got.cpu().double() - expected).norm() <= tolerance * expected.norm()
    reference = paged_prefill_reference(*arguments(batch), 0.25, *options, kv_scales=scales)
    assert (reference.cpu().double() - expected).norm() <= tolerance * expected.norm()


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def assert_hopper_kernel_is_right(batch: PagedBatch, window=0, softcap=0.0, heads=1):
    """Against the float32 reference, by norm: over the batch, and more loosely over each token."""
    scale = batch.q.shape[2] ** -0.5
    assert hopper.takes(*batch[:3])
    config = hopper.HopperPrefillConfig(64 if batch.q.shape[2] > 128 else 128, 2, heads)
    poison = torch.full((batch.q.numel(),), float("nan"), device="cuda")
    del poison  # the output's memory held NaN
    got = hopper.paged_prefill_hopper(*arguments(batch), scale, window, softcap, config=config).float()
    in_float32 = batch._replace(q=batch.q.float())
    expected = paged_prefill_reference(*arguments(in_float32), scale, window, softcap)
    end = int(batch.row_start[-1])
    assert (got[end:] == 0).all()
    assert (got - expected).norm() < 5e-3 * expected.norm()
    each = (got - expected)[:end].norm(dim=(1, 2)) / expected[:end].norm(dim=(1, 2))
    assert (each < 2e-2).all()


@on_hopper
@pytest.mark.parametrize(("group", "heads"), [(1, 2), (4, 1), (7, 2), (8, 1)])
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (128, 16), (256, 64), (128, 256)])
def test_hopper_kernel_takes_every_group_head_dim_and_page_size(group, heads, head_dim, page_size):
    contexts, new_tokens = [700, 129, 0, 1, 385, 256, 300], [333, 129, 0, 1, 1, 128, 17]
    batch = paged_batch(
        group, contexts, new_tokens, group * 2, 2, head_dim, page_size, -(-768 // page_size),
        dtype=torch.bfloat16, device="cuda", padding_tokens=37,
    )  # fmt: skip
    assert_hopper_kernel_is_right(batch, heads=heads)


@on_hopper
@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 300)), min_size=1, max_size=8),
    many=st.booleans(),
    options=st.sampled_from([(0, 0.0), (0, 0.0), (0, 0.0), (200, 0.0), (0, 5.0), (1, 2.0)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    padding_tokens=st.sampled_from([0, 1, 100]),
    seed=st.integers(0, 1000),
)
def test_hopper_kernel_takes_any_ragged_batch(rows, many, options, dtype, padding_tokens, seed):
    if many:  # decode rows among them
        rows = [*rows, *([(seed, 1)] * (64 - len(rows)))]
    new_tokens = [new for _, new in rows]
    contexts = [prefix + new if new else 0 for prefix, new in rows]
    if not sum(new_tokens):
        return
    batch = paged_batch(
        seed, contexts, new_tokens, 8, 2, 128, 16, 128, dtype=dtype, device="cuda",
        padding_tokens=padding_tokens,
    )  # fmt: skip
    assert_hopper_kernel_is_right(batch, *options)


@on_hopper
def test_public_launcher_takes_the_hopper_kernel_in_a_cuda_graph_and_under_compile():
    batch = paged_batch(
        5, [900, 40], [200, 40], 8, 2, 128, 16, 64, dtype=torch.bfloat16, device="cuda", padding_tokens=3
    )
    inputs = arguments(batch)
    expected = hopper.paged_prefill_hopper(*inputs, 0.1)
    assert torch.equal(paged_prefill(*inputs, 0.1), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_prefill(*inputs, 0.1)
    got.fill_(float("nan"))
    graph.replay()
    assert torch.equal(got, expected)
    compiled = torch.compile(paged_prefill, fullgraph=True)
    assert torch.equal(compiled(*inputs, 0.1), expected)


@on_hopper
def test_strides_that_the_copy_engine_cannot_follow_are_left_to_the_portable_kernel():
    batch = paged_batch(6, [90], [20], 4, 2, 128, 16, 8, dtype=torch.bfloat16, device="cuda")
    assert hopper.takes(*batch[:3])
    interleaved = torch.stack([batch.k_cache, batch.v_cache], 1)
    q, k_cache, v_cache = batch.q, interleaved[:, 0], interleaved[:, 1]
    assert not hopper.takes(q, k_cache, v_cache)
    assert not hopper.takes(q.float(), batch.k_cache.float(), batch.v_cache.float())
    got = paged_prefill(q, k_cache, v_cache, *arguments(batch)[3:], 0.1).cpu().double()
    expected = attention_by_sdpa(batch, 0.1)
    assert (got - expected).norm() < 5e-3 * expected.norm()
