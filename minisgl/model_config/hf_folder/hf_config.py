"""Reads the description of a model from its Hugging Face folder: `config.json` and `generation_config.json`.

Promise: a setting that would change the model's output and that this engine does not support is refused by
name, never ignored. Reads the formats of transformers 4 and 5.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from minisgl.errors import ModelError
from minisgl.model_config.config import (
    DTYPE_BYTES,
    FP8_CACHE,
    Activation,
    ExpertStorage,
    ModelConfig,
    RopeScaling,
)
from minisgl.model_config.hf_folder.experts_config import MXFP4
from minisgl.model_config.hf_folder.families import (
    FAMILIES,
    MULTIMODAL_CLASSES,
    OTHER_TEXT_PREFIXES,
    TEXT_PREFIX,
    Family,
    Windows,
)
from minisgl.model_config.hf_folder.json_fields import integer, number, read_json, unsupported
from minisgl.model_config.hf_folder.known_keys import refuse_unknown_keys
from minisgl.model_config.hf_folder.layer_kinds import (
    SLIDING,
    layer_kinds,
    layer_windows,
    layers_without_rope,
)
from minisgl.model_config.hf_folder.quantization_formats import quantized_while_loading, read_quantization
from minisgl.model_config.hf_folder.rope_config import read_rope, read_rope_by_layer_type, read_rotary_dim
from minisgl.model_config.quantization import Int4Scheme


def read_model_config(
    folder: Path, quantization: str | None = None, kv_dtype: str | None = None
) -> ModelConfig:
    """Read the model in `folder` and check that this engine supports all its settings.

    Args:
        quantization: `EngineConfig.quantization`: how to quantize the weights while loading.
        kv_dtype: `EngineConfig.kv_dtype`: with an FP8 cache, its scales are read if the checkpoint has them.

    Raises:
        ModelError: config.json is missing or malformed, or has an unsupported setting.
        ConfigError: `quantization` does not fit the model.
    """
    raw = read_json(folder / "config.json", required=True)
    generation = read_json(folder / "generation_config.json", required=False)
    raw, prefix = _text_part(raw)
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    raw = {**family.defaults, **raw}
    _refuse_unsupported(raw, family)

    hidden_size = integer(raw, "hidden_size")
    num_heads = integer(raw, "num_attention_heads")
    num_kv_heads = integer(raw, "num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    if raw.get("head_dim") is None and hidden_size % num_heads and family.head_dim is None:
        raise ModelError(
            f"config.json gives no head_dim and hidden_size ({hidden_size}) is no multiple of "
            f"num_attention_heads ({num_heads})"
        )
    head_dim = integer(raw, "head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
    rotary_dim = read_rotary_dim(raw, family.rotary_share, head_dim)
    if family.local_rope_theta is not None:
        rope = read_rope_by_layer_type(raw, family.rope_theta, family.local_rope_theta, rotary_dim)
    else:
        rope = read_rope(raw, family.rope_theta, rotary_dim)
    max_position = _max_position(raw, rope.scaling)
    kinds = layer_kinds(raw, family)
    has_bias = family.attention_bias and bool(raw.get("attention_bias"))
    config = ModelConfig(
        architecture=architecture,
        num_layers=integer(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=integer(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=integer(raw, "vocab_size"),
        max_position=max_position,
        rms_norm_eps=number(raw, "rms_norm_eps", family.rms_norm_eps),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.tied)),
        qkv_bias=has_bias or (family.qkv_bias and bool(raw.get(family.qkv_bias_key or "", True))),
        o_bias=bool(family.o_bias_key and family.attention_bias and raw.get(family.o_bias_key)),
        qk_norm=family.qk_norm,
        qk_norm_of_all_heads=family.qk_norm_of_all_heads,
        windows=layer_windows(raw, family, max_position),
        no_rope_layers=layers_without_rope(raw) if family.reads_no_rope_layers else frozenset(),
        local_rope_layers=_layers_with_local_rope(family, kinds),
        local_rope_theta=rope.local_theta,
        rotary_dim=rotary_dim if rotary_dim < head_dim else None,
        rope_interleaved=family.rope_interleaved,
        experts=family.read_experts(raw) if family.read_experts else None,
        checkpoint_prefix=prefix,
        quantization=None if _is_mxfp4(raw, family) else read_quantization(raw, prefix),
        checkpoint_dtype=_checkpoint_dtype(raw),
        eos_token_ids=_joined_ids("eos_token_id", generation, raw),
        bos_token_id=next(iter(_joined_ids("bos_token_id", raw, generation)), None),
    )
    if family.is_gemma:
        config = _with_gemma_settings(config, raw)
    if family.complete is not None:
        config = family.complete(config, raw, kinds)
    _check_quantized_experts(config)
    if kv_dtype == FP8_CACHE and config.quantization is not None:
        config = replace(config, cache_scale_names=config.quantization.cache_scales)
    return _with_known_experts(quantized_while_loading(config, quantization))


def _with_known_experts(config: ModelConfig) -> ModelConfig:
    """The config, unless its quantization includes experts that only unquantized kernels multiply.

    Raises:
        ModelError: it does.
    """
    experts, quantization = config.experts, config.quantization
    is_plain = experts is None or (
        experts.activation is Activation.SILU and experts.storage is ExpertStorage.EACH
    )
    if not is_plain and quantization is not None:
        raise unsupported(f"{quantization.describe()} for {config.architecture} with experts")
    return config


def _check_quantized_experts(config: ModelConfig) -> None:
    """Refuse a quantized router, and experts that are quantized as their kernels can't read them.

    Raises:
        ModelError: the mixture is so quantized.
    """
    experts, quantization = config.experts, config.quantization
    if experts is None or quantization is None:
        return
    for layer in range(config.num_layers):
        outer = f"model.layers.{layer}.{experts.module_name}"
        if layer in experts.dense_layers:
            continue
        if quantization.includes(f"{outer}.gate"):
            raise unsupported(
                f"a quantized router ({outer}.gate); take a version whose list of layers left out has it"
            )
        names = [f"{outer}.experts.0.{part}" for part in experts.gate_up_down_names]
        scheme = quantization.scheme
        if not isinstance(scheme, Int4Scheme) or not scheme.in_any_order:
            continue
        for name in names:
            if quantization.includes(name):
                raise unsupported(f"experts of {scheme.describe()} (desc_act; {name})")


def _is_mxfp4(raw: dict[str, Any], family: Family) -> bool:
    """Whether the experts are stored in MXFP4, which the family reads; nothing else is quantized then."""
    asked = raw.get("quantization_config")
    return family.experts_in_mxfp4 and isinstance(asked, dict) and asked.get("quant_method") == MXFP4


def _layers_with_local_rope(family: Family, kinds: list[str]) -> frozenset[int]:
    if family.local_rope_theta is None:
        return frozenset()
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == SLIDING)


def _with_gemma_settings(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    """The config completed with the settings that only Gemma has."""
    return replace(
        config,
        attention_scale=number(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_softcap=_softcap(raw, "attn_logit_softcapping"),
        logit_softcap=_softcap(raw, "final_logit_softcapping"),
        norm_weights_minus_one=True,
    )


def _softcap(raw: dict[str, Any], key: str) -> float | None:
    """The soft cap under `key`; None = no cap."""
    return None if raw.get(key) is None else number(raw, key)


UNSUPPORTED_KEYS: dict[str, tuple[object, ...]] = {
    "mlp_bias": (False,),
    "use_bias": (False,),
    "clip_qkv": (),
    "dual_chunk_attention_config": (),
    "compression_config": (),
    "use_bidirectional_attention": (False,),
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
}
"""Keys that this engine does not support, with their harmless values (null is always harmless)."""


def _text_part(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The text model's part of a multimodal config, and the prefix of its tensor names.

    A text-only config is returned unchanged, with an empty prefix.

    Raises:
        ModelError: the text model's type is not supported.
    """
    whole = next((name for name in _class_names(raw) if name in MULTIMODAL_CLASSES), None)
    if whole is None:
        return raw, ""
    by_type = MULTIMODAL_CLASSES[whole]
    text = raw.get("text_config")
    model_type = text.get("model_type", next(iter(by_type))) if isinstance(text, dict) else text
    if not isinstance(text, dict) or model_type not in by_type:
        known = ", ".join(map(repr, by_type))
        raise unsupported(f"text_config of model_type {model_type!r} in a {whole}; known: {known}")
    # transformers reads these keys from the outer config.
    asked = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
    of_whole = {key: raw[key] for key in asked if raw.get(key) is not None}
    prefix = OTHER_TEXT_PREFIXES.get(whole, TEXT_PREFIX)
    return {**raw, **text, **of_whole, "architectures": [by_type[model_type]]}, prefix


