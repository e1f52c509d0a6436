"""Gemma 4's block as a GPU computes it for few rows, with fused norms, against transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from family_variants import VARIANTS
from tiny_models import VOCAB_SIZE, PagedRunner, load_ours, logits_of, random_model

import minisgl.models.gemma4 as gemma4
from triton_kernels.rope_store import rope_store_triton

LENGTH = 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="computed by Triton's interpreter")
def test_logits_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def always(x: torch.Tensor) -> bool:
        calls.append("norms")
        return True

    def store(*arguments: Any, normed_values: Any) -> torch.Tensor:
        calls.append(f"normed {normed_values}")
        return rope_store_triton(*arguments, normed_values=normed_values)

    monkeypatch.setattr(gemma4, "suits_mixture_norms", always)
    family, settings = VARIANTS["gemma4_experts_keys_as_values_softcap"]
    theirs = random_model(family=family, **settings)
    theirs.save_pretrained(tmp_path)
    token_ids = random.Random(3).choices(range(VOCAB_SIZE), k=LENGTH)
    ours = load_ours(tmp_path)
    for attention in ours.attention_layers():
        attention.kernels = attention.kernels._replace(rope_store=store)
    runner = PagedRunner(ours, num_rows=1, page_size=16, max_tokens=LENGTH, seed=1)
    logits = torch.cat([runner.feed([(0, token_ids[i : i + 9])]) for i in range(0, LENGTH, 9)])
    assert set(calls) == {"norms", "normed values", "normed keys"}
    torch.testing.assert_close(logits, logits_of(theirs, token_ids), atol=1e-4, rtol=0)
