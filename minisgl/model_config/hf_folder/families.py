"""The model families that this engine reads: how each Hugging Face class interprets config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minisgl.model_config.config import ExpertsConfig
from minisgl.model_config.hf_folder.experts_config import (
    DEEPSEEK_EXPERTS,
    read_glm_experts,
    read_gpt_oss_experts,
    read_mixtral_experts,
    read_qwen2_experts,
    read_qwen3_5_experts,
    read_qwen3_experts,
    read_qwen3_next_experts,
)
from minisgl.model_config.hf_folder.gemma4_config import GEMMA_4_KEYS, with_gemma4_settings
from minisgl.model_config.hf_folder.switches import (
    Complete,
    with_exaone_positions,
    with_gated_delta,
    with_glm_settings,
    with_granite_multipliers,
    with_query_scaling,
    with_sinks,
)

GPT_OSS_KEYS = frozenset(
    {"experts_per_token", "initial_context_length", "layer_types", "num_experts", "num_experts_per_tok"}
    | {"num_local_experts", "sliding_window", "swiglu_alpha", "swiglu_limit"}
    | {"use_sliding_window", "max_window_layers", "sliding_window_pattern"}
)
"""`experts_per_token` and `initial_context_length` repeat other keys; the last three have no effect."""


QWEN_DELTA_KEYS = frozenset(
    {"attn_output_gate", "full_attention_interval", "layer_types", "mamba_ssm_dtype", "partial_rotary_factor"}
    | {"linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"}
    | {"linear_num_key_heads", "linear_num_value_heads", "language_model_only"}
    | {"decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts"}
    | {"num_experts_per_tok", "shared_expert_intermediate_size", "use_sliding_window", "max_window_layers"}
)
"""States are float32 whatever `mamba_ssm_dtype` says. A window that `sliding_window` names is refused."""


class Windows(Enum):
    """The layers to which a class applies `sliding_window`."""

    NONE = "the class has none: the key is refused"
    ALL = "every layer"
    ALL_IF_USED = "every layer, where use_sliding_window says so"
    LATER_LAYERS_IF_USED = "those of layer_types, else from max_window_layers on, if use_sliding_window"
    EVERY_SECOND = "those of layer_types, else the first layer and every second one after it"
    PATTERN = "those of layer_types, else all but every so-many-th"
    NO_ROPE_IF_USED = "those of layer_types, else those without RoPE, where use_sliding_window says so"


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one Hugging Face class interprets config.json. Missing keys have transformers' defaults."""

    num_kv_heads: int | None = None
    """None = as many as query heads."""
    head_dim: int | None = None
    """None = hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    windows: Windows = Windows.NONE
    sliding_window: int | None = 4096
    window_pattern: int | None = None
    """With `Windows.PATTERN`: every so-many-th layer has no window; None = `sliding_window_pattern` says."""
    default_pattern: int = 6
    """What a missing `sliding_window_pattern` means."""
    last_layer_full: bool = False
    """The last layer has no window, whatever config.json says."""
    qkv_bias: bool = False
    """q, k and v have biases; the class ignores `attention_bias`."""
    qkv_bias_key: str | None = None
    """With `qkv_bias`: the key that can take these biases away; None = they are always there."""
    attention_bias: bool = False
    """The class reads `attention_bias`, which gives all four projections a bias; other classes refuse it."""
    o_bias_key: str | None = "attention_bias"
    """With `attention_bias`: the key that gives the output projection a bias; None = it never has one."""
    qk_norm: bool = False
    qk_norm_of_all_heads: bool = False
    tied: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The key of the activation function, and its only supported value."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of further keys that config.json may leave out (Gemma 3's larger models do)."""
    is_gemma: bool = False
    """Scaled embeddings, norm weights stored less 1, `query_pre_attn_scalar`, `final_logit_softcapping`."""
    attention_softcap: bool = False
    """The class reads `attn_logit_softcapping`; other classes refuse it."""
    local_rope_theta: float | None = None
    """Layers with a window have RoPE settings of their own, with this theta if the file gives none."""
    rotary_share: float | None = None
    """The class reads `partial_rotary_factor`, and this is its default; other classes refuse it."""
    rope_interleaved: bool = False
    linear_attention: bool = False
    """`layer_types` may name layers of linear attention; left out, all but every fourth are."""
    reads_no_rope_layers: bool = False
    """The class reads `no_rope_layers`."""
    complete: Complete | None = None
    """Reads what only this family has."""
    read_experts: Callable[[dict[str, Any]], ExpertsConfig | None] | None = None
    experts_in_mxfp4: bool = False
    """`read_experts` reads a `quantization_config` of MXFP4, which is of the experts alone."""
    reads: tuple[str, ...] = ()
    """Keys that the class reads and others refuse."""
    keys: frozenset[str] | None = None
    """Further keys that the class reads, or that have no effect; others are refused. None = not checked."""


