"""The attention layer: which of the ways through a decode step it takes, and that all come to the same."""

from functools import partial
from typing import Any

import pytest
import torch

from minisgl.attention import triton as triton_backend
from minisgl.attention.backends import select
from minisgl.attention.interface import Attend, AttentionInputs, Backend, PrefillDecodePair, pair_backends
from minisgl.layers import attention as attention_layer
from minisgl.layers.attention import Attention
from minisgl.layers.norm import RMSNorm
from triton_kernels.registry import KERNELS

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 6, 2, 8, 4
CONTEXTS = torch.tensor([5, 0, 16, 1], dtype=torch.int32)
PAGES = torch.arange(16, dtype=torch.int32).view(4, 4)
OURS, PLAIN = select("triton"), select("torch")


def both(prefill: Attend, decode: Attend) -> Attend:
    return pair_backends(Backend(prefill), Backend(decode)).attend


def decoded(
    attend: Attend, *, normed: bool, softcap: float = 0.0, is_decode: bool = True, **kernels: Any
) -> list[torch.Tensor]:
    """What a layer makes of one token for each row, and its pools afterwards."""
    generator = torch.Generator().manual_seed(0)
    layer = Attention(HEADS, KV_HEADS, HEAD_DIM, attend, window=7, softcap=softcap)
    layer.kernels = KERNELS._replace(**kernels)
    layer.allocate_kv(17, PAGE_SIZE, torch.float32, "cpu")
    for pool in (layer.k_cache, layer.v_cache):
        pool.normal_(generator=generator)
    norm = None
    if normed:
        norm = RMSNorm(HEAD_DIM, 1e-5, torch.float32, torch.device("cpu"))
        norm.weight.normal_(generator=generator)
    last = (CONTEXTS - 1).clamp(min=0)
    slots = PAGES[torch.arange(4), last // PAGE_SIZE] * PAGE_SIZE + last % PAGE_SIZE
    inputs = AttentionInputs(
        page_table=PAGES,
        row_ids=torch.arange(4, dtype=torch.int32),
        context_len=CONTEXTS,
        slot_mapping=torch.where(CONTEXTS > 0, slots, -1).int(),
        row_start=torch.arange(5, dtype=torch.int32),
        max_query_len=1,
        is_decode=is_decode,
    )
    qkv = torch.randn(4, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=generator)
    cos_sin = torch.randn(20, HEAD_DIM, generator=generator)
    return [layer(qkv, last, cos_sin, inputs, norm, norm), layer.k_cache, layer.v_cache]


@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize("normed", [False, True])
def test_all_ways_through_a_decode_step_are_the_same(normed: bool, softcap: float) -> None:
    expected = decoded(PLAIN, normed=normed, softcap=softcap)
    for attend in (OURS, both(PLAIN, OURS), both(OURS, PLAIN)):
        torch.testing.assert_close(decoded(attend, normed=normed, softcap=softcap), expected)


def test_our_decode_steps_take_one_op_unless_one_of_its_two_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def noted(name: str, function: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return function(*arguments, **options)

        return run

    def called(attend: Attend, **options: Any) -> list[str]:
        calls.clear()
        decoded(attend, normed=False, **options)
        return calls.copy()

    monkeypatch.setattr(
        attention_layer, "rope_paged_decode", noted("both", attention_layer.rope_paged_decode)
    )
    theirs = noted("store", KERNELS.rope_store)
    assert called(OURS) == called(both(PLAIN, OURS)) == ["both"]
    assert called(PLAIN) == called(both(OURS, PLAIN)) == called(OURS, is_decode=False) == []
    assert called(OURS, rope_store=theirs) == ["store"]
    assert called(noted("attend", OURS)) == ["attend"]
    kernels = KERNELS._replace(paged_prefill=pytest.fail)
    by_kernels = partial(triton_backend.attend, kernels=kernels)
    assert called(PrefillDecodePair(by_kernels, by_kernels, decodes_with_triton=True)) == ["both"]
    theirs = noted("decode", KERNELS.paged_decode)
    kernels = KERNELS._replace(paged_decode=theirs)
    by_kernels = partial(triton_backend.attend, kernels=kernels)
    attend = PrefillDecodePair(by_kernels, by_kernels, decodes_with_triton=True)
    assert called(attend, paged_decode=theirs) == ["decode"]
