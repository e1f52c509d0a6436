"""Reads `quantization_config`, and what `--quantization` asks for.

Promise: a format or a setting of one that this engine does not support is refused by name.
"""

import fnmatch
import re
from dataclasses import replace
from typing import Any

from minisgl.errors import ConfigError
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.hf_folder.int4_formats import read_awq, read_gptq, read_packed
from minisgl.model_config.hf_folder.quantization_names import (
    ROUTERS,
    compressed_patterns,
    has_cache_scales,
    module_patterns,
    refused,
)
from minisgl.model_config.quantization import (
    GROUP_SIZES,
    ActivationScales,
    Fp8Scheme,
    Int4Layout,
    Int4Scheme,
    Quantization,
    Scheme,
    WeightScales,
)

BLOCK = [128, 128]
INT4 = "int4"
QUANTIZED_WHILE_LOADING = {
    "fp8": Fp8Scheme(WeightScales.CHANNEL, ActivationScales.TOKEN),
    "fp8-block": Fp8Scheme(WeightScales.BLOCK, ActivationScales.GROUP),
    INT4: Int4Scheme(Int4Layout.COMPUTED, GROUP_SIZES[0]),
}
"""The values of --quantization."""


def quantized_while_loading(config: ModelConfig, name: str | None) -> ModelConfig:
    """The config with every linear layer of the blocks but routers quantized as `--quantization` says.

    None = as it is.

    Raises:
        ConfigError: there is no such quantization, or it does not fit the model.
    """
    if name is None:
        return config
    flag = f"--quantization {name}"
    if name not in QUANTIZED_WHILE_LOADING:
        raise ConfigError(f"--quantization must be one of {', '.join(QUANTIZED_WHILE_LOADING)}, got {name}")
    if config.quantization is not None:
        raise ConfigError(
            f"{flag}: the checkpoint is quantized already, as {config.quantization.describe()}; leave the "
            "flag away"
        )
    scheme: Scheme = QUANTIZED_WHILE_LOADING[name]
    if isinstance(scheme, Int4Scheme):
        scheme = replace(scheme, group=_largest_group(config, flag))
    quantization = Quantization(scheme=scheme, source=flag, ignored=("lm_head", *ROUTERS), while_loading=True)
    return replace(config, quantization=quantization)


def _largest_group(config: ModelConfig, flag: str) -> int:
    """The largest group that all layers' widths are multiples of.

    Raises:
        ConfigError: there is none.
    """
    widths = [config.hidden_size, config.num_heads * config.head_dim]
    experts = config.experts
    if experts is None or experts.dense_layers:
        widths.append(config.intermediate_size)
    if experts is not None:
        widths.append(experts.intermediate_size)
        widths += [experts.shared_intermediate_size] if experts.shared_intermediate_size else []
    for group in GROUP_SIZES:
        if all(width % group == 0 for width in widths):
            return group
    raise ConfigError(
        f"{flag} needs layers whose input widths are multiples of {GROUP_SIZES[-1]}, and this model has "
        f"{', '.join(str(width) for width in dict.fromkeys(widths))}; take fp8, or leave the flag away"
    )


def read_quantization(raw: dict[str, Any], prefix: str) -> Quantization | None:
    """The quantization that `quantization_config` describes; None = the checkpoint is not quantized.

    Args:
        raw: config.json, or its text part.
        prefix: `ModelConfig.checkpoint_prefix`.

    Raises:
        ModelError: the format is not supported.
    """
    asked = raw.get("quantization_config")
    if not asked:
        return None
    if not isinstance(asked, dict):
        raise refused(f"{asked!r}")
    method = asked.get("quant_method")
    read = READERS.get(str(method))
    if read is None:
        raise refused(f"quant_method {method!r}")
    return replace(read(asked), prefix=prefix)


