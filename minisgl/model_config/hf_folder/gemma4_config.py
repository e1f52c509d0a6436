"""Reads what of config.json only Gemma 4 has.

Promise: keys that are left out mean what transformers takes for them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minisgl.errors import ModelError
from minisgl.model_config.config import Activation, ExpertsConfig, ExpertStorage, ModelConfig
from minisgl.model_config.hf_folder.experts_config import checked_experts
from minisgl.model_config.hf_folder.json_fields import integer, number, unsupported, whole_number
from minisgl.model_config.kv_groups import KVShape

FULL = "full_attention"
GEMMA_4_KEYS = frozenset(
    {"attention_k_eq_v", "enable_moe_block", "final_logit_softcapping", "global_head_dim"}
    | {"hidden_activation", "hidden_size_per_layer_input", "layer_types", "moe_intermediate_size"}
    | {"num_experts", "num_global_key_value_heads", "num_kv_shared_layers", "per_layer_config"}
    | {"sliding_window", "top_k_experts", "use_bidirectional_attention", "use_double_wide_mlp"}
    | {"vocab_size_per_layer_input"}
    | {"use_sliding_window", "max_window_layers", "sliding_window_pattern"}
)
"""The last three have no effect."""


def with_gemma4_settings(config: ModelConfig, raw: dict[str, Any], kinds: Sequence[str]) -> ModelConfig:
    """Gemma 4: heads of two sizes, shared keys and values, inputs of each layer, experts beside the MLP."""
    if raw.get("use_bidirectional_attention") not in (None, False, "vision"):  # images are refused anyway
        raise unsupported(f"use_bidirectional_attention = {raw['use_bidirectional_attention']!r}")
    full = frozenset(layer for layer, kind in enumerate(kinds) if kind == FULL)
    wide = _global_shape(config, raw, full)
    own = KVShape(config.num_kv_heads, config.head_dim)
    sources = _kv_sources(raw, kinds)
    readers = frozenset(layer for layer, source in enumerate(sources) if source != layer)
    return replace(
        config,
        attention_scale=1.0,
        embedding_scale=math.sqrt(config.hidden_size),
        logit_softcap=number(raw, "final_logit_softcapping") if raw.get("final_logit_softcapping") else None,
        global_head_dim=wide.head_dim,
        cache_shapes=tuple(wide if layer in full else own for layer in range(config.num_layers)),
        kv_sources=sources,
        layers_with_keys_as_values=full if raw.get("attention_k_eq_v") else frozenset(),
        wide_mlp_layers=readers if raw.get("use_double_wide_mlp") else frozenset(),
        layer_input_width=whole_number(raw, "hidden_size_per_layer_input", 256),
        layer_input_vocab=integer(raw, "vocab_size_per_layer_input", 262144),
        experts=_read_experts(raw) if raw.get("enable_moe_block") else None,
    )


def _global_shape(config: ModelConfig, raw: dict[str, Any], full: frozenset[int]) -> KVShape:
    """Heads of the layers without a window, from `per_layer_config` (transformers 5) or keys of their own.

    Raises:
        ModelError: layers differ in another way.
    """
    settings: dict[str, Any] = {"head_dim": raw.get("global_head_dim") or 512}
    if raw.get("attention_k_eq_v"):
        settings["num_key_value_heads"] = raw.get("num_global_key_value_heads")
    by_layer = raw.get("per_layer_config")
    if by_layer is not None:
        known = {"head_dim", "num_key_value_heads"}
        values: list[Any] = list(by_layer.values()) if isinstance(by_layer, dict) else [None]
        is_known = all(isinstance(one, dict) and one.keys() <= known for one in values)
        if not is_known or {str(layer) for layer in by_layer} != {str(layer) for layer in full}:
            raise unsupported(f"per_layer_config = {by_layer!r}; it must be of the layers without a window")
        if any(one != values[0] for one in values):
            raise unsupported("per_layer_config with layers without a window that differ")
        settings = values[0] if values else settings
    shape = KVShape(
        integer(settings, "num_key_value_heads", config.num_kv_heads),
        integer(settings, "head_dim", config.head_dim),
    )
    if config.num_heads % shape.num_heads or shape.head_dim % 2:
        raise ModelError(
            f"config.json: layers without a window have {shape.num_heads} KV heads of {shape.head_dim}; "
            f"{config.num_heads} query heads must be a multiple of the former, and the latter be even"
        )
    return shape


def _kv_sources(raw: dict[str, Any], kinds: Sequence[str]) -> tuple[int, ...]:
    """`ModelConfig.kv_sources`: the last layers read from the last of their type that has its own.

    Raises:
        ModelError: there is no such layer.
    """
    num_shared = whole_number(raw, "num_kv_shared_layers", 0)
    if not num_shared:
        return ()
    first = len(kinds) - num_shared
    sources = list(range(len(kinds)))
    for layer in range(max(first, 0), len(kinds)):
        earlier = [source for source in range(first) if kinds[source] == kinds[layer]]
        if not earlier:
            raise ModelError(
                f"config.json: num_kv_shared_layers ({num_shared}) leaves no {kinds[layer]} layer with keys "
                "and values of its own"
            )
        sources[layer] = earlier[-1]
    return tuple(sources)


def _read_experts(raw: dict[str, Any]) -> ExpertsConfig:
    experts = ExpertsConfig(
        num_experts=integer(raw, "num_experts"),
        experts_per_token=integer(raw, "top_k_experts"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        renormalize=True,
        beside_mlp=True,
        activation=Activation.GELU,
        storage=ExpertStorage.STACKED,
        module_name="",
        router_name="router.proj",
        router_scale=True,
        expert_scales=True,
    )
    return checked_experts(experts, integer(raw, "hidden_size"), "moe_intermediate_size")
