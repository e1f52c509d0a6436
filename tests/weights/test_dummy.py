"""Random weights."""

from dataclasses import replace

import pytest
import torch
from tiny_config import TINY

from minisgl.attention.backends import select
from minisgl.models.decoder import Decoder
from minisgl.weights.dummy import fill_dummy

CONFIG = replace(TINY, hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=500)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_normal_norms_are_one_and_the_seed_decides(dtype: torch.dtype) -> None:
    first, same, other = (Decoder(CONFIG, select("torch"), dtype) for _ in range(3))
    fill_dummy(first, seed=5)
    fill_dummy(same, seed=5)
    fill_dummy(other, seed=6)
    for (name, a), b, c in zip(first.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if "norm" in name:
            assert (a == 1).all()
        else:
            assert not torch.equal(a, c)
            assert a.float().mean().abs() < 2e-3
            assert abs(a.float().std().item() - 0.02) < 2e-3
    weights = dict(first.named_parameters())
    first_down, second_down = (weights[f"layers.{layer}.mlp.down_proj.weight.values"] for layer in range(2))
    assert not torch.equal(first_down, second_down)