FAMILIES = {
    "Ernie4_5ForCausalLM": Family(
        num_kv_heads=2,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tied=True,
        rope_interleaved=True,
    ),
    "Exaone4ForCausalLM": Family(
        num_kv_heads=32,
        rms_norm_eps=1e-5,
        windows=Windows.PATTERN,
        default_pattern=4,
        qk_norm=True,
        complete=with_exaone_positions,
    ),
    "Gemma2ForCausalLM": Family(
        num_kv_heads=4,
        head_dim=256,
        windows=Windows.EVERY_SECOND,
        attention_bias=True,
        tied=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "vocab_size": 256000,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        is_gemma=True,
        attention_softcap=True,
    ),
    "Gemma3ForCausalLM": Family(
        num_kv_heads=4,
        head_dim=256,
        rope_theta=1e6,
        windows=Windows.PATTERN,
        attention_bias=True,
        qk_norm=True,
        tied=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "vocab_size": 262208,
        },
        is_gemma=True,
        local_rope_theta=10000.0,
    ),
    "Gemma4ForCausalLM": Family(
        num_kv_heads=4,
        head_dim=256,
        rope_theta=1e6,
        windows=Windows.PATTERN,
        sliding_window=512,
        window_pattern=6,
        last_layer_full=True,
        attention_bias=True,
        tied=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_hidden_layers": 30,
            "vocab_size": 262144,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
            },
        },
        local_rope_theta=10000.0,
        complete=with_gemma4_settings,
        reads=("final_logit_softcapping", "use_bidirectional_attention"),
        keys=GEMMA_4_KEYS,
    ),
    "Glm4ForCausalLM": Family(
        num_kv_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-07,
        attention_bias=True,
        o_bias_key=None,
        defaults={"attention_bias": True},
        rotary_share=0.5,
        rope_interleaved=True,
    ),
    "Glm4MoeForCausalLM": Family(
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        attention_bias=True,
        o_bias_key=None,
        rotary_share=0.5,
        complete=with_glm_settings,
        read_experts=read_glm_experts,
        reads=("n_shared_experts",),
        keys=DEEPSEEK_EXPERTS | {"num_nextn_predict_layers", "partial_rotary_factor", "use_qk_norm"},
    ),
    "GptOssForCausalLM": Family(
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        windows=Windows.EVERY_SECOND,
        sliding_window=128,
        attention_bias=True,
        defaults={
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        complete=with_sinks,
        read_experts=read_gpt_oss_experts,
        experts_in_mxfp4=True,
        keys=GPT_OSS_KEYS,
    ),
    "GraniteForCausalLM": Family(attention_bias=True, complete=with_granite_multipliers),
    "LlamaForCausalLM": Family(attention_bias=True),
    "Ministral3ForCausalLM": Family(
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        windows=Windows.ALL,
        sliding_window=None,
        defaults={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        complete=with_query_scaling,
    ),
    "MistralForCausalLM": Family(num_kv_heads=8, windows=Windows.ALL),
    "MixtralForCausalLM": Family(
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        windows=Windows.ALL,
        sliding_window=None,
        read_experts=read_mixtral_experts,
    ),
    "Olmo2ForCausalLM": Family(rms_norm_eps=1e-5, attention_bias=True, qk_norm_of_all_heads=True),
    "Olmo3ForCausalLM": Family(
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        windows=Windows.PATTERN,
        window_pattern=4,
        attention_bias=True,
        qk_norm_of_all_heads=True,
        local_rope_theta=500000.0,
    ),
    "Phi3ForCausalLM": Family(rms_norm_eps=1e-5, windows=Windows.ALL, sliding_window=None, rotary_share=1.0),
    "Qwen2ForCausalLM": Family(num_kv_heads=32, windows=Windows.LATER_LAYERS_IF_USED, qkv_bias=True),
    "Qwen2MoeForCausalLM": Family(
        num_kv_heads=16,
        qkv_bias=True,
        qkv_bias_key="qkv_bias",
        read_experts=read_qwen2_experts,
        reads=("shared_expert_intermediate_size",),
    ),
    "Qwen3ForCausalLM": Family(
        num_kv_heads=32,
        head_dim=128,
        windows=Windows.LATER_LAYERS_IF_USED,
        attention_bias=True,
        qk_norm=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        num_kv_heads=4,
        windows=Windows.ALL_IF_USED,
        attention_bias=True,
        qk_norm=True,
        read_experts=read_qwen3_experts,
    ),
    "Qwen3NextForCausalLM": Family(
        num_kv_heads=2,
        head_dim=256,
        attention_bias=True,
        qk_norm=True,
        rotary_share=0.25,
        linear_attention=True,
        complete=with_gated_delta,
        read_experts=read_qwen3_next_experts,
        reads=("shared_expert_intermediate_size",),
        keys=QWEN_DELTA_KEYS,
    ),
    "Qwen3_5ForCausalLM": Family(
        num_kv_heads=4,
        head_dim=256,
        attention_bias=True,
        qk_norm=True,
        rotary_share=0.25,
        linear_attention=True,
        complete=with_gated_delta,
        keys=QWEN_DELTA_KEYS,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        num_kv_heads=2,
        head_dim=256,
        attention_bias=True,
        qk_norm=True,
        defaults={"intermediate_size": 512},
        rotary_share=0.25,
        linear_attention=True,
        complete=with_gated_delta,
        read_experts=read_qwen3_5_experts,
        reads=("shared_expert_intermediate_size",),
        keys=QWEN_DELTA_KEYS,
    ),
    "SeedOssForCausalLM": Family(
        num_kv_heads=8,
        head_dim=128,
        attention_bias=True,
        o_bias_key="attention_out_bias",
        defaults={"attention_bias": True},
    ),
    "SmolLM3ForCausalLM": Family(
        num_kv_heads=4,
        rope_theta=2e6,
        windows=Windows.NO_ROPE_IF_USED,
        sliding_window=None,
        attention_bias=True,
        tied=True,
        reads_no_rope_layers=True,
    ),
}
"""Families by Hugging Face class name; models/registry.py builds the models."""

MULTIMODAL_CLASSES = {
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
"""Multimodal classes: the class of their text model by the model_type of their `text_config`, the default
first. The server refuses requests with images, so the vision part is not loaded."""
TEXT_PREFIX = "language_model."
"""Prefix of the text model's tensor names in multimodal checkpoints ..."""
OTHER_TEXT_PREFIXES: dict[str, str] = dict.fromkeys(
    (
        "Gemma4ForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ),
    "model.language_model.",
)
"""... but in these, where it stands for "model."."""
