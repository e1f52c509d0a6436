"""Decode attention: the reference against torch's own attention, the kernel against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batch import PagedBatch, attention_by_sdpa, paged_batch, with_fp8_pools

import triton_kernels.decode_config as decode
import triton_kernels.paged_decode as paged_decode_file
from triton_kernels.attention_reference import paged_decode_reference
from triton_kernels.decode_config import DecodeConfig, num_arrivals
from triton_kernels.gpu import Gpu
from triton_kernels.paged_decode import (
    Rope,
    _decode_many_over_fp8,
    _launch_or_op,
    paged_decode,
    paged_decode_triton,
    rope_paged_decode,
)
from triton_kernels.rope_store import rope_store_reference

H200 = Gpu((9, 0), 227 << 10, 132)
TINY = DecodeConfig(
    block_n=16,
    split_tokens=16,
    max_splits=12,
    num_warps=1,
    num_stages=2,
    few_programs_per_sm=3,
    some_programs_per_sm=2,
    many_programs_per_sm=1,
)
"""Splits of 16 tokens, in larger batches of 32, 64 and 128; of more in rows of more than 12 splits."""


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


def rows_of(batch: PagedBatch, rows: list[int]) -> PagedBatch:
    """The batch of these rows alone, with the pools and the page table of all."""
    return batch._replace(q=batch.q[rows], row_ids=batch.row_ids[rows], context_len=batch.context_len[rows])


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(
    ("all_rows", "some_rows"),
    [
        (range(8), [7]),
        (range(8), [5, 6, 1, 7]),
        (range(12), [*range(11, 2, -1)]),
        (range(16), [*range(13)]),
        (range(24), [*range(23, 6, -1)]),
    ],
    ids=["alone", "few", "more", "some", "many"],
)
def test_a_row_is_the_same_to_the_last_bit_in_other_company(all_rows, some_rows, window, device, monkeypatch):
    monkeypatch.setattr(decode, "TIERS", (8 * 16, 12 * 16, 16 * 16))
    assert decode.fewest_alike(len(all_rows), 3, 1, 16, 4) <= len(some_rows)
    contexts = [100, 0, 16, 17, 65, 1, 130, 290] * 3
    contexts[16:] = [95, 96, 97, 700, 768, 769, 800, 1]
    batch = decode_batch(5, contexts, 3, 1, 16, 16, 52, device=device)
    all_rows = list(all_rows)
    together = paged_decode_triton(*arguments(rows_of(batch, all_rows)), 0.25, window, config=TINY)
    apart = paged_decode_triton(*arguments(rows_of(batch, some_rows)), 0.25, window, config=TINY)
    assert torch.equal(apart, together[[all_rows.index(row) for row in some_rows]])


@pytest.mark.parametrize("tiers", [(10, 20, 30), (30, 39, 40), (20, 40, 60), (60, 70, 80)])
def test_a_large_batch_equals_torch_attention(tiers, device, monkeypatch):
    """40 rows in each tier, more than are searched at once, cut into one to twelve splits."""
    monkeypatch.setattr(decode, "TIERS", tuple(rows * 16 for rows in tiers))
    contexts = [3, 95, 96, 0, 64, 160, 161, 31] * 5
    contexts[7], contexts[31], contexts[38] = 390, 768, 800
    batch = decode_batch(7, contexts, 2, 1, 16, 16, 50, device=device)
    config = TINY._replace(few_programs_per_sm=1, some_programs_per_sm=1)
    got = paged_decode_triton(*arguments(batch), 0.25, config=config).cpu()
    torch.testing.assert_close(got.double(), attention_by_sdpa(batch, 0.25), atol=1e-5, rtol=1e-4)


def test_a_result_does_not_depend_on_how_many_pages_a_row_may_have(device):
    batch = decode_batch(6, [90, 20], 4, 2, 16, 4, 30, device=device)
    wide = torch.cat((batch.page_table, torch.zeros_like(batch.page_table)), dim=1)
    narrow_out = paged_decode_triton(*arguments(batch), 0.25, config=TINY)
    wide_out = paged_decode_triton(*arguments(batch._replace(page_table=wide)), 0.25, config=TINY)
    assert torch.equal(narrow_out, wide_out)


def test_rows_of_many_splits_are_folded_over_several_levels(device):
    """64, 62 and 8 splits of 16 tokens or, for the longest row, 32."""
    config = TINY._replace(max_splits=64)
    batch = decode_batch(8, [1025, 990, 130, 2047], 3, 1, 16, 16, 128, device=device)
    together = paged_decode_triton(*arguments(batch), 0.25, config=config)
    expected = attention_by_sdpa(batch, 0.25)
    torch.testing.assert_close(together.cpu().double(), expected, atol=1e-5, rtol=1e-4)


def test_calls_share_their_counters_and_leave_zeros(device):
    batches = [
        decode_batch(9, [290, 0, 17], 4, 2, 16, 4, 80, device=device),
        decode_batch(10, [100] * 4, 4, 2, 16, 4, 80, device=device),
    ]
    arrivals = torch.zeros(num_arrivals(4, 2), dtype=torch.int32, device=device)
    for batch in (*batches, batches[0]):
        shared = paged_decode_triton(*arguments(batch), 0.25, arrivals=arrivals, config=TINY)
        assert torch.equal(shared, paged_decode_triton(*arguments(batch), 0.25, config=TINY))
        assert not arrivals.any()


@pytest.mark.parametrize("more", [-1, 0, 1, 5])
def test_there_may_be_as_many_units_as_programs_or_others(more, device, monkeypatch):
    """Units are taken from one counter, which is zero again afterwards, whoever asked last."""
    monkeypatch.setattr(paged_decode_file, "num_multiprocessors", lambda device: 2)
    config = TINY._replace(few_programs_per_sm=4)
    contexts = [[10] * (8 + more), [0] * (8 + more)]
    arrivals = torch.zeros(num_arrivals(8 + more, 1), dtype=torch.int32, device=device)
    for context in (*contexts, contexts[0]):
        batch = decode_batch(12, context, 2, 1, 16, 16, 2, device=device)
        got = paged_decode_triton(*arguments(batch), 0.25, arrivals=arrivals, config=config).cpu()
        torch.testing.assert_close(got.double(), attention_by_sdpa(batch, 0.25), atol=1e-5, rtol=1e-4)
        assert not arrivals.any()


def test_too_few_counters_are_refused(device):
    batch = decode_batch(11, [290, 0, 17], 4, 2, 16, 4, 80, device=device)
    few = torch.zeros(7, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="num_arrivals"):
        paged_decode_triton(*arguments(batch), 0.25, arrivals=few, config=TINY)


def slots_of_newest(batch: PagedBatch) -> torch.Tensor:
    """int32 [R]: the slot of each row's last token; -1 where the row has none."""
    page_size = batch.k_cache.shape[1]
    rows = zip(batch.row_ids.tolist(), batch.context_len.tolist(), strict=True)
    slots = [
        int(batch.page_table[row, (length - 1) // page_size]) * page_size + (length - 1) % page_size
        if length
        else -1
        for row, length in rows
    ]
    return torch.tensor(slots, dtype=torch.int32, device=batch.q.device)


@settings(max_examples=30)
@given(
    contexts=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    group=st.sampled_from([1, 3, 8]),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 24, 40]),
    page_size=st.sampled_from([1, 4, 16, 64]),
    window=st.sampled_from([0, 1, 33]),
    softcap=st.sampled_from([0.0, 2.0]),
    norms=st.sampled_from([(False, False), (True, True), (True, False), (False, True)]),
    values=st.sampled_from([None, "values", "keys"]),
    is_padded=st.booleans(),
    is_kernel=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_rope_paged_decode_stores_the_newest_tokens_and_attends_to_them(
    contexts, group, kv_heads, head_dim, page_size, window, softcap, norms, values, is_padded, is_kernel, seed
):
    device = "cuda" if is_kernel and torch.cuda.is_available() else "cpu"
    heads = group * kv_heads
    shape = (heads, kv_heads, head_dim, page_size, -(-150 // page_size))
    batch = decode_batch(seed, contexts, *shape, device=device)
    slots = slots_of_newest(batch)
    if is_padded:  # as the engine does: the row sees what lies there, and stores nothing
        slots[-1] = -1
    stored = slots[slots >= 0].long()
    for pool in (batch.k_cache, batch.v_cache):  # nobody has stored them yet
        pool.flatten(0, 1)[stored] = float("nan")
    rng = torch.Generator().manual_seed(seed)
    width = (heads + kv_heads * (1 if values == "keys" else 2)) * head_dim
    qkv = torch.randn((len(contexts), width), generator=rng).to(device)
    cos_sin = torch.randn((200, head_dim), generator=rng).to(device)
    positions = torch.where(slots >= 0, batch.context_len + 7, 10**6).int()
    weights = [torch.randn(head_dim, generator=rng).to(device) if norm else None for norm in norms]

    pools = batch.k_cache.double(), batch.v_cache.double()
    options: list[Any] = [*pools, *(None if weight is None else weight.double() for weight in weights), 1e-5]
    q = rope_store_reference(qkv.double(), cos_sin.double(), positions, slots, *options, normed_values=values)
    expected = attention_by_sdpa(
        batch._replace(q=q, k_cache=pools[0], v_cache=pools[1]), 0.25, window, softcap
    )
    caches = batch.k_cache, batch.v_cache
    where = batch.page_table, batch.row_ids, batch.context_len
    rope = Rope(cos_sin, positions, slots, *weights, eps=1e-5, normed_values=values)
    if is_kernel:
        got = paged_decode_triton(qkv, *caches, *where, 0.25, window, softcap, config=TINY, rope=rope)
    else:
        got = rope_paged_decode(qkv, rope, *caches, *where, 0.25, window, softcap)
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-4, rtol=1e-4)
    for pool, expected_pool in zip(caches, pools, strict=True):
        torch.testing.assert_close(pool.double(), expected_pool, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    "heads",
    [(12, 2, 128), (4, 2, 256), (8, 1, 512), (16, 2, 64)],
    ids=lambda heads: "{}-{}-{}".format(*heads),
)
@pytest.mark.parametrize("num_rows", [3, 17])
def test_several_warps_share_a_unit_of_few_rows(num_rows, heads, device):
    """The default configuration, which is another one for few rows."""
    shape = decode.DecodeShape(heads[2], 2, heads[0] // heads[1], heads[1], False)
    assert decode.warps_share(shape) is not None
    batch = decode_batch(
        11, [300, 0, 129, *[5] * 14][:num_rows], *heads, 16, 20, dtype=torch.float16, device=device
    )
    expected = attention_by_sdpa(batch, 0.1)
    got = paged_decode_triton(*arguments(batch), 0.1).cpu().double()
    assert (got - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize(
    ("heads", "boundaries"),
    [
        ((32, 4, 128, 2), [2, 16, 48, 80]),
        ((32, 8, 128, 2), [8, 24, 40]),
        ((32, 8, 128, 2, True), [1, 16, 40, 64, 80]),
        ((32, 8, 128, 4, True), [8, 40, 80]),
        ((16, 8, 256, 2), [4, 12, 16, 20]),
        ((64, 8, 64, 2), [2, 16, 48, 80]),
    ],
)
def test_fewest_alike_names_where_results_change(heads, boundaries):
    found = [rows for rows in range(1, 200) if decode.fewest_alike(rows + 1, *heads) == rows + 1]
    assert found == boundaries


@pytest.mark.parametrize(
    ("rows", "programs"), [(1, 8), (96, 8), (132, 8), (160, 10), (192, 12), (256, 8), (330, 10), (2000, 8)]
)
def test_programs_take_equal_rows_in_whole_turns(rows, programs):
    assert decode.programs_for_equal_rows(8, rows * 8, 132) == programs


def test_few_rows_of_the_default_configuration_are_alike(device):
    batch = decode_batch(
        12, [300, 1, 129, 700, 17, 40], 12, 2, 128, 16, 48, dtype=torch.float16, device=device
    )
    together = paged_decode_triton(*arguments(batch), 0.1)
    assert decode.fewest_alike(6, 12, 2, 128, 2) == 5
    rows = [5, 3, 0, 2, 1]
    assert torch.equal(paged_decode_triton(*arguments(rows_of(batch, rows)), 0.1), together[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("head_dim", "page_size", "group", "options"),
    [(16, 16, 1, (0, 0.0)), (40, 1, 5, (50, 0.0)), (128, 4, 4, (0, 5.0)), (64, 64, 12, (33, 2.0))],
)
def test_kernel_over_fp8_pools_equals_torch_attention(head_dim, page_size, group, options, dtype, device):
    shape = (2 * group, 2, head_dim, page_size, -(-310 // page_size))
    batch = decode_batch(head_dim, [300, 1, 0, 33, 64], *shape, dtype=dtype, device=device)
    batch, exact, scales = with_fp8_pools(batch)
    expected = attention_by_sdpa(exact, 0.25, *options)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for config in (None, TINY):
        got = paged_decode_triton(*arguments(batch), 0.25, *options, config=config, kv_scales=scales)
        assert (got.cpu().double() - expected).norm() <= tolerance * expected.norm()
    reference = paged_decode_reference(*arguments(batch), 0.25, *options, kv_scales=scales)
    assert (reference.cpu().double() - expected).norm() <= tolerance * expected.norm()


def test_two_warps_share_a_unit_of_a_middle_batch_over_fp8(device):
    batch = decode_batch(
        13, [150, 0, 64, *range(1, 19)], 32, 16, 128, 16, 10, dtype=torch.float16, device=device
    )
    batch, exact, scales = with_fp8_pools(batch)
    expected = attention_by_sdpa(exact, 0.1)
    got = paged_decode_triton(*arguments(batch), 0.1, config=decode.MIDDLE, kv_scales=scales).cpu().double()
    assert (got - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 12, 16])
def test_the_rows_of_all_kernels_leave_no_configuration_out(num_kv_heads, monkeypatch):
    monkeypatch.setattr(decode, "gpu_of", lambda device: H200)
    pool = torch.float8_e4m3fn

    def config_of(rows: int) -> DecodeConfig:
        q = torch.empty((rows, 4 * num_kv_heads, 128), dtype=torch.bfloat16, device="meta")
        return decode.choose_config(q, 4 * num_kv_heads, num_kv_heads, 128, 16, kv_dtype=pool)[0]

    for most in (1, 16, 17, 20, 40, 64, 65, 99, 300):
        shape = decode.DecodeShape(128, 2, 4, num_kv_heads, True)
        some = decode.rows_of_all_kernels(most, shape, H200)
        assert most in some
        assert {config_of(rows) for rows in some} == {config_of(rows) for rows in range(1, most + 1)}
    middle = [rows for rows in range(1, 130) if config_of(rows) == decode.MIDDLE]
    assert num_kv_heads != 8 or middle == list(range(41, 65))


@pytest.mark.parametrize("is_rotated", [False, True])
def test_compiled_decode_over_fp8_is_what_the_kernel_yields(is_rotated, device):
    batch = decode_batch(15, [40, *range(17)], 4, 2, 32, 16, 3, dtype=torch.float16, device=device)
    batch, _, scales = with_fp8_pools(batch)
    rng = torch.Generator().manual_seed(3)
    q, rope = batch.q, None
    if is_rotated:
        q_weight, k_weight = (torch.rand(32, generator=rng).half().to(device) for _ in range(2))
        positions = (batch.context_len - 1).clamp(min=0)
        cos_sin = torch.rand((48, 32), generator=rng).to(device)
        rope = Rope(cos_sin, positions, slots_of_newest(batch), q_weight, k_weight, 1e-3, "keys")
        q = torch.randn((18, 6 * 32), generator=rng).half().to(device)
    sinks = torch.randn(4, generator=rng).to(device)
    arrivals = torch.zeros(num_arrivals(18, 2), dtype=torch.int32, device=device)
    where = (batch.page_table, batch.row_ids, batch.context_len, 0.1, 9, 5.0)
    pools = (batch.k_cache.clone(), batch.v_cache.clone())
    expected = paged_decode_triton(q, *pools, *where, None, scales, rope=rope, sinks=sinks)
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    own = (batch.k_cache, batch.v_cache)
    compiled = torch.compile(_launch_or_op, backend=keep, fullgraph=True)
    assert torch.equal(compiled(q, own, where, arrivals, scales, sinks, rope), expected)
    for pool, expected_pool in zip(own, pools, strict=True):
        assert torch.equal(pool.view(torch.uint8), expected_pool.view(torch.uint8))
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert calls == ["minisgl.paged_decode_fp8.default"]


@pytest.mark.parametrize("is_rotated", [False, True])
def test_torch_compile_is_told_what_decode_over_fp8_writes(is_rotated, device):
    """With pools of float16: the checks compare what was written, which torch can't for e4m3."""
    batch = decode_batch(14, [20, 1, 0], 4, 2, 32, 16, 2, dtype=torch.float16, device=device)
    q, rotation, values = batch.q, [], None
    if is_rotated:
        positions = (batch.context_len - 1).clamp(min=0)
        rotation = [torch.rand((32, 32), device=device), positions, slots_of_newest(batch)]
        q, values = torch.randn((3, (4 + 2) * 32), device=device).half(), "keys"
    norm = torch.ones(32, device=device) if is_rotated else None
    arrivals = torch.zeros(num_arrivals(3, 2), dtype=torch.int32, device=device)
    pools = (batch.k_cache, batch.v_cache)
    where = (batch.page_table, batch.row_ids, batch.context_len, 0.1, 0, 0.0)
    op_arguments = (q, rotation, norm, norm, *pools, *where, arrivals, None, None, 1e-5, values)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(_decode_many_over_fp8, op_arguments, test_utils=checks)


@settings(max_examples=15)
@given(
    contexts=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 8]),
    head_dim=st.sampled_from([16, 40]),
    page_size=st.sampled_from([1, 16, 64]),
    norms=st.booleans(),
    values=st.sampled_from([None, "values", "keys"]),
    seed=st.integers(0, 1000),
)
def test_rope_paged_decode_stores_fp8_as_rope_store_does_and_attends_to_it(
    contexts, group, head_dim, page_size, norms, values, seed
):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (group * 2, 2, head_dim, page_size, -(-150 // page_size))
    batch, exact, scales = with_fp8_pools(decode_batch(seed, contexts, *shape, device=device))
    slots = slots_of_newest(batch)
    rng = torch.Generator().manual_seed(seed)
    # Some values are beyond what FP8 holds at these scales.
    width = (group + (1 if values == "keys" else 2)) * 2 * head_dim
    qkv = (torch.randn((len(contexts), width), generator=rng) * 90).to(device)
    cos_sin = torch.randn((200, head_dim), generator=rng).to(device)
    positions = (batch.context_len - 1).int()
    weights = [torch.randn(head_dim, generator=rng).to(device) if norms else None for _ in range(2)]
    caches = [torch.zeros(pool.shape, device=device) for pool in (batch.k_cache, batch.v_cache)]
    q_weight, k_weight = weights
    store = (qkv, cos_sin, positions, slots, caches[0], caches[1], q_weight, k_weight)
    q = rope_store_reference(*store, eps=1e-5, normed_values=values)
    stored = slots.long()
    for pool, cache, scale in zip((exact.k_cache, exact.v_cache), caches, scales, strict=True):
        rounded = (cache.flatten(0, 1)[stored] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        pool.flatten(0, 1)[stored] = rounded.double() * scale.double()
    expected = attention_by_sdpa(exact._replace(q=q.double()), 0.002)
    rope = Rope(cos_sin, positions, slots, q_weight, k_weight, 1e-5, values)
    where = (batch.page_table, batch.row_ids, batch.context_len, 0.002)
    for attend in ("kernel", "cpu"):
        pools = batch.k_cache.clone(), batch.v_cache.clone()
        if attend == "kernel":
            got = paged_decode_triton(qkv, *pools, *where, config=TINY, rope=rope, kv_scales=scales)
        else:
            got = rope_paged_decode(qkv, rope, *pools, *where, kv_scales=scales)
        for pool, wide, scale in zip(pools, (exact.k_cache, exact.v_cache), scales, strict=True):
            found = pool.flatten(0, 1)[stored].double() * scale.double()
            # A value between two of FP8 may go to the other one.
            torch.testing.assert_close(found, wide.flatten(0, 1)[stored], rtol=0.13, atol=0.01)
            assert (found != wide.flatten(0, 1)[stored]).float().mean() < 0.02
        assert (got.cpu().double() - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter multiplies no bfloat16")
def test_queries_beyond_float16_attend_to_fp8(device):
    batch, exact, scales = with_fp8_pools(
        decode_batch(3, [70, 300], 8, 2, 128, 16, 20, dtype=torch.bfloat16, device=device)
    )
    factors = torch.tensor([1e6, 1e-6, 1.0, 1e5], device=device).bfloat16().repeat(2)[None, :, None]
    exact = exact._replace(q=batch.q * factors)
    expected = attention_by_sdpa(exact, 1e-6)
    got = paged_decode_triton(*arguments(batch._replace(q=exact.q)), 1e-6, kv_scales=scales)
    assert (got.cpu().double() - expected).norm() <= 1e-2 * expected.norm()
