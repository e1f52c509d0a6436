"""Gemma 4's block as a GPU computes it for few rows, with fused norms, against transformers."""

import random
from pathlib import Path

import pytest
import torch
from family_variants import VARIANTS
from tiny_models import VOCAB_SIZE, PagedRunner, load_ours, logits_of, random_model

import minisgl.models.gemma4 as gemma4
from triton_kernels.norm_values import norm_values_triton

LENGTH = 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="computed by Triton's interpreter")
def test_logits_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def always(x: torch.Tensor) -> bool:
        calls.append("norms")
        return True

    def values(
        qkv: torch.Tensor, kv_size: int, head_dim: int, eps: float, *, from_keys: bool
    ) -> torch.Tensor:
        calls.append(f"from keys: {from_keys}")
        return norm_values_triton(qkv, kv_size, head_dim, eps, from_keys)

    monkeypatch.setattr(gemma4, "suits_mixture_norms", always)
    monkeypatch.setattr(gemma4, "norm_values", values)
    family, settings = VARIANTS["gemma4_experts_keys_as_values_softcap"]
    theirs = random_model(family=family, **settings)
    theirs.save_pretrained(tmp_path)
    token_ids = random.Random(3).choices(range(VOCAB_SIZE), k=LENGTH)
    runner = PagedRunner(load_ours(tmp_path), num_rows=1, page_size=16, max_tokens=LENGTH, seed=1)
    ours = torch.cat([runner.feed([(0, token_ids[i : i + 9])]) for i in range(0, LENGTH, 9)])
    assert set(calls) == {"norms", "from keys: False", "from keys: True"}
    torch.testing.assert_close(ours, logits_of(theirs, token_ids), atol=1e-4, rtol=0)
