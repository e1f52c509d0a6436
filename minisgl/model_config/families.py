"""The model families that this engine reads: how each Hugging Face class interprets config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from minisgl.model_config.config import ExpertsConfig
from minisgl.model_config.experts_config import read_mixtral_experts, read_qwen3_experts


class Windows(Enum):
    """The layers to which a class applies `sliding_window`."""

    NONE = "the class has none: the key is refused"
    ALL = "every layer"
    ALL_IF_USED = "every layer, where use_sliding_window says so"
    LATER_LAYERS_IF_USED = "those of layer_types, else from max_window_layers on, if use_sliding_window"
    EVERY_SECOND = "those of layer_types, else the first layer and every second one after it"
    PATTERN = "those of layer_types, else all but every sixth (sliding_window_pattern)"


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
    qkv_bias: bool = False
    """q, k and v always have biases; the class ignores `attention_bias`."""
    attention_bias: bool = False
    """The class reads `attention_bias`, which gives all four projections a bias; other classes refuse it."""
    qk_norm: bool = False
    tied: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The key of the activation function, and its only supported value."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Values of further keys that config.json may leave out (Gemma 3's larger models do)."""
    is_gemma: bool = False
    """Scaled embeddings, norm weights stored less 1, `query_pre_attn_scalar`, `final_logit_softcapping`."""
    attention_softcap: bool = False
    """The class reads `attn_logit_softcapping`; other classes refuse it."""
    rope_by_layer_type: bool = False
    """Layers with a window have RoPE settings of their own."""
    read_experts: Callable[[dict[str, Any]], ExpertsConfig | None] | None = None


FAMILIES = {
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
        rope_by_layer_type=True,
    ),
    "LlamaForCausalLM": Family(attention_bias=True),
    "MistralForCausalLM": Family(num_kv_heads=8, windows=Windows.ALL),
    "MixtralForCausalLM": Family(
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        windows=Windows.ALL,
        sliding_window=None,
        read_experts=read_mixtral_experts,
    ),
    "Phi3ForCausalLM": Family(rms_norm_eps=1e-5, windows=Windows.ALL, sliding_window=None),
    "Qwen2ForCausalLM": Family(num_kv_heads=32, windows=Windows.LATER_LAYERS_IF_USED, qkv_bias=True),
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
}
"""Families by Hugging Face class name; models/registry.py builds the models."""

MULTIMODAL_CLASSES = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "mistral"),
}
"""Multimodal classes: the class of their text model, and the model_type of their `text_config`. The server
refuses requests with images, so the vision part is not loaded."""
TEXT_PREFIX = "language_model."
"""Prefix of the text model's tensor names in multimodal checkpoints."""
