"""What is read from a Hugging Face folder, and what is refused by name."""

import json
from pathlib import Path

import pytest
from transformers import (
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from minisgl.errors import ModelError
from minisgl.model_config.config import RopeScaling
from minisgl.model_config.hf_folder.families import FAMILIES, Windows
from minisgl.model_config.hf_folder.hf_config import read_model_config

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
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_rope_kinds(changes: dict[str, object], kind: str | None, tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, **changes))
    assert (config.rope_scaling and config.rope_scaling.kind) == kind
    assert config.rope_theta == (10000.0 if changes.get("rope_theta") is ... else 500000.0)


@pytest.mark.parametrize(
    ("of_generation", "of_config", "joined"),
    [
        ([128009, 5], 7, (128009, 5, 7)),
        (7, [128009, 5], (7, 128009, 5)),
        (None, 7, (7,)),
        (7, None, (7,)),
        ([7, 5], [5, 7], (7, 5)),
    ],
)
def test_what_either_file_says_ends_a_text_does_end_it(
    of_generation: object, of_config: object, joined: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path, {"eos_token_id": of_generation}, eos_token_id=of_config)
    assert read_model_config(folder).eos_token_ids == joined


def test_the_first_token_is_config_jsons_and_only_if_it_names_none_the_other_files(tmp_path: Path) -> None:
    both = write(tmp_path, {"bos_token_id": 3}, bos_token_id=2)
    assert read_model_config(both).bos_token_id == 2
    other = write(tmp_path, {"bos_token_id": 3}, bos_token_id=...)
    assert read_model_config(other).bos_token_id == 3


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
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "each of 32 layers"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 16}, "sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"] * 16}, "linear_attention"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 32}, "no sliding_"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, "spiral"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "short_factor"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 64, "long_factor": [1.0] * 48}},
            "long_factor must be a list of 64 numbers, got 48",
        ),
        ({"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}, "partial_rotary"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "partial_rotary_factor": 0.5}}, "partial_rot"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"shared_expert_intermediate_size": 5632}, "shared_expert_intermediate_size"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "sliding_window": 9}, "sliding_window"),
        ({"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 0}, "shared_expert"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2000}, "at most 1024"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"architectures": ["MixtralForCausalLM"], "intermediate_size": 100}, "multiple of 16"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": "first"}, "mlp_only_layers"),
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


@pytest.mark.parametrize("value", [True, False])
def test_a_key_for_biases_means_nothing_to_qwen2(value: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, architectures=["Qwen2ForCausalLM"], attention_bias=value)
    config = read_model_config(folder)
    assert (config.qkv_bias, config.o_bias) == (True, False)


def test_yarn_reaches_as_far_as_its_factor_says(tmp_path: Path) -> None:
    """Qwen2.5's and Qwen3's own instructions: the one keeps the trained length in the file, the other not."""
    for name, max_position in (("Qwen2ForCausalLM", 32768), ("Qwen3ForCausalLM", 40960)):
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        folder = write(
            tmp_path, architectures=[name], max_position_embeddings=max_position, rope_scaling=scaling
        )
        assert read_model_config(folder).max_position == 131072


KINDS: dict[str, type[PreTrainedConfig]] = {
    "Ernie4_5ForCausalLM": Ernie4_5Config,
    "Exaone4ForCausalLM": Exaone4Config,
    "Gemma2ForCausalLM": Gemma2Config,
    "Gemma3ForCausalLM": Gemma3TextConfig,
    "Gemma4ForCausalLM": Gemma4TextConfig,
    "Glm4ForCausalLM": Glm4Config,
    "Glm4MoeForCausalLM": Glm4MoeConfig,
    "GptOssForCausalLM": GptOssConfig,
    "GraniteForCausalLM": GraniteConfig,
    "LlamaForCausalLM": LlamaConfig,
    "Ministral3ForCausalLM": Ministral3Config,
    "MistralForCausalLM": MistralConfig,
    "MixtralForCausalLM": MixtralConfig,
    "Olmo2ForCausalLM": Olmo2Config,
    "Olmo3ForCausalLM": Olmo3Config,
    "Phi3ForCausalLM": Phi3Config,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen2MoeForCausalLM": Qwen2MoeConfig,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
    "Qwen3NextForCausalLM": Qwen3NextConfig,
    "Qwen3_5ForCausalLM": Qwen3_5TextConfig,
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeTextConfig,
    "SeedOssForCausalLM": SeedOssConfig,
    "SmolLM3ForCausalLM": SmolLM3Config,
}


def test_every_family_has_transformers_class_beside_it() -> None:
    assert KINDS.keys() == FAMILIES.keys()


WINDOWS: list[dict[str, object]] = [
    {},
    {"sliding_window": 100},
    {"sliding_window": 100, "use_sliding_window": False, "max_window_layers": 1},
    {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 31},
    {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 32},
    {"sliding_window": 100, "use_sliding_window": True, "layer_types": ["full_attention"] * 32},
    {"sliding_window": 100, "use_sliding_window": True},
    {"sliding_window": 131072, "use_sliding_window": True, "max_window_layers": 0},
    {"sliding_window": None, "use_sliding_window": True},
    {"use_sliding_window": True},
    {"sliding_window": 100, "sliding_window_pattern": 4},
]


@pytest.mark.parametrize("changes", WINDOWS)
@pytest.mark.parametrize(
    "architecture", [name for name, family in FAMILIES.items() if family.windows is not Windows.NONE]
)
def test_layers_have_the_windows_that_transformers_gives_them(
    architecture: str, changes: dict[str, object], tmp_path: Path
) -> None:
    kind = KINDS[architecture]
    folder = write(
        tmp_path, architectures=[architecture], model_type=kind.model_type, rope_scaling=None, **changes
    )
    refused_by_both = ("Exaone4ForCausalLM", "Gemma4ForCausalLM")
    if architecture in refused_by_both and changes.get("sliding_window", 100) is None:
        with pytest.raises(ModelError, match="no sliding_window"):
            read_model_config(folder)
        return  # transformers divides by 0, or wants a number
    theirs = kind.from_pretrained(folder)
    window = getattr(theirs, "sliding_window", None)
    has_types = architecture in (
        "Exaone4ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma4ForCausalLM",
        "GptOssForCausalLM",
        "Olmo3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SmolLM3ForCausalLM",
    )
    types = theirs.layer_types if has_types else ["sliding_attention" if window else "full_attention"] * 32
    expected = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    if None in expected:
        with pytest.raises(ModelError, match="no sliding_window"):
            read_model_config(folder)
        return
    ours = read_model_config(folder)
    needed = tuple(0 if (size or 0) >= ours.max_position else size for size in expected)
    assert (ours.windows or (0,) * 32) == needed


@pytest.mark.parametrize(
    "missing", ["rope_theta", "rms_norm_eps", "tie_word_embeddings", "head_dim", "num_key_value_heads"]
)
@pytest.mark.parametrize("architecture", KINDS)
def test_a_key_that_is_left_out_means_what_transformers_takes_for_it(
    architecture: str, missing: str, tmp_path: Path
) -> None:
    kind = KINDS[architecture]
    keys: dict[str, object] = {"rope_scaling": None, "hidden_size": 2048, missing: ...}
    if architecture == "Gemma4ForCausalLM":  # to which older keys of RoPE would mean none
        keys |= {"rope_scaling": ..., "rope_theta": ...}
    folder = write(tmp_path, architectures=[architecture], model_type=kind.model_type, **keys)
    ours, theirs = read_model_config(folder), kind.from_pretrained(folder)
    theirs.allow_global_per_layer_attribute_access = True  # Gemma 4's layers differ
    rope = theirs.rope_parameters or {}
    assert ours.rope_theta == rope.get("full_attention", rope).get("rope_theta")
    if "sliding_attention" in rope:
        assert ours.local_rope_theta == rope["sliding_attention"]["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.num_kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim


@pytest.mark.parametrize(
    "architecture",
    [
        *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
        *("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"),
    ],
)
def test_experts_that_are_left_out_are_transformers_own(architecture: str, tmp_path: Path) -> None:
    kind = KINDS[architecture]
    folder = write(tmp_path, architectures=[architecture], model_type=kind.model_type)
    ours, theirs = read_model_config(folder).experts, kind.from_pretrained(folder)
    assert ours is not None
    assert ours.num_experts == theirs.num_experts
    assert ours.experts_per_token == theirs.num_experts_per_tok
    width = getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert ours.intermediate_size == width
    assert ours.shared_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", 0)
    assert ours.renormalize == getattr(theirs, "norm_topk_prob", True)


def test_layers_without_experts_are_those_transformers_makes_dense(tmp_path: Path) -> None:
    qwen: dict[str, object] = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 6}
    folder = write(tmp_path, **qwen, mlp_only_layers=[0, 3], decoder_sparse_step=2)
    experts = read_model_config(folder).experts
    assert experts is not None
    assert experts.dense_layers == {0, 2, 3, 4}
    assert read_model_config(write(tmp_path, **qwen, num_experts=0)).experts is None
    assert read_model_config(write(tmp_path, **qwen, decoder_sparse_step=7)).experts is None


def test_layers_without_rope_are_those_of_transformers(tmp_path: Path) -> None:
    smollm: dict[str, object] = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
    for changes in ({}, {"no_rope_layer_interval": 5}, {"no_rope_layers": [1, 0] * 17}):
        folder = write(tmp_path, rope_scaling=None, **smollm, **changes)
        theirs = SmolLM3Config.from_pretrained(folder).no_rope_layers or []
        assert read_model_config(folder).no_rope_layers == {i for i in range(32) if not theirs[i]}
    for wrong in ([1, 0], [2] * 32, "none"):
        with pytest.raises(ModelError, match="no_rope_layers"):
            read_model_config(write(tmp_path, rope_scaling=None, **smollm, no_rope_layers=wrong))


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("Ernie4_5ForCausalLM", {"use_bias": True}, "use_bias"),
        ("Ernie4_5ForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 0.01}, "even number of a head"),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier"),
        ("GraniteForCausalLM", {"logits_scaling": "large"}, "logits_scaling"),
        ("Ministral3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta"),
        ("Olmo3ForCausalLM", {"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ("SeedOssForCausalLM", {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_a_family_asks_for_in_vain_is_named(
    architecture: str, changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, architectures=[architecture], rope_scaling=None, **changes)
    with pytest.raises(ModelError, match=named):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("architecture", "changes", "qkv_bias", "o_bias"),
    [
        ("SeedOssForCausalLM", {"attention_bias": ...}, True, False),
        ("SeedOssForCausalLM", {"attention_bias": ..., "attention_out_bias": True}, True, True),
        ("SeedOssForCausalLM", {"attention_bias": False}, False, False),
        ("SeedOssForCausalLM", {"attention_bias": False, "attention_out_bias": True}, False, True),
        ("Glm4ForCausalLM", {"attention_bias": ...}, True, False),
        ("Glm4ForCausalLM", {"attention_bias": False}, False, False),
    ],
)
def test_families_with_biases_of_their_own(
    architecture: str, changes: dict[str, object], qkv_bias: bool, o_bias: bool, tmp_path: Path
) -> None:
    folder = write(tmp_path, architectures=[architecture], rope_scaling=None, **changes)
    config = read_model_config(folder)
    assert (config.qkv_bias, config.o_bias) == (qkv_bias, o_bias)


def test_gemma_3_is_read_as_transformers_4_wrote_it(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_theta=1000000,
        rope_local_base_freq=20000,
        sliding_window=512,
        sliding_window_pattern=6,
        query_pre_attn_scalar=100,
        hidden_size=640,
        num_hidden_layers=18,
    )
    config, theirs = read_model_config(folder), Gemma3TextConfig.from_pretrained(folder)
    assert (theirs.rope_parameters or {})["full_attention"]["factor"] == 8.0
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert (config.rope_theta, config.local_rope_theta) == (1e6, 20000.0)
    assert config.windows == (512, 512, 512, 512, 512, 0) * 3
    assert config.local_rope_layers == {i for i in range(18) if i % 6 != 5}
    assert (config.attention_scale, config.embedding_scale) == (0.1, 640**0.5)
    assert config.tie_word_embeddings is False, "this file says so"
    assert config.logit_softcap is None


@pytest.mark.parametrize("left_out", [True, False])
def test_gemma_2_has_the_soft_caps_and_scale_that_transformers_gives_it(
    left_out: bool, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    if not left_out:
        changes |= {"attn_logit_softcapping": 20.0, "final_logit_softcapping": None}
        changes |= {"query_pre_attn_scalar": 144}
    folder = write(tmp_path, rope_scaling=None, **changes)
    config, theirs = read_model_config(folder), Gemma2Config.from_pretrained(folder)
    assert config.attention_softcap == theirs.attn_logit_softcapping
    assert config.logit_softcap == theirs.final_logit_softcapping
    assert config.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert config.local_rope_layers == frozenset()
    assert config.norm_weights_minus_one
    assert not config.qk_norm


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_parameters": {"rope_type": "default"}}, "sliding_attention"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}}, "linear"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 32}, "no sliding_window"),
    ],
)
def test_what_a_gemma_3_asks_for_in_vain_is_named(
    changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    keys: dict[str, object] = {"architectures": ["Gemma3ForCausalLM"], "rope_scaling": None}
    with pytest.raises(ModelError, match=named):
        read_model_config(write(tmp_path, **(keys | changes)))