def _class_names(raw: dict[str, Any]) -> list[str]:
    named = raw.get("architectures") or []
    return [named] if isinstance(named, str) else named


def _architecture(raw: dict[str, Any]) -> str:
    """The first class name in config.json that is supported."""
    named = _class_names(raw)
    for name in named:
        if name in FAMILIES:
            return name
    got = ", ".join(map(str, named)) or f"none (model_type {raw.get('model_type')!r})"
    raise ModelError(
        f"the model's architecture is not supported: got {got}; supported: "
        f"{', '.join((*FAMILIES, *MULTIMODAL_CLASSES))}"
    )


def _refuse_unsupported(raw: dict[str, Any], family: Family) -> None:
    """Refuse settings that this engine does not support.

    Raises:
        ModelError: names the first such setting.
    """
    if family.keys is not None:
        refuse_unknown_keys(raw, family.keys)
    activation, known = family.activation
    if raw.get(activation, known) != known:
        raise unsupported(f"{activation} = {raw[activation]!r}; only {known!r} is known")
    for name, harmless in UNSUPPORTED_KEYS.items():
        value = raw.get(name)
        if value is not None and value not in harmless and name not in family.reads:
            raise unsupported(f"{name} = {value!r}")
    softcaps = {
        "attn_logit_softcapping": family.attention_softcap,
        "final_logit_softcapping": family.is_gemma or "final_logit_softcapping" in family.reads,
    }
    for name, is_read in softcaps.items():
        if raw.get(name) is not None and not is_read:
            raise unsupported(f"{name} = {raw[name]!r}")
    if raw.get("attention_bias") and not (family.attention_bias or family.qkv_bias):
        raise unsupported(f"attention_bias = {raw['attention_bias']!r}")
    if family.windows is Windows.NONE and raw.get("sliding_window") and raw.get("use_sliding_window", True):
        raise unsupported(f"sliding_window = {raw['sliding_window']!r}")


def _max_position(raw: dict[str, Any], scaling: RopeScaling | None) -> int:
    """Longest context. With YaRN, the original length times the factor (Qwen2.5's file has the original)."""
    max_position = integer(raw, "max_position_embeddings")
    if scaling is None or scaling.kind != "yarn":
        return max_position
    return max(max_position, int(scaling.original_max_position * scaling.factor))


def _checkpoint_dtype(raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"config.json: weights of dtype {name!r}; known are {', '.join(DTYPE_BYTES)}")
    return name


def _joined_ids(key: str, *configs: dict[str, Any]) -> tuple[int, ...]:
    """The token ids under `key` in all configs, without duplicates, in order. A value is an id or a list."""
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get(key)
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ModelError(f"{key} must be a token id or a list of them, got {value!r}")
            ids[token_id] = None
    return tuple(ids)
