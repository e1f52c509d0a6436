"""What public models say in config.json, cut to what matters: read as they are meant, or refused by name."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig

from minisgl.errors import ModelError
from minisgl.model_config.config import (
    Activation,
    ExpertsConfig,
    ExpertStorage,
    ModelConfig,
    QueryScaling,
    RopeScaling,
)
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.model_config.kv_groups import KVShape, StateShape
from minisgl.parallel.sizes import supported_tp_sizes

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
PHI_3 = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "attention_bias": False,
    "resid_pdrop": 0.0,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
GLM_4_5 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "pad_token_id": 151329,
    "head_dim": 128,
    "hidden_act": "silu",
    "partial_rotary_factor": 0.5,
    "initializer_range": 0.02,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "num_nextn_predict_layers": 1,
    "transformers_version": "4.54.0",
    "use_cache": True,
}
GLM_4_5_EXPERTS = ExpertsConfig(
    num_experts=128,
    experts_per_token=8,
    intermediate_size=1408,
    renormalize=True,
    shared_intermediate_size=1408,
    shared_gate=False,
    sigmoid_scores=True,
    choice_bias=True,
    router_in_float32=True,
    dense_layers=frozenset({0}),
)
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
GEMMA_4_26B_A4B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "audio_config": None,
    "boi_token_id": 255999,
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "tie_word_embeddings": True,
    "vision_soft_tokens_per_image": 280,
    "text_config": {
        "attention_bias": False,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "top_k_experts": 8,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
}
GEMMA_4_TEXT = GEMMA_4_26B_A4B["text_config"] | {
    "architectures": ["Gemma4ForCausalLM"],
    "enable_moe_block": False,
    "torch_dtype": "bfloat16",
}
LONGROPE = {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.1] * 48}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    sizes = {} if "text_config" in config else SIZES
    (folder / "config.json").write_text(json.dumps(sizes | config))
    return read_model_config(folder)


READ: dict[str, tuple[dict[str, Any], dict[str, object]]] = {
    "Llama-2-7b": (
        {"architectures": ["LlamaForCausalLM"], "pretraining_tp": 1, "rope_scaling": None},
        {"num_kv_heads": 32, "rope_theta": 10000.0, "max_position": 4096},
    ),
    "Yi-6B, a Llama by another maker": (
        {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4, "rope_theta": 5000000.0},
        {"num_kv_heads": 4, "rope_theta": 5e6},
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 8,
        },
        {"windows": (4096,) * 32},
    ),
    "Mistral-7B-v0.3": (
        {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": None,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 8,
        },
        {"windows": ()},
    ),
    "Mistral-Nemo, whose heads are narrower than its width says": (
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_size": 5120,
            "head_dim": 128,
            "sliding_window": None,
            "num_key_value_heads": 8,
        },
        {"head_dim": 128},
    ),
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": 32768,
            "max_window_layers": 24,
            "use_mrope": False,
        },
        {"qkv_bias": True, "o_bias": False, "tie_word_embeddings": True, "windows": ()},
    ),
    "Qwen2.5-7B with the YaRN that its card describes": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "max_position_embeddings": 32768,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        {"max_position": 131072},
    ),
    "Qwen3.5-27B, as its cards' family has it": (
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "image_token_id": 248056,
            "language_model_only": False,
            "model_type": "qwen3_5",
            "video_token_id": 248057,
            "vision_start_token_id": 248053,
            "text_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "attn_output_gate": True,
                "output_gate_type": "swish",
                "partial_rotary_factor": 0.25,
                "mtp_use_dedicated_embeddings": False,
                "dtype": "bfloat16",
                "eos_token_id": 248044,
                "full_attention_interval": 4,
                "head_dim": 256,
                "hidden_act": "silu",
                "hidden_size": 5120,
                "intermediate_size": 17408,
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 48,
                "linear_value_head_dim": 128,
                "mamba_ssm_dtype": "float32",
                "max_position_embeddings": 262144,
                "model_type": "qwen3_5_text",
                "mtp_num_hidden_layers": 1,
                "num_attention_heads": 24,
                "num_hidden_layers": 64,
                "num_key_value_heads": 4,
                "rms_norm_eps": 1e-06,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10000000,
                    "rope_type": "default",
                },
                "vocab_size": 248320,
            },
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "qwen3_5", "depth": 27},
        },
        {
            "architecture": "Qwen3_5ForCausalLM",
            "checkpoint_prefix": "model.language_model.",
            "rope_theta": 1e7,
            "rotary_dim": 64,
            "attention_gate": True,
            "qk_norm": True,
            "norm_weights_minus_one": True,
            "cache_shapes": (*[StateShape(48, 128, 128, 10240, 4)] * 3, KVShape(4, 256)) * 16,
        },
    ),
    "Gemma-2-9b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_size": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
            "vocab_size": 256000,
        },
        {
            "windows": (4096, 0) * 21,
            "attention_scale": 1 / 16,
            "attention_softcap": 50.0,
            "logit_softcap": 30.0,
            "tie_word_embeddings": True,
            "norm_weights_minus_one": True,
        },
    ),
    "Gemma-3-4b, which sees, its text": (
        GEMMA_3_4B,
        {
            "architecture": "Gemma3ForCausalLM",
            "num_layers": 34,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position": 131072,
            "rope_scaling": RopeScaling(kind="linear", factor=8.0),
            "windows": (1024, 1024, 1024, 1024, 1024, 0) * 5 + (1024,) * 4,
            "tie_word_embeddings": True,
            "eos_token_ids": (1, 106),
            "checkpoint_prefix": "language_model.",
            "checkpoint_dtype": "bfloat16",
        },
    ),
    "Mistral-Small-3.1, which sees, its text": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": SIZES
            | {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "sliding_window": None},
        },
        {"architecture": "MistralForCausalLM", "head_dim": 128, "windows": (), "tie_word_embeddings": False},
    ),
    "Phi-3-mini-4k": (
        PHI_3 | {"sliding_window": 2047, "rope_scaling": None},
        {"head_dim": 96, "num_kv_heads": 32, "rope_scaling": None, "windows": (2047,) * 32},
    ),
    "Phi-3-mini-128k": (
        PHI_3 | {"max_position_embeddings": 131072, "rope_scaling": LONGROPE},
        {"max_position": 131072, "windows": ()},
    ),
    "Phi-3-mini-128k as first published": (
        PHI_3 | {"max_position_embeddings": 131072, "rope_scaling": LONGROPE | {"type": "su"}},
        {"max_position": 131072},
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "architectures": ["Qwen2MoeForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "decoder_sparse_step": 1,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
            "use_sliding_window": False,
        },
        {
            "experts": ExpertsConfig(
                num_experts=60,
                experts_per_token=4,
                intermediate_size=1408,
                renormalize=False,
                shared_intermediate_size=5632,
            ),
            "qkv_bias": True,
            "windows": (),
        },
    ),
    "GLM-4.5-Air": (
        GLM_4_5 | {"use_qk_norm": False, "routed_scaling_factor": 1.0},
        {
            "experts": GLM_4_5_EXPERTS,
            "head_dim": 128,
            "rotary_dim": 64,
            "rope_interleaved": False,
            "qk_norm": False,
            "qkv_bias": True,
            "o_bias": False,
            "mtp_layers": 1,
        },
    ),
    "GLM-4.6, cut in its sizes": (
        GLM_4_5 | {"use_qk_norm": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
        {
            "experts": replace(GLM_4_5_EXPERTS, weight_factor=2.5, dense_layers=frozenset(range(3))),
            "qk_norm": True,
        },
    ),
    "gpt-oss-20b": (
        GPT_OSS,
        {
            "experts": ExpertsConfig(
                num_experts=32,
                experts_per_token=4,
                intermediate_size=2880,
                renormalize=True,
                activation=Activation.CLAMPED,
                alpha=1.702,
                limit=7.0,
                storage=ExpertStorage.MXFP4,
                router_name="router",
                router_bias=True,
            ),
            "attention_sinks": True,
            "windows": (128, 0) * 12,
            "qkv_bias": True,
            "o_bias": True,
            "quantization": None,
            "max_position": 131072,
            "rope_scaling": RopeScaling(
                kind="yarn",
                factor=32.0,
                original_max_position=4096,
                truncate=False,
                attention_factor=0.1 * math.log(32) + 1,
            ),
        },
    ),
    "Gemma 4 26B-A4B": (
        GEMMA_4_26B_A4B,
        {
            "experts": ExpertsConfig(
                num_experts=128,
                experts_per_token=8,
                intermediate_size=704,
                renormalize=True,
                activation=Activation.GELU,
                storage=ExpertStorage.STACKED,
                module_name="",
                router_name="router.proj",
                beside_mlp=True,
                router_scale=True,
                expert_scales=True,
            ),
            "checkpoint_prefix": "model.language_model.",
            "cache_shapes": (*[KVShape(8, 256)] * 5, KVShape(2, 512)) * 5,
            "kv_sources": (),
            "kv_elements_per_token": 2 * (25 * 8 * 256 + 5 * 2 * 512),
            "layers_with_keys_as_values": frozenset(range(5, 30, 6)),
            "windows": (*[1024] * 5, 0) * 5,
            "attention_scale": 1.0,
            "logit_softcap": 30.0,
            "rope_scaling": RopeScaling(kind="proportional", factor=1.0, rotated_share=0.25),
            "layer_input_width": 0,
        },
    ),
    "Gemma 4 E2B, cut in its sizes": (
        GEMMA_4_TEXT
        | {"attention_k_eq_v": False, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20}
        | {"use_double_wide_mlp": True, "num_global_key_value_heads": None},
        {
            "kv_sources": (*range(10), 9, 5, *[9] * 5, 5, *[9] * 5, 5, *[9] * 5, 5),
            "wide_mlp_layers": frozenset(range(10, 30)),
            "layers_with_keys_as_values": frozenset(),
            "cache_shapes": (*[KVShape(8, 256)] * 5, KVShape(8, 512)) * 5,
            "kv_elements_per_token": 2 * (9 * 8 * 256 + 8 * 512),
            "layer_input_width": 256,
        },
    ),
    "Phi-4-mini": (
        PHI_3
        | {
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.75,
            "rope_scaling": LONGROPE,
            "tie_word_embeddings": True,
        },
        {"head_dim": 128, "rotary_dim": 96, "rope_interleaved": False, "windows": ()},
    ),
    "SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "rope_theta": 5000000.0,
            "use_sliding_window": False,
            "sliding_window": None,
        },
        {
            "head_dim": 128,
            "no_rope_layers": frozenset(range(3, 36, 4)),
            "windows": (),
            "tie_word_embeddings": True,
        },
    ),
    "OLMo-2-7B": (
        {"architectures": ["Olmo2ForCausalLM"], "num_key_value_heads": 32, "rope_theta": 500000},
        {"qk_norm_of_all_heads": True, "qk_norm": False, "rope_theta": 5e5},
    ),
    "Olmo-3-7B": (
        {
            "architectures": ["Olmo3ForCausalLM"],
            "num_key_value_heads": 32,
            "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 8,
            "max_position_embeddings": 65536,
            "rope_theta": 500000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "sliding_window": 4096,
        },
        {
            "windows": (4096, 4096, 4096, 0) * 8,
            "local_rope_layers": frozenset(range(32)) - frozenset(range(3, 32, 4)),
            "local_rope_theta": 5e5,
            "max_position": 65536,
        },
    ),
    "Granite-3.3-8b": (
        {
            "architectures": ["GraniteForCausalLM"],
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "residual_multiplier": 0.22,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        {
            "attention_scale": 1 / 128,
            "embedding_scale": 12.0,
            "logits_divisor": 16.0,
            "residual_scale": 0.22,
        },
    ),
    "GLM-4-9B-0414": (
        {
            "architectures": ["Glm4ForCausalLM"],
            "attention_bias": True,
            "head_dim": 128,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
        },
        {"rotary_dim": 64, "rope_interleaved": True, "qkv_bias": True, "o_bias": False},
    ),
    "Seed-OSS-36B": (
        {
            "architectures": ["SeedOssForCausalLM"],
            "hidden_size": 5120,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            "residual_dropout": 0.1,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0,
        },
        {"head_dim": 128, "qkv_bias": True, "o_bias": False, "rope_theta": 1e7},
    ),
    "EXAONE-4.0-32B": (
        {
            "architectures": ["Exaone4ForCausalLM"],
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "hidden_size": 5120,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "layer_types": ([*["sliding_attention"] * 3, "full_attention"]) * 16,
        },
        {
            "windows": (4096, 4096, 4096, 0) * 16,
            "no_rope_layers": frozenset(range(3, 64, 4)),
            "qk_norm": True,
        },
    ),
    "EXAONE-4.0-1.2B, which has no window": (
        {
            "architectures": ["Exaone4ForCausalLM"],
            "num_key_value_heads": 8,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 32,
        },
        {"windows": (), "no_rope_layers": frozenset()},
    ),
    "ERNIE-4.5-0.3B": (
        {
            "architectures": ["Ernie4_5ForCausalLM"],
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "use_bias": False,
        },
        {"head_dim": 128, "rope_interleaved": True, "rotary_dim": None, "tie_word_embeddings": True},
    ),
    "Ministral-3-8B, which sees, its text": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": SIZES
            | {
                "model_type": "ministral3",
                "num_key_value_heads": 8,
                "max_position_embeddings": 262144,
                "rope_parameters": {
                    "type": "yarn",
                    "rope_theta": 1000000.0,
                    "factor": 16.0,
                    "original_max_position_embeddings": 16384,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale_all_dim": 1.0,
                    "mscale": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            },
        },
        {
            "architecture": "Ministral3ForCausalLM",
            "query_scaling": QueryScaling(0.1, 16384),
            "max_position": 262144,
            "rope_theta": 1e6,
        },
    ),
}


@pytest.mark.parametrize("name", READ)
def test_a_public_config_is_read(name: str, tmp_path: Path) -> None:
    raw, expected = READ[name]
    config = read(tmp_path, raw)
    assert {key: getattr(config, key) for key in expected} == expected


def test_sizes_that_gemma_3_leaves_out_are_transformers_own(tmp_path: Path) -> None:
    ours = read(tmp_path, GEMMA_3_4B | {"text_config": {"model_type": "gemma3_text"}})
    theirs = Gemma3TextConfig()
    assert (ours.num_layers, ours.hidden_size) == (theirs.num_hidden_layers, theirs.hidden_size)
    assert (ours.intermediate_size, ours.vocab_size) == (theirs.intermediate_size, theirs.vocab_size)
    assert (ours.num_heads, ours.max_position) == (theirs.num_attention_heads, theirs.max_position_embeddings)


def test_phi_3s_longrope_has_its_factors_and_transformers_magnitude(tmp_path: Path) -> None:
    config = read(tmp_path, READ["Phi-3-mini-128k"][0])
    first = read(tmp_path, READ["Phi-3-mini-128k as first published"][0])
    assert config.rope_scaling == first.rope_scaling
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_max_position == 4096
    assert (config.rope_scaling.short_factors, config.rope_scaling.long_factors) == (
        (1.1,) * 48,
        (1.5,) * 48,
    )
    assert config.rope_scaling.attention_factor == pytest.approx(1.1902380714238083), (
        "sqrt(1 + ln 32 / ln 4096)"
    )


def test_ranks_share_the_models_with_experts_where_their_widths_allow_it(tmp_path: Path) -> None:
    assert supported_tp_sizes(read(tmp_path, GPT_OSS)) == [1, 2]  # 2880 is 90 blocks of MXFP4
    assert supported_tp_sizes(read(tmp_path, GEMMA_4_26B_A4B)) == [1]
    assert supported_tp_sizes(read(tmp_path, GEMMA_4_TEXT)) == [1, 2]  # 2 KV heads without a window
    assert 4 in supported_tp_sizes(read(tmp_path, GLM_4_5))


LLAMA, MISTRAL = {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["MistralForCausalLM"]}
QWEN2, QWEN3 = {"architectures": ["Qwen2ForCausalLM"]}, {"architectures": ["Qwen3ForCausalLM"]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DeepSeek-V3": (
        {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "n_shared_experts": 1},
        "DeepseekV3ForCausalLM",
    ),
    "a GLM-4.5 with a key that we do not know": (
        GLM_4_5 | {"topk_method": "greedy"},
        "topk_method = 'greedy'",
    ),
    "a GLM-4.5 whose groups are uneven": (GLM_4_5 | {"n_group": 3}, r"n_group \(3\) must divide"),
    "a GLM-4.5 that keeps too few groups": (
        GLM_4_5 | {"n_group": 32, "topk_group": 1, "num_experts_per_tok": 8},
        "leaves 4 experts",
    ),
    "GLM-4.7-Flash, whose attention is latent": (
        {"architectures": ["Glm4MoeLiteForCausalLM"], "kv_lora_rank": 512},
        "Glm4MoeLiteForCausalLM",
    ),
    "a Qwen2-MoE with windows": (
        {"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": True, "sliding_window": 4096},
        "sliding_window = 4096",
    ),
    "a Gemma 4 that sees what comes": (
        GEMMA_4_TEXT | {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention = 'all'",
    ),
    "a Gemma 4 with a key that we do not know": (GEMMA_4_TEXT | {"altup_num_inputs": 4}, "altup_num_inputs"),
    "a Gemma 4 that shares too many layers' keys": (
        GEMMA_4_TEXT | {"num_kv_shared_layers": 27},
        r"num_kv_shared_layers \(27\) leaves no full_attention layer",
    ),
    "a Gemma 4 whose layers differ in another way": (
        GEMMA_4_TEXT | {"per_layer_config": {"5": {"intermediate_size": 64}}},
        "per_layer_config",
    ),
    "a gpt-oss with a key that we do not know": (GPT_OSS | {"use_mup": True}, "use_mup = True"),
    "a gpt-oss of another format": (
        GPT_OSS | {"quantization_config": {"quant_method": "mxfp8"}},
        "quant_method 'mxfp8'",
    ),
    "a gpt-oss in FP8": (
        GPT_OSS | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        "GptOssForCausalLM with experts",
    ),
    "a Qwen3.5 with a key that we do not know": (
        {"architectures": ["Qwen3_5ForCausalLM"], "linear_allow_neg_eigval": True},
        "linear_allow_neg_eigval = True",
    ),
    "a Qwen3.5 with experts and another router": (
        {"architectures": ["Qwen3_5MoeForCausalLM"], "scoring_func": "sigmoid"},
        "scoring_func = 'sigmoid'",
    ),
    "a Qwen3-Next with n-grams": (
        {"architectures": ["Qwen3NextForCausalLM"], "ngram_size": 3},
        "ngram_size = 3",
    ),
    "a Qwen3.6 whose linear attention has another gate": (
        {"architectures": ["Qwen3_5ForCausalLM"], "output_gate_type": "sigmoid"},
        "output_gate_type = 'sigmoid'",
    ),
    "Qwen3-Next with heads that no kernel knows": (
        {"architectures": ["Qwen3NextForCausalLM"], "linear_key_head_dim": 256},
        "heads of linear attention of 256 elements",
    ),
    "granite-3b-code": (LLAMA | {"attention_bias": True, "mlp_bias": True}, "mlp_bias = True"),
    "a Llama that rotates half of each head": (
        LLAMA | {"partial_rotary_factor": 0.5},
        "partial_rotary_factor = 0.5",
    ),
    "the same as transformers 5 writes it": (
        LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5",
    ),
    "Qwen2.5-7B-Instruct-AWQ of another version": (
        QWEN2 | {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv_fast"}},
        "awq of version 'gemv_fast'",
    ),
    "Mistral-7B-GPTQ of 8 bits": (
        MISTRAL | {"quantization_config": {"quant_method": "gptq", "bits": 8}},
        "gptq with bits 8",
    ),
    "a Llama in 4 bits of bitsandbytes": (
        LLAMA | {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}},
        "bitsandbytes",
    ),
    "a Llama of compressed-tensors": (
        LLAMA | {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
        "compressed-tensors",
    ),
    "a Llama of compressed-tensors, older": (
        LLAMA | {"compression_config": {"format": "pack-quantized"}},
        "compression_config",
    ),
    "Qwen2.5-7B-Instruct-1M": (
        QWEN2 | {"dual_chunk_attention_config": {"chunk_size": 262144}},
        "dual_chunk_attention_config",
    ),
    "a text model with positions of images": (
        QWEN2 | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        "RoPE of type 'mrope'",
    ),
    "a Mistral that sees and whose text model is another": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mixtral"}},
        "text_config of model_type 'mixtral'",
    ),
    "Llama-4-Scout": (
        {"architectures": ["Llama4ForConditionalGeneration"]},
        "Llama4ForConditionalGeneration",
    ),
    "Gemma-3-4b in 4 bits": (
        GEMMA_3_4B | {"quantization_config": {"quant_method": "bitsandbytes"}},
        "bitsandbytes",
    ),
    "a Mixtral in 8 bits": (
        {"architectures": ["MixtralForCausalLM"], "torch_dtype": "float8_e4m3fn"},
        "float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_public_config_that_asks_for_what_is_not_here_is_refused_by_its_name(
    name: str, tmp_path: Path
) -> None:
    raw, named = REFUSED[name]
    with pytest.raises(ModelError, match=named):
        read(tmp_path, raw)
