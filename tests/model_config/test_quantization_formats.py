"""What is read of `quantization_config`: which layers, which scales; the rest is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from quantized_models import FORMATS, set_quantization
from tiny_models import random_model

from minisgl.errors import ModelError
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.model_config.hf_folder.quantization_formats import read_quantization
from minisgl.model_config.quantization import Fp8Scheme, Quantization, layer_scheme

QKV = ("q_proj", "k_proj", "v_proj")
DYNAMIC, BLOCK = FORMATS["compressed-tensors, dynamic"].config, FORMATS["compressed-tensors, block"].config
DEEPSEEK, MODELOPT = FORMATS["fp8 of DeepSeek"].config, FORMATS["modelopt"].config


def read(config: dict[str, Any], prefix: str = "") -> Quantization:
    quantization = read_quantization({"quantization_config": config}, prefix)
    assert quantization is not None
    return quantization


def with_group(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config with its one group changed; a dict changes a part of the group."""
    group = dict(config["config_groups"]["group_0"])
    for name, change in changes.items():
        group[name] = (group[name] or {}) | change if isinstance(change, dict) else change
    return config | {"config_groups": {"group_0": group}}


def test_a_config_without_quantization_has_none() -> None:
    assert read_quantization({}, "") is None
    assert read_quantization({"quantization_config": None}, "") is None
    assert layer_scheme(None, "model.layers.0.mlp.down_proj") is None


@pytest.mark.parametrize("name", FORMATS)
def test_the_head_is_left_out_and_the_blocks_are_not(name: str) -> None:
    quantization = read(FORMATS[name].config)
    assert not quantization.includes("lm_head")
    assert layer_scheme(quantization, "model.layers.3.self_attn.qkv_proj", QKV) is quantization.scheme
    assert isinstance(quantization.scheme, Fp8Scheme)
    assert quantization.scheme.weights.value == FORMATS[name].weights
    assert quantization.scheme.activations.value == FORMATS[name].activations
    expected = ("k_proj.k_scale", "v_proj.v_scale") if name == "modelopt" else None
    assert quantization.cache_scales == expected


def test_a_head_that_compressed_tensors_does_not_ignore_is_quantized() -> None:
    assert read(DYNAMIC | {"ignore": []}).includes("lm_head")


def test_names_may_be_written_with_the_prefix_of_a_multimodal_checkpoint() -> None:
    names = {"ignore": ["language_model.model.layers.0.mlp.down_proj"]}
    quantization = read(DYNAMIC | names, "language_model.")
    assert not quantization.includes("model.layers.0.mlp.down_proj")
    assert quantization.includes("model.layers.10.mlp.down_proj")


def test_a_name_is_not_taken_for_a_longer_one() -> None:
    quantization = read(DEEPSEEK | {"modules_to_not_convert": ["model.layers.1", "gate"]})
    assert not quantization.includes("model.layers.1.mlp.up_proj")
    assert not quantization.includes("model.layers.3.mlp.gate")
    assert quantization.includes("model.layers.10.mlp.up_proj")
    assert quantization.includes("model.layers.3.mlp.gate_proj")


def test_targets_may_be_patterns_of_names() -> None:
    quantization = read(with_group(DYNAMIC, targets=["re:.*self_attn.*"]))
    assert layer_scheme(quantization, "model.layers.3.self_attn.qkv_proj", QKV) is not None
    assert layer_scheme(quantization, "model.layers.3.mlp.down_proj") is None


def test_a_fused_layer_of_quantized_and_other_parts_is_refused() -> None:
    quantization = read(DYNAMIC | {"ignore": ["model.layers.3.self_attn.k_proj"]})
    with pytest.raises(ModelError, match=r"only model\.layers\.3\.self_attn\.q_proj, .*v_proj are quantized"):
        layer_scheme(quantization, "model.layers.3.self_attn.qkv_proj", QKV)


def test_a_layer_that_the_checkpoint_stores_fused_may_be_left_out_by_that_name() -> None:
    quantization = read(DYNAMIC | {"ignore": ["model.layers.3.self_attn.qkv_proj"]})
    assert layer_scheme(quantization, "model.layers.3.self_attn.qkv_proj", QKV) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "aqlm", "bits": 4}, "quant_method 'aqlm'"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ("fp8", "'fp8'"),
        (DYNAMIC | {"format": "marlin-24"}, "format 'marlin-24'"),
        (DYNAMIC | {"config_groups": {"a": {}, "b": {}}}, "config_groups a, b"),
        (DYNAMIC | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (DYNAMIC | {"ignore": ["re:("]}, "bad pattern"),
        (with_group(DYNAMIC, input_activations=None), "unquantized activations"),
        (with_group(DYNAMIC, weights={"num_bits": 4}), "weights of num_bits 4"),
        (with_group(DYNAMIC, weights={"type": "int"}), "type 'int'"),
        (with_group(DYNAMIC, weights={"symmetric": False}), "not symmetric"),
        (with_group(DYNAMIC, weights={"strategy": "group"}), "weights per group with dynamic activations"),
        (with_group(DYNAMIC, input_activations={"strategy": "tensor"}), "dynamic activations per tensor"),
        (with_group(DYNAMIC, output_activations={"num_bits": 8}), "output_activations"),
        (with_group(BLOCK, weights={"block_structure": [64, 64]}), r"block_structure \[64, 64\]"),
        (with_group(BLOCK, input_activations={"group_size": 64}), "group_size 64"),
        (DEEPSEEK | {"weight_block_size": [1, 128]}, r"weight_block_size \[1, 128\]"),
        (DEEPSEEK | {"activation_scheme": "static"}, "activation_scheme 'static' with blocks"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(config)


def test_a_quantized_router_is_refused_and_quantized_experts_are_not(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    random_model(family="qwen3_moe", **sizes).save_pretrained(tmp_path)
    set_quantization(tmp_path, DYNAMIC)
    with pytest.raises(ModelError, match=r"a quantized router .model\.layers\.0\.mlp\.gate.; take a version"):
        read_model_config(tmp_path)
    for config in (
        DYNAMIC | {"ignore": ["lm_head", "re:.*mlp.gate$"]},
        DYNAMIC | {"ignore": ["lm_head", r"re:.*\.mlp\..*"]},
        DEEPSEEK,
    ):
        set_quantization(tmp_path, config)
        quantization = read_model_config(tmp_path).quantization
        assert quantization is not None
        assert not quantization.includes("model.layers.1.mlp.gate")
