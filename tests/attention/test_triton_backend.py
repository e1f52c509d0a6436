"""Attention by our Triton kernels: which pools they read."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.attention import triton as triton_attention
from minisgl.attention.interface import AttentionInputs
from triton_kernels.attention_reference import paged_prefill_reference
from triton_kernels.e4m3 import FP8


def test_attention_unpacks_where_many_queries_see_the_keys_and_the_wider_kernel_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of 5, 17 and 9 new tokens, the second after 16 older ones."""
    lengths, new = [5, 33, 9], [5, 17, 9]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(2, 7, 16, 2, 64, generator=generator)
    k_cache, v_cache = wide.to(FP8).to(device)
    q = torch.randn(sum(new), 6, 64, generator=generator).half().to(device)
    scales = torch.tensor([0.7, 1.3], device=device)
    table = torch.tensor([[6, -1, -1], [2, 0, 4], [-1, -1, -1], [3, -1, -1]], dtype=torch.int32)
    numbers = ([0, 1, 3], lengths, [0, *itertools.accumulate(new)])
    row_ids, context_len, row_start = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in numbers
    )
    inputs = AttentionInputs(table.to(device), row_ids, context_len, row_ids, row_start, max(new))
    rows = (*inputs[:3], row_start, max(new))
    expected = paged_prefill_reference(q.float(), k_cache, v_cache, *rows, 0.1, kv_scales=scales)
    calls: list[torch.dtype] = []

    def taken(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
        calls.append(k_cache.dtype)
        return True

    monkeypatch.setattr(triton_attention, "takes", taken)
    pairs = sum(new) * sum(lengths) // 3
    for fewest, num_keys, unpacks in ((pairs, 47, 1), (pairs + 1, 47, 0), (1, 0, 0)):
        calls.clear()
        monkeypatch.setattr(triton_attention, "FEWEST_PAIRS", fewest)
        given = inputs._replace(num_keys=num_keys)
        got = triton_attention.attend(q, k_cache, v_cache, given, 0.1, kv_scales=scales)
        assert calls == [torch.float16] * unpacks
        assert torch.allclose(got.float(), expected, rtol=2e-3, atol=2e-3)
    others: list[dict[str, Any]] = [{"window": 4}, {"sinks": torch.zeros(6, device=device)}]
    for options in others:
        given = inputs._replace(num_keys=47)
        triton_attention.attend(q, k_cache, v_cache, given, 0.1, kv_scales=scales, **options)
    assert not calls