def _read_compressed_tensors(asked: dict[str, Any]) -> Quantization:
    groups = asked.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise refused(f"compressed-tensors with config_groups {_names(groups)}; one group is read")
    (group,) = groups.values()
    number_format = group.get("format") or asked.get("format")
    sparsity = (asked.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise refused(f"sparsity_config {sparsity!r}")
    if number_format == "pack-quantized":
        return read_packed(asked, group)
    if number_format not in ("float-quantized", "naive-quantized"):
        raise refused(f"compressed-tensors of format {number_format!r}")
    if group.get("output_activations"):
        raise refused("output_activations of compressed-tensors")
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if inputs is None:
        raise refused("compressed-tensors with FP8 weights and unquantized activations")
    for what, side in (("weights", weights), ("input_activations", inputs)):
        kind = (side.get("num_bits"), side.get("type"))
        if kind != (8, "float"):
            raise refused(f"{what} of num_bits {kind[0]!r} and type {kind[1]!r}")
        if not side.get("symmetric", True):
            raise refused(f"{what} that are not symmetric")
    if weights.get("dynamic"):
        raise refused("weights that are dynamic")
    how = (str(weights.get("strategy")), str(inputs.get("strategy")), bool(inputs.get("dynamic", False)))
    if how not in COMPRESSED:
        raise refused(
            f"weights per {how[0]} with {'dynamic' if how[2] else 'static'} activations per {how[1]}"
        )
    scheme = COMPRESSED[how]
    if scheme.weights is WeightScales.BLOCK:
        _check_block("block_structure", weights.get("block_structure"))
        if inputs.get("group_size") != BLOCK[1]:
            raise refused(f"activations of group_size {inputs.get('group_size')!r}; {BLOCK[1]} is read")
    return Quantization(
        scheme=scheme,
        source="compressed-tensors",
        targets=compressed_patterns(group.get("targets") or ["Linear"]),
        ignored=compressed_patterns(asked.get("ignore") or []),
        cache_scales=("k_scale", "v_scale") if has_cache_scales(asked) else None,
    )


COMPRESSED = {
    ("channel", "token", True): Fp8Scheme(WeightScales.CHANNEL, ActivationScales.TOKEN),
    ("tensor", "token", True): Fp8Scheme(WeightScales.TENSOR, ActivationScales.TOKEN),
    ("channel", "tensor", False): Fp8Scheme(WeightScales.CHANNEL, ActivationScales.STATIC),
    ("tensor", "tensor", False): Fp8Scheme(WeightScales.TENSOR, ActivationScales.STATIC),
    ("block", "group", True): Fp8Scheme(WeightScales.BLOCK, ActivationScales.GROUP),
}
"""By the strategies of weights and activations, and whether activations are dynamic."""


def _read_fp8(asked: dict[str, Any]) -> Quantization:
    """DeepSeek's and Qwen3-FP8's blocks, and the older files with one scale for each weight."""
    if asked.get("fmt", "e4m3") != "e4m3":
        raise refused(f"fmt {asked['fmt']!r} of quant_method fp8")
    activations = asked.get("activation_scheme", "dynamic")
    block = asked.get("weight_block_size")
    if activations not in ("dynamic", "static") or (block is not None and activations == "static"):
        raise refused(f"activation_scheme {activations!r}{' with blocks' if block else ''}")
    if block is not None:
        _check_block("weight_block_size", block)
        scheme = Fp8Scheme(WeightScales.BLOCK, ActivationScales.GROUP, "weight_scale_inv")
    elif activations == "static":
        scheme = Fp8Scheme(WeightScales.TENSOR, ActivationScales.STATIC)
    else:
        scheme = Fp8Scheme(WeightScales.TENSOR, ActivationScales.TOKEN)
    named = [*(asked.get("modules_to_not_convert") or []), *(asked.get("ignored_layers") or [])]
    # Head and routers are never quantized in this format, listed or not.
    return Quantization(scheme=scheme, source="fp8", ignored=("lm_head", *ROUTERS, *module_patterns(named)))


def _read_modelopt(asked: dict[str, Any]) -> Quantization:
    inner = asked.get("quantization")
    asked = inner if isinstance(inner, dict) else asked  # as in hf_quant_config.json
    if asked.get("quant_algo") != "FP8":
        raise refused(f"modelopt with quant_algo {asked.get('quant_algo')!r}")
    named = [*(asked.get("ignore") or []), *(asked.get("exclude_modules") or [])]
    ignored = [pattern for name in named for pattern in (fnmatch.translate(name), re.escape(name) + r"\..*")]
    return Quantization(
        scheme=Fp8Scheme(WeightScales.TENSOR, ActivationScales.STATIC),
        source="modelopt",
        ignored=tuple(ignored),
        cache_scales=("k_proj.k_scale", "v_proj.v_scale") if has_cache_scales(asked) else None,
    )


READERS = {
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
}
"""By quant_method."""


def _check_block(key: str, got: object) -> None:
    if got != BLOCK:
        raise refused(f"{key} {got!r}; {BLOCK} is read")


def _names(groups: object) -> str:
    return ", ".join(groups) if isinstance(groups, dict) else repr(groups)
