"""Shapes of models: the table, splitting over ranks, and config.json."""

import json
from pathlib import Path

import pytest

from minisgl.benchmark.kernels.model_shapes import (
    MODEL_SHAPES,
    TO_SERVE,
    read_model_shape,
    read_model_shapes,
    shape_of_config,
)
from minisgl.errors import ConfigError


def test_every_shape_is_one_that_the_kernels_take() -> None:
    for name, shape in MODEL_SHAPES.items():
        assert shape.name == name
        assert shape.heads % shape.kv_heads == 0
        assert shape.heads // shape.kv_heads <= 16
        assert bool(shape.experts) == bool(shape.expert_width) == bool(shape.experts_per_token)
    assert len(read_model_shapes("all")) == len(TO_SERVE) == 12


def test_four_ranks_of_70b_have_two_kv_heads_each() -> None:
    shape = read_model_shape("llama-3.1-70b/tp4")
    assert (shape.name, shape.heads, shape.kv_heads) == ("llama-3.1-70b/tp4", 16, 2)
    assert (shape.hidden, shape.intermediate, shape.vocab) == (8192, 7168, 32064)
    assert read_model_shape("llama-3.1-70b/tp16").kv_heads == 1, (
        "heads are shared by ranks when there are fewer"
    )


@pytest.mark.parametrize(
    "model", ["qwen2.5-7b/tp8", "llama-3.1-8b/tp3", "qwen3.5-9b/tp2", "no-such-model", "", "/tp4"]
)
def test_what_is_no_model_or_can_not_be_split_is_a_config_error(model: str) -> None:
    with pytest.raises(ConfigError):
        read_model_shapes(model)


def test_a_folder_says_the_same_as_the_table(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3-30b-a3b"
    folder.mkdir()
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model_shape(str(folder)) == MODEL_SHAPES["qwen3-30b-a3b"]
    mixtral = {"num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral", "head_dim": None}
    for name in ("num_experts", "moe_intermediate_size"):
        del config[name]
    (folder / "config.json").write_text(json.dumps({**config, **mixtral}))
    shape = shape_of_config(folder)
    assert (shape.experts, shape.expert_width, shape.head_dim, shape.qk_norm) == (8, 6144, 64, False)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": "wide"}'])
def test_a_config_without_sizes_is_a_config_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=re_escape(tmp_path)):
        read_model_shape(str(tmp_path))


def re_escape(path: Path) -> str:
    return str(path).replace(".", r"\.")
