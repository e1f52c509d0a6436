"""Reads the settings that only one family has: each function completes a config that is read so far.

Promise: keys that are left out mean what transformers takes for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minisgl.model_config.config import ModelConfig, QueryScaling
from minisgl.model_config.hf_folder.json_fields import integer, number, unsupported, whole_number
from minisgl.model_config.kv_groups import KVShape, StateShape

Complete = Callable[[ModelConfig, dict[str, Any], Sequence[str]], ModelConfig]
"""Takes the config so far, config.json and each layer's type; returns the config with more settings."""

CONV_TAPS = 4
"""Tokens that the convolution of linear attention sees."""
DELTA_DIMS = (16, 32, 64, 128)
"""Elements of a head of linear attention that the kernels know."""


def with_granite_multipliers(config: ModelConfig, raw: dict[str, Any], kinds: Sequence[str]) -> ModelConfig:
    """Granite: factors on embeddings, scores and what a layer adds; a divisor of the logits."""
    return replace(
        config,
        embedding_scale=_unless_one(raw, "embedding_multiplier"),
        attention_scale=number(raw, "attention_multiplier", 1.0),
        residual_scale=_unless_one(raw, "residual_multiplier"),
        logits_divisor=_unless_one(raw, "logits_scaling"),
    )


def _unless_one(raw: dict[str, Any], key: str) -> float | None:
    value = number(raw, key, 1.0)
    return None if value == 1 else value


def with_exaone_positions(config: ModelConfig, raw: dict[str, Any], kinds: Sequence[str]) -> ModelConfig:
    """EXAONE 4: if there is a window, layers without one have no rotary embeddings."""
    if raw.get("sliding_window", 4096) is None:
        return config
    full = (layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return replace(config, no_rope_layers=frozenset(full))


def with_glm_settings(config: ModelConfig, raw: dict[str, Any], kinds: Sequence[str]) -> ModelConfig:
    """GLM-4.5: norms of q and k where the file says so, and layers for multi-token prediction."""
    return replace(
        config,
        qk_norm=bool(raw.get("use_qk_norm")),
        mtp_layers=whole_number(raw, "num_nextn_predict_layers", 1),
    )


def with_sinks(config: ModelConfig, raw: dict[str, Any], kinds: Sequence[str]) -> ModelConfig:
    """gpt-oss: attention with sinks in every layer."""
    return replace(config, attention_sinks=True)


def with_gated_delta(config: ModelConfig, raw: dict[str, Any], kinds: Sequence[str]) -> ModelConfig:
    """Qwen3.5 and Qwen3-Next: layers of linear attention, gates behind queries, norms stored less 1."""
    if raw.get("attn_output_gate") is False:
        raise unsupported("attn_output_gate = False")
    if raw.get("output_gate_type") not in (None, "swish", "silu"):
        raise unsupported(f"output_gate_type = {raw['output_gate_type']!r}; only 'swish' is known")
    if raw.get("linear_conv_kernel_dim", CONV_TAPS) != CONV_TAPS:
        raise unsupported(f"linear_conv_kernel_dim = {raw['linear_conv_kernel_dim']!r}; only 4 is known")
    key_heads = integer(raw, "linear_num_key_heads", 16)
    value_heads = integer(raw, "linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise unsupported(f"linear_num_value_heads = {value_heads}, no multiple of {key_heads} key heads")
    dims = [integer(raw, f"linear_{part}_head_dim", 128) for part in ("key", "value")]
    for dim in dims:
        if dim not in DELTA_DIMS:
            raise unsupported(f"heads of linear attention of {dim} elements; known are {DELTA_DIMS}")
    key_dim, value_dim = dims
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    state = StateShape(value_heads, key_dim, value_dim, channels, CONV_TAPS)
    attention = KVShape(config.num_kv_heads, config.head_dim)
    return replace(
        config,
        cache_shapes=tuple(state if kind == "linear_attention" else attention for kind in kinds),
        projects_by_key_head=config.architecture == "Qwen3NextForCausalLM",
        attention_gate=True,
        norm_weights_minus_one=True,
    )


def with_query_scaling(config: ModelConfig, raw: dict[str, Any], kinds: Sequence[str]) -> ModelConfig:
    """Ministral 3: queries grow with the logarithm of their position (`llama_4_scaling_beta`)."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    key = "llama_4_scaling_beta"
    if rope.get(key) is None:
        raise unsupported(f"RoPE settings without {key}, which this architecture needs")
    beta = number(rope, key)
    length = integer(rope, "original_max_position_embeddings")
    return replace(config, query_scaling=QueryScaling(beta, length))
