"""What is read of `quantization_config` of 4-bit weights; the rest is refused by name."""

from typing import Any

import pytest
from int4_models import AWQ, GPTQ, INT4_FORMATS

from minisgl.errors import ModelError
from minisgl.model_config.hf_folder.quantization_formats import read_quantization
from minisgl.model_config.quantization import Int4Scheme, Quantization, layer_scheme

PACKED = INT4_FORMATS["compressed-tensors"].config


def read(config: dict[str, Any]) -> Quantization:
    quantization = read_quantization({"quantization_config": config}, "")
    assert quantization is not None
    return quantization


def with_group(**changes: Any) -> dict[str, Any]:
    """compressed-tensors with its one group changed; a dict changes a part of the group."""
    groups: Any = PACKED["config_groups"]
    group = dict(groups["group_0"])
    for name, change in changes.items():
        group[name] = (group[name] or {}) | change if isinstance(change, dict) else change
    return PACKED | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize("name", INT4_FORMATS)
def test_the_head_is_left_out_and_the_blocks_are_not(name: str) -> None:
    form = INT4_FORMATS[name]
    quantization = read(form.config)
    assert not quantization.includes("lm_head")
    scheme = layer_scheme(quantization, "model.layers.3.mlp.gate_up_proj", ("gate_proj", "up_proj"))
    assert isinstance(scheme, Int4Scheme)
    assert (scheme.group, scheme.zero_points, scheme.in_any_order) == (
        form.group,
        form.zero_points,
        form.in_any_order,
    )


def test_gptq_may_name_the_quantized_layers() -> None:
    names = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    quantization = read(GPTQ | {"modules_in_block_to_quantize": names})
    assert quantization.includes("model.layers.3.mlp.down_proj")
    assert not quantization.includes("model.layers.3.self_attn.o_proj")
    assert read(GPTQ | {"lm_head": True}).includes("lm_head")


def test_it_is_described_in_one_phrase() -> None:
    assert read(AWQ).describe() == "4-bit weights in groups of 128 with zero points (awq)"
    act_order = read(GPTQ | {"desc_act": True}).describe()
    assert act_order == "4-bit weights in groups of 128, groups in any order (gptq)"
    assert read(GPTQ | {"group_size": -1}).describe() == "4-bit weights per channel (gptq)"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (AWQ | {"bits": 8}, "awq with bits 8; 4 is read"),
        (AWQ | {"version": "gemv"}, "awq of version 'gemv'"),
        (AWQ | {"zero_point": False}, "awq with zero_point False"),
        (AWQ | {"group_size": 16}, "awq with group_size 16; 32, 64, 128 and one for all inputs are read"),
        (GPTQ | {"bits": 3}, "gptq with bits 3"),
        (GPTQ | {"checkpoint_format": "gptq_p"}, "gptq with checkpoint_format 'gptq_p'"),
        (GPTQ | {"is_marlin_format": True}, "gptq with is_marlin_format True"),
        (GPTQ | {"dynamic": {"-:.*mlp.*": {}}}, "gptq with dynamic"),
        (GPTQ | {"pack_dtype": "int16"}, "gptq with pack_dtype 'int16'"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (with_group(weights={"num_bits": 8}), "'pack-quantized' with weights of num_bits 8"),
        (with_group(weights={"type": "float"}), "and type 'float'"),
        (with_group(weights={"strategy": "tensor"}), "weights per tensor"),
        (with_group(weights={"group_size": 256}), "group_size 256"),
        (with_group(weights={"actorder": "other"}), "actorder 'other'"),
        (with_group(weights={"dynamic": True}), "weights that are dynamic"),
        (with_group(input_activations={"num_bits": 8}), "with input_activations"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(config)
