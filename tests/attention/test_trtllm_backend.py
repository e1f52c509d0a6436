"""What TensorRT-LLM's kernels are called with, by a stand-in for flashinfer that computes in plain torch."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.attention.backends import select
from minisgl.attention.interface import AttentionInputs
from minisgl.attention.trtllm import TrtllmAttention
from triton_kernels.attention_reference import paged_prefill_reference

PAGE_SIZE = 16


def attend_by_arguments(row_start: Tensor, **arguments: Any) -> Tensor:
    """Both functions' meaning, by the arguments that they have in common."""
    assert arguments["kv_layout"] == "NHD"
    assert arguments["bmm2_scale"] == 1.0
    tables, lengths = arguments["block_tables"], arguments["seq_lens"]
    rows = torch.arange(len(lengths), dtype=torch.int32)
    where = (tables, rows, lengths, row_start, int(row_start.diff().max()))
    k_cache, v_cache = arguments["kv_cache"]
    scale, window = arguments["bmm1_scale"], arguments["window_left"] + 1
    query = arguments["query"]
    return arguments["out"].copy_(paged_prefill_reference(query, k_cache, v_cache, *where, scale, window))


def context(
    *,
    max_q_len: int,
    max_kv_len: int,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    **rest: Any,
) -> Tensor:
    lengths = rest["seq_lens"]
    assert batch_size == len(lengths)
    assert cum_seq_lens_kv.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert cum_seq_lens_kv.dtype == torch.int32
    assert max_q_len >= int(cum_seq_lens_q.diff().max())
    assert max_kv_len >= int(lengths.max())
    return attend_by_arguments(cum_seq_lens_q, **rest)


def decode(*, max_seq_len: int, backend: str, **rest: Any) -> Tensor:
    assert backend == "trtllm-gen"
    assert max_seq_len >= int(rest["seq_lens"].max())
    return attend_by_arguments(torch.arange(len(rest["seq_lens"]) + 1, dtype=torch.int32), **rest)


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("is_decode", [False, True])
def test_it_equals_the_torch_backend(is_decode: bool, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(
        decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode),
        prefill=SimpleNamespace(trtllm_batch_context_with_kv_cache=context),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 9, PAGE_SIZE, 2, 64)
    table = torch.tensor([[1, 2, 3], [4, 5, 0], [6, 7, 8], [0, 0, 0]], dtype=torch.int32)
    new_tokens = [1, 1, 1] if is_decode else [30, 1, 5]
    row_start = torch.tensor([0, *new_tokens]).cumsum(0).int()
    inputs = AttentionInputs(
        table,
        torch.tensor([2, 0, 1], dtype=torch.int32),
        torch.tensor([40, 33, 17], dtype=torch.int32),
        torch.empty(0),
        row_start,
        max(new_tokens),
        is_decode,
    )
    q = torch.randn(sum(new_tokens), 6, 64)
    attend = TrtllmAttention(max_context_tokens=48, device=torch.device("cpu")).attend
    expected = select("torch")(q, k_cache, v_cache, inputs, 0.3, window, 0.0)
    torch.testing.assert_close(attend(q, k_cache, v_cache, inputs, 0.3, window, 0.0), expected)
    if not is_decode:
        return
    # A padding row has no keys; the kernels get one.
    padded = inputs._replace(
        row_ids=torch.tensor([2, 0, 3], dtype=torch.int32),
        context_len=torch.tensor([40, 33, 0], dtype=torch.int32),
    )
    assert attend(q, k_cache, v_cache, padded, 0.3, window).isfinite().all()
