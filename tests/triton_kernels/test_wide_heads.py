"""Heads of 512 elements (Gemma 4) through all attention kernels, against the references."""

import torch
from paged_batch import attention_by_sdpa, paged_batch

from triton_kernels.attention_reference import paged_decode_reference
from triton_kernels.decode_config import default_decode_config
from triton_kernels.gpu import ELSEWHERE
from triton_kernels.paged_decode import Rope, paged_decode_triton
from triton_kernels.paged_prefill import paged_prefill_triton
from triton_kernels.rope_store import rope_store_reference, rope_store_triton


def test_decode_and_prefill_with_heads_of_512(device: str) -> None:
    batch = paged_batch(1, [40, 7], [1, 1], 4, 2, 512, 16, 4, device=device)
    where = (batch.q, batch.k_cache, batch.v_cache, batch.page_table, batch.row_ids, batch.context_len)
    expected = attention_by_sdpa(batch, 0.05)
    torch.testing.assert_close(
        paged_decode_triton(*where, 0.05).cpu().double(), expected, atol=1e-5, rtol=1e-4
    )
    batch = paged_batch(2, [40, 7], [9, 3], 4, 2, 512, 16, 4, device=device)
    where = (batch.q, batch.k_cache, batch.v_cache, batch.page_table, batch.row_ids, batch.context_len)
    got = paged_prefill_triton(*where, batch.row_start, 9, 0.05)
    torch.testing.assert_close(got.cpu().double(), attention_by_sdpa(batch, 0.05), atol=1e-5, rtol=1e-4)


def test_rotation_and_decode_in_one_launch_with_heads_of_512(device: str) -> None:
    batch = paged_batch(3, [20, 5], [1, 1], 4, 2, 512, 16, 2, device=device)
    qkv = torch.randn(2, 8 * 512, device=device)
    angles = torch.rand(64, 256, device=device)
    last = batch.context_len - 1
    pages = batch.page_table[batch.row_ids.long(), (last // 16).long()]
    norms = (torch.rand(512, device=device), torch.rand(512, device=device), 1e-6)
    rope = Rope(torch.cat((angles.cos(), angles.sin()), 1), last, pages * 16 + last % 16, *norms)
    rows = (batch.page_table, batch.row_ids, batch.context_len, 0.05)
    pools = [(batch.k_cache.clone(), batch.v_cache.clone()) for _ in range(3)]
    q = rope_store_reference(qkv, *rope[:3], *pools[0], *rope[3:6])
    expected = paged_decode_reference(q, *pools[0], *rows)
    got = paged_decode_triton(qkv, *pools[1], *rows, rope=rope)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rope_store_triton(qkv, *rope[:3], *pools[2], *rope[3:6]), q)
    for other in pools[1:]:
        torch.testing.assert_close(other[0], pools[0][0], equal_nan=True)
        torch.testing.assert_close(other[1], pools[0][1], equal_nan=True)


def test_the_default_configuration_of_heads_of_512_has_no_more_sums_than_registers() -> None:
    for group in (1, 8, 16):
        config = default_decode_config(512, 2, group, 2, gpu=ELSEWHERE)
        assert 512 * max(group, 8) <= 64 * 32 * config.num_warps
