"""Reads the mixture of experts from config.json."""

from dataclasses import replace
from typing import Any

from minisgl.errors import ModelError
from minisgl.model_config.config import Activation, ExpertsConfig, ExpertStorage
from minisgl.model_config.hf_folder.json_fields import integer, number, whole_number

MOST_EXPERTS = 1024
EXPERT_TILE = 16
"""The kernels need widths that are multiples of this."""
MXFP4 = "mxfp4"
"""As `quant_method` of gpt-oss's experts."""
MXFP4_BLOCK = 32
DEEPSEEK_EXPERTS = frozenset(
    [
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_local_experts",
        "routed_scaling_factor",
        "topk_group",
    ]
)
"""The keys that `read_deepseek_experts` reads."""


def read_qwen2_experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    """Read Qwen2-MoE's mixture, with an expert that all tokens share; None = no layer has experts."""
    sizes = {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    raw = sizes | {key: value for key, value in raw.items() if value is not None}
    experts = _read_qwen_experts(raw, 60)
    if experts is None:
        return None
    shared = integer(raw, "shared_expert_intermediate_size", 5632)
    return replace(experts, shared_intermediate_size=shared)


def read_qwen3_5_experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    """Read Qwen3.5-MoE's mixture: in every layer, with a shared expert; a token's weights sum to 1."""
    sizes = {"num_experts_per_tok": 8, "moe_intermediate_size": 512}
    always = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return _with_shared_expert(sizes | _given(raw) | always, 256)


def read_qwen3_next_experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    """Read Qwen3-Next's mixture, with a shared expert; None = no layer has experts."""
    sizes = {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
    return _with_shared_expert(sizes | _given(raw), 512)


def _given(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _with_shared_expert(raw: dict[str, Any], default_experts: int) -> ExpertsConfig | None:
    experts = _read_qwen_experts(raw, default_experts)
    if experts is None:
        return None
    return replace(experts, shared_intermediate_size=integer(raw, "shared_expert_intermediate_size", 512))


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
    return checked_experts(experts, integer(raw, "hidden_size"), "moe_intermediate_size")


def read_mixtral_experts(raw: dict[str, Any]) -> ExpertsConfig:
    experts = ExpertsConfig(
        num_experts=_num_experts(raw, 8),
        experts_per_token=integer(raw, "num_experts_per_tok", 2),
        intermediate_size=integer(raw, "intermediate_size"),
        renormalize=True,
        module_name="block_sparse_moe",
        gate_up_down_names=("w1", "w3", "w2"),
    )
    return checked_experts(experts, integer(raw, "hidden_size"), "intermediate_size")


def read_deepseek_experts(raw: dict[str, Any], defaults: dict[str, Any]) -> ExpertsConfig | None:
    """Read a mixture with DeepSeek's router; None = no layer has experts.

    Args:
        defaults: of the class's keys.

    Raises:
        ModelError: the groups do not divide the experts, or leave too few of them.
    """
    raw = defaults | {key: value for key, value in raw.items() if value is not None}
    num_layers, num_dense = integer(raw, "num_hidden_layers"), whole_number(raw, "first_k_dense_replace", 0)
    if num_dense >= num_layers:
        return None
    experts = ExpertsConfig(
        num_experts=integer(raw, "n_routed_experts"),
        experts_per_token=integer(raw, "num_experts_per_tok"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        renormalize=bool(raw["norm_topk_prob"]),
        shared_intermediate_size=whole_number(raw, "n_shared_experts", 0)
        * integer(raw, "moe_intermediate_size"),
        shared_gate=False,
        sigmoid_scores=True,
        choice_bias=True,
        num_groups=integer(raw, "n_group"),
        kept_groups=integer(raw, "topk_group"),
        weight_factor=number(raw, "routed_scaling_factor"),
        router_in_float32=True,
        dense_layers=frozenset(range(num_dense)),
    )
    of_group, rest = divmod(experts.num_experts, experts.num_groups)
    fitting = experts.num_groups == 1 or (not rest and of_group > 1)
    if not fitting or not experts.kept_groups <= experts.num_groups:
        raise ModelError(
            f"config.json: n_group ({experts.num_groups}) must divide the {experts.num_experts} experts into "
            f"groups of at least 2, and topk_group ({experts.kept_groups}) be at most n_group"
        )
    if of_group * experts.kept_groups < experts.experts_per_token:
        raise ModelError(
            f"config.json: topk_group ({experts.kept_groups}) leaves {of_group * experts.kept_groups} "
            f"experts, fewer than num_experts_per_tok ({experts.experts_per_token})"
        )
    return checked_experts(experts, integer(raw, "hidden_size"), "moe_intermediate_size")


def read_glm_experts(raw: dict[str, Any]) -> ExpertsConfig | None:
    """Read GLM-4.5's mixture; None = no layer has experts."""
    return read_deepseek_experts(
        raw,
        {
            "n_routed_experts": raw.get("num_local_experts") or 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
    )


def read_gpt_oss_experts(raw: dict[str, Any]) -> ExpertsConfig:
    """Read gpt-oss's mixture; the softmax over the chosen logits is that over all, made to sum to 1."""
    is_mxfp4 = (raw.get("quantization_config") or {}).get("quant_method") == MXFP4
    experts = ExpertsConfig(
        num_experts=_num_experts(raw, 128),
        experts_per_token=integer(raw, "num_experts_per_tok", 4),
        intermediate_size=integer(raw, "intermediate_size"),
        renormalize=True,
        activation=Activation.CLAMPED,
        alpha=number(raw, "swiglu_alpha", 1.702),
        limit=number(raw, "swiglu_limit", 7.0),
        storage=ExpertStorage.MXFP4 if is_mxfp4 else ExpertStorage.GPT_OSS,
        router_name="router",
        router_bias=True,
    )
    sizes = {"hidden_size": integer(raw, "hidden_size"), "intermediate_size": experts.intermediate_size}
    for name, size in sizes.items():
        if is_mxfp4 and size % MXFP4_BLOCK:
            raise ModelError(f"config.json: MXFP4 needs a {name} in multiples of {MXFP4_BLOCK}, got {size}")
    return checked_experts(experts, sizes["hidden_size"], "intermediate_size")


def _num_experts(raw: dict[str, Any], default: int) -> int:
    """The number of experts. transformers 5 writes num_local_experts for Qwen, too."""
    name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    return integer(raw, name, default)


def checked_experts(experts: ExpertsConfig, hidden_size: int, width_name: str) -> ExpertsConfig:
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
