"""The table of public models: folders that the engine reads, with the sizes the models are known for."""

from pathlib import Path

import pytest

from minisgl.benchmark.model_configs import MODEL_CONFIGS, model_folder
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError, ModelError
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.model_config.kv_groups import KVShape, StateShape

BILLIONS = {
    "gemma-3-1b": 1.0,
    "gemma-4-26b-a4b": 25.2,
    "gemma-4-31b": 30.7,
    "gpt-oss-20b": 20.9,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "phi-3-mini-4k": 3.82,
    "qwen3-0.6b": 0.596,
    "qwen3-14b": 14.77,
    "qwen3-30b-a3b": 30.53,
    "qwen3.5-27b": 27.0,
}
"""Parameters as the models' own pages give them; shared embeddings once."""


def parameters_of(folder: Path) -> float:
    """Billions, from what the engine reads of config.json; norms are left out."""
    config = read_model_config(folder)
    if config.has_states:
        return _parameters_with_states(config)
    attention = 0
    for layer, shape in enumerate(config.layer_shapes):
        assert isinstance(shape, KVShape)
        projections = 1 if layer in config.layers_with_keys_as_values else 2
        heads = 2 * config.num_heads + projections * shape.num_heads
        attention += heads * shape.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    if config.experts is not None:
        expert = 3 * config.hidden_size * config.experts.intermediate_size
        experts = config.experts.num_experts * (expert + config.hidden_size)
        mlp = experts + (mlp if config.architecture.startswith("Gemma4") else 0)
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    return (attention + config.num_layers * mlp + tables) / 1e9


def _parameters_with_states(config: ModelConfig) -> float:
    """The same for Qwen3.5: gates behind queries, and layers of linear attention."""
    width, total = config.hidden_size, 2 * config.vocab_size * config.hidden_size
    for shape in config.cache_shapes:
        if isinstance(shape, StateShape):
            values = shape.num_heads * shape.value_dim
            total += width * (shape.conv_channels + 2 * values + 2 * shape.num_heads)
        else:
            total += width * config.head_dim * (3 * config.num_heads + 2 * config.num_kv_heads)
    experts = config.experts
    if experts is None:
        return (total + config.num_layers * 3 * width * config.intermediate_size) / 1e9
    each = 3 * width * (experts.num_experts * experts.intermediate_size + experts.shared_intermediate_size)
    return (total + config.num_layers * (each + width * experts.num_experts)) / 1e9


@pytest.mark.parametrize("name", MODEL_CONFIGS)
def test_a_known_model_is_a_folder_with_dummy_weights(name: str) -> None:
    with model_folder(EngineConfig(model=name, dummy_weights=True)) as folder:
        config = read_model_config(folder)
        assert config.architecture == MODEL_CONFIGS[name]["architectures"][0]
        if name in BILLIONS:
            assert parameters_of(folder) == pytest.approx(BILLIONS[name], rel=0.005)
    assert not folder.exists(), "the folder is temporary"


def test_a_shape_is_no_model_without_dummy_weights() -> None:
    with (
        pytest.raises(ConfigError, match="--dummy-weights"),
        model_folder(EngineConfig(model="llama-3.1-8b")),
    ):
        pass


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    config = EngineConfig(model=str(tmp_path), dummy_weights=True)
    with model_folder(config) as folder:
        assert folder == tmp_path
    assert folder.exists()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with (
        pytest.raises(ModelError, match=r"llama-3\.1-8b"),
        model_folder(EngineConfig(model="llama-9", dummy_weights=True)),
    ):
        pass
