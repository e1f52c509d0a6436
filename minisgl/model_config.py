"""Reads what a model is from its Hugging Face folder: `config.json` and `generation_config.json`.

Promise: a setting that would change the model's output and that this engine does not have is refused by
name, never ignored. Reads what transformers 4 and transformers 5 write.
"""

import json
from pathlib import Path
from typing import Any

from minisgl.config import DTYPE_BYTES, ModelConfig, RopeScaling
from minisgl.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Hugging Face class names whose settings are understood here; models/registry.py builds them."""

LARGEST_INTEGER = 1 << 31


def read_model_config(folder: Path) -> ModelConfig:
    """The model in `folder`, checked to be one this engine can run as it is meant.

    Raises:
        ModelError: config.json is missing or broken, or asks for something this engine does not have.
    """
    raw = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json", required=False)
    architecture = _architecture(raw)
    _refuse_what_is_missing(raw, architecture)

    hidden_size = _integer(raw, "hidden_size")
    num_heads = _integer(raw, "num_attention_heads")
    num_kv_heads = _integer(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    is_qwen3 = architecture == "Qwen3ForCausalLM"
    if raw.get("head_dim") is None and hidden_size % num_heads and not is_qwen3:
        raise ModelError(
            f"config.json gives no head_dim and hidden_size ({hidden_size}) is no multiple of "
            f"num_attention_heads ({num_heads})"
        )
    # Where the file gives none: transformers' own default for the architecture.
    head_dim = _integer(raw, "head_dim", 128 if is_qwen3 else hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
    max_position = _integer(raw, "max_position_embeddings")
    rope_theta, rope_scaling = _rope(raw, max_position)
    return ModelConfig(
        architecture=architecture,
        num_layers=_integer(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(raw, "vocab_size"),
        max_position=max_position,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=is_qwen3,
        checkpoint_dtype=_checkpoint_dtype(raw),
        eos_token_ids=_joined_ids("eos_token_id", generation, raw),
        bos_token_id=next(iter(_joined_ids("bos_token_id", raw, generation)), None),
    )


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if required:
            raise ModelError(f"{path} is missing; a model folder needs it") from error
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _architecture(raw: dict[str, Any]) -> str:
    """The first known of config.json's class names."""
    named = raw.get("architectures") or []
    if isinstance(named, str):
        named = [named]
    for name in named:
        if name in ARCHITECTURES:
            return name
    got = ", ".join(map(str, named)) or f"none (model_type {raw.get('model_type')!r})"
    raise ModelError(
        f"the model's architecture is not supported: got {got}; supported: {', '.join(ARCHITECTURES)}"
    )


def _refuse_what_is_missing(raw: dict[str, Any], architecture: str) -> None:
    """Name the first setting that this engine would have to ignore.

    Raises:
        ModelError: there is one.
    """

    def refuse(what: str) -> None:
        raise ModelError(f"this engine does not have what config.json asks for: {what}")

    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        refuse(f"quantized weights ({method}); take the model's unquantized version")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            refuse(f"{name} = {raw[name]!r}")
    if raw.get("hidden_act", "silu") != "silu":
        refuse(f"hidden_act = {raw['hidden_act']!r}; only 'silu' is known")
    window = _sliding_window(raw, architecture)
    if window:
        refuse(f"sliding_window = {window!r}")
    other_layers = sorted({str(kind) for kind in raw.get("layer_types") or []} - {"full_attention"})
    if other_layers:
        refuse(f"layer_types {', '.join(other_layers)}; only full_attention is known")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(f"partial_rotary_factor = {raw['partial_rotary_factor']!r}")


def _sliding_window(raw: dict[str, Any], architecture: str) -> object:
    """The window that some layers have; None = none has one, or `layer_types` says which."""
    if architecture == "LlamaForCausalLM":
        return raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    # Qwen: off unless asked for, then for the layers from max_window_layers on.
    if not raw.get("use_sliding_window") or raw.get("layer_types"):
        return None
    first = raw.get("max_window_layers", 28)
    all_full = isinstance(first, int) and first >= _integer(raw, "num_hidden_layers")
    return None if all_full else raw.get("sliding_window", 4096)


def _rope(raw: dict[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    older, newer = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for settings in (older, newer):
        if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
            raise ModelError("config.json: RoPE settings that differ by layer type are not supported")
    # Where a folder has both, transformers follows rope_scaling; theta may still lie in the other.
    parameters = older or newer
    theta = _number(newer, "rope_theta", _number(raw, "rope_theta", 10000.0))
    theta = _number(parameters, "rope_theta", theta)
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json: a partial_rotary_factor other than 1 is not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=_number(parameters, "factor"))
    if kind == "llama3":
        original = raw.get("original_max_position_embeddings") or max_position
        scaling = RopeScaling(
            kind="llama3",
            factor=_number(parameters, "factor"),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
            original_max_position=_integer(parameters, "original_max_position_embeddings", original),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelError("config.json: RoPE's high_freq_factor must be larger than low_freq_factor")
        return theta, scaling
    raise ModelError(
        f"this engine does not have what config.json asks for: RoPE of type {kind!r}; "
        "known are default, linear, llama3"
    )


def _checkpoint_dtype(raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"config.json: weights of dtype {name!r}; known are {', '.join(DTYPE_BYTES)}")
    return name


def _joined_ids(key: str, *configs: dict[str, Any]) -> tuple[int, ...]:
    """Token ids under `key`, an integer or a list of them in each config; each once, in order."""
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get(key)
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise ModelError(f"{key} must be a token id or a list of them, got {value!r}")
            ids[token_id] = None
    return tuple(ids)


def _integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_INTEGER:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)
