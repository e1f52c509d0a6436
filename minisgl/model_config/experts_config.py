"""Reads the mixture of experts from config.json."""

from dataclasses import replace
from typing import Any

from minisgl.errors import ModelError
from minisgl.model_config.config import ExpertsConfig
from minisgl.model_config.json_fields import integer

MOST_EXPERTS = 1024
EXPERT_TILE = 16
"""The kernels need widths that are multiples of this."""


def read_qwen2_experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    """Read Qwen2-MoE's mixture, with an expert that all tokens share; None = no layer has experts."""
    sizes = {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    raw = sizes | {key: value for key, value in raw.items() if value is not None}
    experts = _read_qwen_experts(raw, 60)
    if experts is None:
        return None
    shared = integer(raw, "shared_expert_intermediate_size", 5632)
    return replace(experts, shared_intermediate_size=shared)


def read_qwen3_experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    """Read Qwen3-MoE's mixture; None = no layer has experts."""
    return _read_qwen_experts(raw, 128)


def _read_qwen_experts(raw: dict[str, Any], default_experts: int) -> ExpertsConfig | None:
    if raw.get("num_experts", raw.get("num_local_experts")) == 0:
        return None
    num_layers = integer(raw, "num_hidden_layers")
    every = integer(raw, "decoder_sparse_step", 1)
    listed = raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise ModelError(f"config.json: mlp_only_layers must be a list of layers, got {listed!r}")
    dense = frozenset(layer for layer in range(num_layers) if layer in listed or (layer + 1) % every)
    if len(dense) == num_layers:
        return None
    experts = ExpertsConfig(
        num_experts=_num_experts(raw, default_experts),
        experts_per_token=integer(raw, "num_experts_per_tok", 8),
        intermediate_size=integer(raw, "moe_intermediate_size", 768),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        dense_layers=dense,
    )
    return _checked(experts, integer(raw, "hidden_size"), "moe_intermediate_size")


def read_mixtral_experts(raw: dict[str, Any]) -> ExpertsConfig:
    experts = ExpertsConfig(
        num_experts=_num_experts(raw, 8),
        experts_per_token=integer(raw, "num_experts_per_tok", 2),
        intermediate_size=integer(raw, "intermediate_size"),
        renormalize=True,
        module_name="block_sparse_moe",
        gate_up_down_names=("w1", "w3", "w2"),
    )
    return _checked(experts, integer(raw, "hidden_size"), "intermediate_size")


def _num_experts(raw: dict[str, Any], default: int) -> int:
    """The number of experts. transformers 5 writes num_local_experts for Qwen, too."""
    name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    return integer(raw, name, default)


def _checked(experts: ExpertsConfig, hidden_size: int, width_name: str) -> ExpertsConfig:
    """Check that the kernels support these experts, and return them.

    Raises:
        ModelError: they don't support their number or widths.
    """
    if not experts.experts_per_token <= experts.num_experts <= MOST_EXPERTS:
        raise ModelError(
            f"config.json: num_experts_per_tok ({experts.experts_per_token}) may be at most the number of "
            f"experts ({experts.num_experts}), and that at most {MOST_EXPERTS}"
        )
    for name, width in (("hidden_size", hidden_size), (width_name, experts.intermediate_size)):
        if width % EXPERT_TILE:
            raise ModelError(
                f"config.json: with experts, {name} must be a multiple of {EXPERT_TILE}, got {width}"
            )
    return experts
