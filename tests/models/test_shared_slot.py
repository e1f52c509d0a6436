"""A shared expert as one more slot of the mixture, as a GPU computes it for few rows, against transformers."""

import random
from pathlib import Path

import pytest
import torch
from family_variants import VARIANTS
from tiny_models import VOCAB_SIZE, PagedRunner, load_ours, logits_of, random_model

import minisgl.layers.moe as moe
from triton_kernels.moe_shared import moe_shared_triton

LENGTH = 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="computed by Triton's interpreter")
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_logits_equal_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def kernels(x: torch.Tensor, *others: object) -> torch.Tensor:
        lengths.append(len(x))
        return moe_shared_triton(x, *others)  # pyright: ignore[reportArgumentType]  as the op passes them

    monkeypatch.setattr(moe, "suits_shared_slot", lambda x: True)
    monkeypatch.setattr(moe, "moe_shared", kernels)
    family, settings = VARIANTS[name]
    theirs = random_model(family=family, **settings | {"shared_expert_intermediate_size": 16})
    theirs.save_pretrained(tmp_path)
    token_ids = random.Random(3).choices(range(VOCAB_SIZE), k=LENGTH)
    runner = PagedRunner(load_ours(tmp_path), num_rows=1, page_size=16, max_tokens=LENGTH, seed=1)
    ours = torch.cat(
        [runner.feed([(0, token_ids[begin:end])]) for begin, end in ((0, 9), (9, 12), (12, 19), (19, 20))]
    )
    assert set(lengths) == {1, 3, 7, 9}
    torch.testing.assert_close(ours, logits_of(theirs, token_ids), atol=1e-4, rtol=0)
