"""Reads the description of a model from its Hugging Face folder: `config.json` and `generation_config.json`.

Promise: a setting that would change the model's output and that this engine does not support is refused by
name, never ignored. Reads the formats of transformers 4 and 5.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from minisgl.errors import ModelError
from minisgl.model_config.config import DTYPE_BYTES, FP8_CACHE, ModelConfig, RopeScaling
from minisgl.model_config.families import FAMILIES, MULTIMODAL_CLASSES, TEXT_PREFIX, Family, Windows
from minisgl.model_config.json_fields import integer, number, read_json, unsupported, whole_number
from minisgl.model_config.quantization_formats import quantized_while_loading, read_quantization
from minisgl.model_config.rope_config import read_rope, read_rope_by_layer_type


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
    read = read_rope_by_layer_type if family.rope_by_layer_type else read_rope
    rope = read(raw, family.rope_theta, head_dim)
    max_position = _max_position(raw, rope.scaling)
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
        qkv_bias=family.qkv_bias or has_bias,
        o_bias=has_bias,
        qk_norm=family.qk_norm,
        windows=_windows(raw, family, max_position),
        experts=family.read_experts(raw) if family.read_experts else None,
        checkpoint_prefix=prefix,
        quantization=read_quantization(raw, prefix),
        checkpoint_dtype=_checkpoint_dtype(raw),
        eos_token_ids=_joined_ids("eos_token_id", generation, raw),
        bos_token_id=next(iter(_joined_ids("bos_token_id", raw, generation)), None),
    )
    if family.is_gemma:
        config = _with_gemma_settings(config, raw, family, rope.local_theta)
    _refuse_quantized_experts(config)
    if kv_dtype == FP8_CACHE and config.quantization is not None:
        config = replace(config, cache_scale_names=config.quantization.cache_scales)
    return quantized_while_loading(config, quantization)


def _refuse_quantized_experts(config: ModelConfig) -> None:
    """Refuse a mixture whose experts or router are quantized.

    Raises:
        ModelError: they are.
    """
    experts, quantization = config.experts, config.quantization
    if experts is None or quantization is None:
        return
    for layer in range(config.num_layers):
        outer = f"model.layers.{layer}.{experts.module_name}"
        for name in (f"{outer}.gate", *(f"{outer}.experts.0.{part}" for part in experts.gate_up_down_names)):
            if layer not in experts.dense_layers and quantization.includes(name):
                raise unsupported(f"quantized experts ({name}); take a version with unquantized experts")


def _with_gemma_settings(
    config: ModelConfig, raw: dict[str, Any], family: Family, local_theta: float
) -> ModelConfig:
    """The config completed with the settings that only Gemma has."""
    kinds = _layer_kinds(raw, family) if family.rope_by_layer_type else []
    return replace(
        config,
        local_rope_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention"),
        local_rope_theta=local_theta,
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
    "partial_rotary_factor": (1.0,),
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
    architecture, model_type = MULTIMODAL_CLASSES[whole]
    text = raw.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", model_type) != model_type:
        got = text.get("model_type") if isinstance(text, dict) else text
        raise unsupported(f"text_config of model_type {got!r} in a {whole}; only {model_type!r} is known")
    # transformers reads these keys from the outer config.
    asked = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
    of_whole = {key: raw[key] for key in asked if raw.get(key) is not None}
    return {**raw, **text, **of_whole, "architectures": [architecture]}, TEXT_PREFIX


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
    activation, known = family.activation
    if raw.get(activation, known) != known:
        raise unsupported(f"{activation} = {raw[activation]!r}; only {known!r} is known")
    for name, harmless in UNSUPPORTED_KEYS.items():
        value = raw.get(name)
        if value is not None and value not in harmless:
            raise unsupported(f"{name} = {value!r}")
    softcaps = {
        "attn_logit_softcapping": family.attention_softcap,
        "final_logit_softcapping": family.is_gemma,
    }
    for name, is_read in softcaps.items():
        if raw.get(name) is not None and not is_read:
            raise unsupported(f"{name} = {raw[name]!r}")
    if raw.get("attention_bias") and not (family.attention_bias or family.qkv_bias):
        raise unsupported(f"attention_bias = {raw['attention_bias']!r}")
    if family.windows is Windows.NONE and raw.get("sliding_window") and raw.get("use_sliding_window", True):
        raise unsupported(f"sliding_window = {raw['sliding_window']!r}")


def _windows(raw: dict[str, Any], family: Family, max_position: int) -> tuple[int, ...]:
    """`ModelConfig.windows`; a window as long as the longest context counts as no window."""
    kinds = _layer_kinds(raw, family)
    if "sliding_attention" not in kinds:
        return ()
    window = integer({"sliding_window": raw.get("sliding_window", family.sliding_window)}, "sliding_window")
    if window >= max_position:
        return ()
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _layer_kinds(raw: dict[str, Any], family: Family) -> list[str]:
    """Each layer's type, "full_attention" or "sliding_attention", as transformers assigns them.

    Raises:
        ModelError: `layer_types` has the wrong length, an unknown type, or a type that this class ignores.
    """
    num_layers = integer(raw, "num_hidden_layers")
    listed = raw.get("layer_types") or []
    if not isinstance(listed, list) or len(listed) not in (0, num_layers):
        raise ModelError(f"config.json: layer_types must name a type for each of {num_layers} layers")
    others = sorted({str(kind) for kind in listed} - {"full_attention", "sliding_attention"})
    if others:
        raise unsupported(f"layer_types {', '.join(others)}; known are full_attention, sliding_attention")

    window = raw.get("sliding_window", family.sliding_window)
    used = window is not None and family.windows is not Windows.NONE
    if family.windows in (Windows.ALL_IF_USED, Windows.LATER_LAYERS_IF_USED):
        used = used and bool(raw.get("use_sliding_window"))
    first = every = 0
    if family.windows is Windows.LATER_LAYERS_IF_USED:
        first = whole_number(raw, "max_window_layers", 28)
    elif family.windows is Windows.EVERY_SECOND:
        every = 2
    elif family.windows is Windows.PATTERN:
        every = integer(raw, "sliding_window_pattern", 6)
    kinds = ["full_attention"] * num_layers
    for i in range(first if used else num_layers, num_layers):
        if not every or (i + 1) % every:
            kinds[i] = "sliding_attention"
    by_pattern = family.windows in (Windows.EVERY_SECOND, Windows.PATTERN)
    if by_pattern or family.windows is Windows.LATER_LAYERS_IF_USED:
        if not used and (by_pattern or "sliding_attention" in listed):
            raise ModelError("config.json: some layers are to have a window, but there is no sliding_window")
        return listed or kinds
    if "sliding_attention" in listed and listed != kinds:
        raise unsupported("layer_types with sliding_attention, which this architecture does not read")
    return kinds


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
