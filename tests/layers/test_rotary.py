"""The table of angles against transformers' own."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_config import TINY
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minisgl.errors import ModelError
from minisgl.layers.rotary import make_cos_sin
from minisgl.model_config.config import RopeScaling

CONFIG = replace(TINY, head_dim=64, max_position=9001, rope_theta=5e5)
SCALINGS = {
    "default": (None, {"rope_type": "default"}),
    "linear": (RopeScaling(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeScaling(
            kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=1024
        ),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ),
    "yarn": (
        RopeScaling(kind="yarn", factor=4.0, original_max_position=2048, attention_factor=0.9),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 0.9,
        },
    ),
    "yarn_untruncated": (
        RopeScaling(
            kind="yarn", factor=4.0, original_max_position=2048, truncate=False, beta_fast=20.0, beta_slow=3.0
        ),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 1.0,
            "truncate": False,
            "beta_fast": 20.0,
            "beta_slow": 3.0,
        },
    ),
    "yarn_that_ends_beyond_the_last_frequency": (
        RopeScaling(kind="yarn", factor=4.0, original_max_position=2048, beta_fast=300.0),
        {
            "rope_type": "yarn",
            "rope_theta": 10.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 1.0,
            "beta_fast": 300.0,
        },
    ),
    "yarn_that_begins_before_the_first_frequency": (
        RopeScaling(kind="yarn", factor=4.0, original_max_position=2048, beta_fast=1000.0),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 1.0,
            "beta_fast": 1000.0,
        },
    ),
    "yarn_without_a_ramp": (
        RopeScaling(
            kind="yarn", factor=4.0, original_max_position=2048, truncate=False, beta_fast=5.0, beta_slow=5.0
        ),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "attention_factor": 1.0,
            "truncate": False,
            "beta_fast": 5.0,
            "beta_slow": 5.0,
        },
    ),
    "longrope": (
        RopeScaling(
            kind="longrope",
            factor=9001 / 4096,
            original_max_position=4096,
            short_factors=tuple(range(1, 33)),
            long_factors=tuple(range(2, 66, 2)),
            attention_factor=math.sqrt(1 + math.log(9001 / 4096) / math.log(4096)),
        ),
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": list(range(1, 33)),
            "long_factor": list(range(2, 66, 2)),
        },
    ),
    "proportional": (
        RopeScaling(kind="proportional", factor=2.0, rotated_share=0.25),
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.25},
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_angles_equal_transformers(kind: str) -> None:
    scaling, parameters = SCALINGS[kind]
    parameters = {"rope_theta": CONFIG.rope_theta, **parameters}
    table = make_cos_sin(replace(CONFIG, rope_scaling=scaling, rope_theta=parameters["rope_theta"]))
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=256,
            num_attention_heads=4,
            head_dim=64,
            max_position_embeddings=9001,
            rope_parameters=parameters,
        )
    )
    cos, sin = theirs(torch.zeros(1), torch.arange(9001)[None])
    assert table.shape == (9001, 64)
    assert table.dtype == torch.float32
    # One float32 rounding of a frequency is up to 9001 * 2^-24 in the angle.
    assert (table[:, :32] - cos[0, :, :32]).abs().max() < 1e-3
    assert (table[:, 32:] - sin[0, :, :32]).abs().max() < 1e-3
    assert (table[:256, :32] - cos[0, :256, :32]).abs().max() < 3e-5


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ModelError, match="spiral"):
        make_cos_sin(replace(CONFIG, rope_scaling=RopeScaling(kind="spiral", factor=2.0)))


def test_longrope_has_the_short_factors_where_no_context_is_longer_than_the_original() -> None:
    scaling = SCALINGS["longrope"][0]
    assert scaling is not None
    plain = make_cos_sin(replace(CONFIG, max_position=4096))
    short = make_cos_sin(replace(CONFIG, max_position=4096, rope_scaling=scaling))
    long = make_cos_sin(replace(CONFIG, max_position=4097, rope_scaling=scaling))
    assert torch.equal(short[:, 0], plain[:, 0] * scaling.attention_factor), "the first factor is 1"
    assert torch.equal(long[::2][:2048, 0], short[:2048, 0]), "and 2: half as fast"
