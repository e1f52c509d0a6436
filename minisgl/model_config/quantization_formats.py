"""Reads `quantization_config`, and what `--quantization` asks for.

Promise: a format or a setting of one that this engine does not support is refused by name.
"""

import fnmatch
import re
from dataclasses import replace
from typing import Any

from minisgl.errors import ConfigError, ModelError
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.json_fields import unsupported
from minisgl.model_config.quantization import ActivationScales, Fp8Scheme, Quantization, WeightScales

BLOCK = [128, 128]
SUPPORTED = (
    "FP8 of compressed-tensors (dynamic, static, block), of quant_method fp8 (DeepSeek, Qwen3-FP8) and of "
    "modelopt (quant_algo FP8)"
)
QUANTIZED_WHILE_LOADING = {
    "fp8": Fp8Scheme(WeightScales.CHANNEL, ActivationScales.TOKEN),
    "fp8-block": Fp8Scheme(WeightScales.BLOCK, ActivationScales.GROUP),
}
"""The values of --quantization."""


def quantized_while_loading(config: ModelConfig, name: str | None) -> ModelConfig:
    """The config with every linear layer of the blocks quantized as `--quantization` says; None = as it is.

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
    if config.experts is not None:
        raise ConfigError(f"{flag} can't quantize the experts of {config.architecture}; leave it away")
    scheme = QUANTIZED_WHILE_LOADING[name]
    quantization = Quantization(scheme=scheme, source=flag, ignored=("lm_head",), while_loading=True)
    return replace(config, quantization=quantization)


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
        raise _refused(f"{asked!r}")
    method = asked.get("quant_method")
    read = READERS.get(str(method))
    if read is None:
        raise _refused(f"quant_method {method!r}")
    return replace(read(asked), prefix=prefix)


def _read_compressed_tensors(asked: dict[str, Any]) -> Quantization:
    groups = asked.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refused(f"compressed-tensors with config_groups {_names(groups)}; one group is read")
    (group,) = groups.values()
    number_format = group.get("format") or asked.get("format")
    if number_format not in ("float-quantized", "naive-quantized"):
        raise _refused(f"compressed-tensors of format {number_format!r}")
    if asked.get("sparsity_config", {}).get("format", "dense") != "dense":
        raise _refused(f"sparsity_config {asked['sparsity_config']['format']!r}")
    if group.get("output_activations"):
        raise _refused("output_activations of compressed-tensors")
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    if inputs is None:
        raise _refused("compressed-tensors with FP8 weights and unquantized activations")
    for what, side in (("weights", weights), ("input_activations", inputs)):
        kind = (side.get("num_bits"), side.get("type"))
        if kind != (8, "float"):
            raise _refused(f"{what} of num_bits {kind[0]!r} and type {kind[1]!r}")
        if not side.get("symmetric", True):
            raise _refused(f"{what} that are not symmetric")
    if weights.get("dynamic"):
        raise _refused("weights that are dynamic")
    how = (str(weights.get("strategy")), str(inputs.get("strategy")), bool(inputs.get("dynamic", False)))
    if how not in COMPRESSED:
        raise _refused(
            f"weights per {how[0]} with {'dynamic' if how[2] else 'static'} activations per {how[1]}"
        )
    scheme = COMPRESSED[how]
    if scheme.weights is WeightScales.BLOCK:
        _check_block("block_structure", weights.get("block_structure"))
        if inputs.get("group_size") != BLOCK[1]:
            raise _refused(f"activations of group_size {inputs.get('group_size')!r}; {BLOCK[1]} is read")
    return Quantization(
        scheme=scheme,
        source="compressed-tensors",
        targets=_compressed_patterns(group.get("targets") or ["Linear"]),
        ignored=_compressed_patterns(asked.get("ignore") or []),
        cache_scales=("k_scale", "v_scale") if _has_cache_scales(asked) else None,
    )


COMPRESSED = {
    ("channel", "token", True): Fp8Scheme(WeightScales.CHANNEL, ActivationScales.TOKEN),
    ("tensor", "token", True): Fp8Scheme(WeightScales.TENSOR, ActivationScales.TOKEN),
    ("channel", "tensor", False): Fp8Scheme(WeightScales.CHANNEL, ActivationScales.STATIC),
    ("tensor", "tensor", False): Fp8Scheme(WeightScales.TENSOR, ActivationScales.STATIC),
    ("block", "group", True): Fp8Scheme(WeightScales.BLOCK, ActivationScales.GROUP),
}
"""By the strategies of weights and activations, and whether activations are dynamic."""


def _compressed_patterns(names: list[str]) -> tuple[str, ...]:
    """Names of layers, "re:" and a regular expression for their beginnings, or the class "Linear"."""
    patterns = []
    for name in names:
        if name == "Linear":
            patterns.append(".*")
        elif name.startswith("re:"):
            patterns.append(f"(?:{_checked_regex(name.removeprefix('re:'))}).*")
        else:
            patterns.append(re.escape(name))
    return tuple(patterns)


def _read_fp8(asked: dict[str, Any]) -> Quantization:
    """DeepSeek's and Qwen3-FP8's blocks, and the older files with one scale for each weight."""
    if asked.get("fmt", "e4m3") != "e4m3":
        raise _refused(f"fmt {asked['fmt']!r} of quant_method fp8")
    activations = asked.get("activation_scheme", "dynamic")
    block = asked.get("weight_block_size")
    if activations not in ("dynamic", "static") or (block is not None and activations == "static"):
        raise _refused(f"activation_scheme {activations!r}{' with blocks' if block else ''}")
    if block is not None:
        _check_block("weight_block_size", block)
        scheme = Fp8Scheme(WeightScales.BLOCK, ActivationScales.GROUP, "weight_scale_inv")
    elif activations == "static":
        scheme = Fp8Scheme(WeightScales.TENSOR, ActivationScales.STATIC)
    else:
        scheme = Fp8Scheme(WeightScales.TENSOR, ActivationScales.TOKEN)
    named = [*(asked.get("modules_to_not_convert") or []), *(asked.get("ignored_layers") or [])]
    # The head is never quantized in this format, listed or not. A name stands for a layer, for all layers of
    # a module, or for all layers whose name ends in it.
    return Quantization(
        scheme=scheme,
        source="fp8",
        ignored=("lm_head", *(rf"(?:.*\.)?{re.escape(name)}(?:\..*)?" for name in named)),
    )


def _read_modelopt(asked: dict[str, Any]) -> Quantization:
    inner = asked.get("quantization")
    asked = inner if isinstance(inner, dict) else asked  # as in hf_quant_config.json
    if asked.get("quant_algo") != "FP8":
        raise _refused(f"modelopt with quant_algo {asked.get('quant_algo')!r}")
    named = [*(asked.get("ignore") or []), *(asked.get("exclude_modules") or [])]
    ignored = [pattern for name in named for pattern in (fnmatch.translate(name), re.escape(name) + r"\..*")]
    return Quantization(
        scheme=Fp8Scheme(WeightScales.TENSOR, ActivationScales.STATIC),
        source="modelopt",
        ignored=tuple(ignored),
        cache_scales=("k_proj.k_scale", "v_proj.v_scale") if _has_cache_scales(asked) else None,
    )


READERS = {
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
}
"""By quant_method."""


def _has_cache_scales(asked: dict[str, Any]) -> bool:
    """Whether the checkpoint has a scale for each layer's keys and one for its values."""
    scheme = asked.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return not scheme.get("dynamic", False)
    return bool(scheme or asked.get("kv_cache_quant_algo"))


def _check_block(key: str, got: object) -> None:
    if got != BLOCK:
        raise _refused(f"{key} {got!r}; {BLOCK} is read")


def _checked_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelError(
            f"config.json: quantization_config has a bad pattern {pattern!r}: {error}"
        ) from error
    return pattern


def _names(groups: object) -> str:
    return ", ".join(groups) if isinstance(groups, dict) else repr(groups)


def _refused(what: str) -> ModelError:
    return unsupported(f"quantized weights: {what}. Supported: {SUPPORTED}; else take an unquantized version")
