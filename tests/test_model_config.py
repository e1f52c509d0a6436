"""What is read from a Hugging Face folder, and what is refused by name."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from minisgl.config import RopeScaling
from minisgl.errors import ModelError
from minisgl.model_config import read_model_config

LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def write(folder: Path, generation: object = None, **changes: object) -> Path:
    """A folder with Llama 3.1's config.json, changed; a value of `...` takes the key out."""
    config = {key: value for key, value in (LLAMA_3_1 | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_a_config_of_transformers_4_is_read(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (32, 4096, 14336)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.vocab_size, config.max_position) == (128256, 131072)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    assert config.checkpoint_dtype == "bfloat16"
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.bos_token_id == 128000
    assert not config.tie_word_embeddings


def test_a_config_that_transformers_5_writes_is_read(tmp_path: Path) -> None:
    parameters = {**LLAMA_3_1["rope_scaling"], "rope_theta": 500000.0}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        rope_parameters=parameters,
        head_dim=96,
        dtype="float16",
        tie_word_embeddings=True,
        eos_token_id=7,
        max_position_embeddings=4096,
    ).save_pretrained(tmp_path)
    assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text())
    config = read_model_config(tmp_path)
    assert (config.rope_theta, config.head_dim, config.checkpoint_dtype) == (500000.0, 96, "float16")
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_max_position == 8192
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_scaling": ..., "rope_theta": ...}, None),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 4}}, "linear"),
    ],
)
def test_rope_kinds(changes: dict[str, object], kind: str | None, tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, **changes))
    assert (config.rope_scaling and config.rope_scaling.kind) == kind
    assert config.rope_theta == (10000.0 if changes.get("rope_theta") is ... else 500000.0)


def test_eos_ids_of_both_files_are_joined_each_once(tmp_path: Path) -> None:
    folder = write(tmp_path, {"eos_token_id": [128009, 5]}, eos_token_id=128009)
    assert read_model_config(folder).eos_token_ids == (128009, 5)
    assert read_model_config(write(tmp_path, {}, eos_token_id=None)).eos_token_ids == ()


def test_a_null_head_dim_is_derived(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, head_dim=None)).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ...}, "model_type 'llama'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"hidden_size": 4100}, "head_dim"),
        ({"head_dim": 127}, "even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_is_not_there_is_refused_by_name(changes: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=named):
        read_model_config(write(tmp_path, **changes))


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        read_model_config(tmp_path)
    write(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"generation_config\.json can't be read"):
        read_model_config(tmp_path)


QWEN_WINDOWS: list[dict[str, object]] = [
    {},
    {"sliding_window": 100},
    {"sliding_window": 100, "use_sliding_window": False, "max_window_layers": 1},
    {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 31},
    {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 32},
    {"sliding_window": 100, "use_sliding_window": True, "layer_types": ["full_attention"] * 32},
    {"sliding_window": 100, "use_sliding_window": True},
    {"sliding_window": None, "use_sliding_window": True},
    {"use_sliding_window": True},
]


@pytest.mark.parametrize("changes", QWEN_WINDOWS)
@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_qwens_are_refused_where_transformers_gives_a_layer_a_window(
    kind: type[Qwen2Config | Qwen3Config], changes: dict[str, object], tmp_path: Path
) -> None:
    name = kind.__name__.replace("Config", "ForCausalLM")
    folder = write(tmp_path, architectures=[name], model_type=kind.model_type, rope_scaling=None, **changes)
    theirs = kind.from_pretrained(folder)
    if set(theirs.layer_types or []) == {"full_attention"}:
        assert read_model_config(folder).num_layers == 32
    else:
        with pytest.raises(ModelError, match="sliding_window"):
            read_model_config(folder)


@pytest.mark.parametrize("missing", ["rope_theta", "rms_norm_eps", "tie_word_embeddings", "head_dim"])
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_a_key_that_is_left_out_means_what_transformers_takes_for_it(
    kind: type[LlamaConfig | Qwen2Config | Qwen3Config], missing: str, tmp_path: Path
) -> None:
    name = kind.__name__.replace("Config", "ForCausalLM")
    keys: dict[str, object] = {"rope_scaling": None, "hidden_size": 2048, missing: ...}
    folder = write(tmp_path, architectures=[name], model_type=kind.model_type, **keys)
    ours, theirs = read_model_config(folder), kind.from_pretrained(folder)
    assert ours.rope_theta == (theirs.rope_parameters or {}).get("rope_theta")
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
