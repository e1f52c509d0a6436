"""Tiny models of every family: transformers' model_type and settings, by what is special in each."""

from typing import Any

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.5, 2.0, 8.0, 30.0],
}


def heads(num_heads: int, num_kv_heads: int, **others: Any) -> dict[str, Any]:
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, **others}


def rope(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **others}}


DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    # Tokens whose heads of linear attention put out nearly nothing are magnified by their norm: with larger
    # weights, transformers in float32 is further than the tolerance from itself in float64.
    "initializer_range": 0.05,
}
DELTA_EXPERTS = DELTA | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_groups_of_1": ("llama", heads(6, 6)),
    "llama_groups_of_3_tied": ("llama", heads(6, 2, tie_word_embeddings=True, rms_norm_eps=0.03)),
    "llama_groups_of_4_head_dim_given": ("llama", heads(4, 1, head_dim=20)),
    "llama_groups_of_8_tied": ("llama", heads(8, 1, head_dim=16, tie_word_embeddings=True)),
    "llama_attention_bias": ("llama", {"attention_bias": True}),
    "llama_default_rope_other_theta": ("llama", rope("default")),
    "llama_linear_rope": ("llama", rope("linear", factor=3.0)),
    "llama_dynamic_rope": ("llama", rope("dynamic", factor=3.0)),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama_yarn_attention_factor": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}},
    ),
    "llama_yarn_mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False}},
    ),
    "llama_longrope": ("llama", {"rope_parameters": LONGROPE, "max_position_embeddings": 300}),
    "llama_longrope_as_long_as_the_original": (
        "llama",
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 512, "factor": 4.0}},
    ),
    "llama_proportional_rope": ("llama", rope("proportional", partial_rotary_factor=0.5, factor=2.0)),
    "mistral_window": ("mistral", heads(6, 2, sliding_window=20)),
    "mistral_no_window_head_dim_given": ("mistral", heads(4, 1, sliding_window=None, head_dim=20)),
    "mixtral_8_experts": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral_4_experts_window": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 17},
    ),
    "phi3": ("phi3", heads(6, 6, pad_token_id=0)),
    "phi3_window_longrope_tied": (
        "phi3",
        heads(
            6,
            2,
            sliding_window=20,
            tie_word_embeddings=True,
            pad_token_id=0,
            original_max_position_embeddings=32,
            rope_parameters=LONGROPE | {"attention_factor": 1.3},
        ),
    ),
    "qwen2": ("qwen2", heads(6, 2)),
    "qwen2_tied_yarn": ("qwen2", heads(8, 1, tie_word_embeddings=True, rope_parameters=YARN)),
    "qwen2_window_that_is_off": ("qwen2", {"use_sliding_window": False, "sliding_window": 5}),
    "qwen2_window_in_the_second_layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2_moe_shared_expert": (
        "qwen2_moe",
        heads(
            6,
            2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=40,
        ),
    ),
    "qwen2_moe_60_experts_one_dense_layer_no_bias_tied": (
        "qwen2_moe",
        heads(
            4,
            4,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=64,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            qkv_bias=False,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_tied": ("qwen3", heads(6, 2, head_dim=20, tie_word_embeddings=True, rms_norm_eps=0.03)),
    "qwen3_groups_of_1_attention_bias": ("qwen3", heads(6, 6, head_dim=16, attention_bias=True)),
    "qwen3_window_in_the_first_layer": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3_moe_4_experts": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    ),
    "qwen3_moe_60_experts_renormalized": (
        "qwen3_moe",
        {
            "num_experts": 60,
            "num_experts_per_tok": 7,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe_one_dense_layer_window": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 40,
        },
    ),
    "qwen3_moe_every_second_layer": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "decoder_sparse_step": 2},
    ),
    "gemma2_alternating_windows": (
        "gemma2",
        heads(
            6,
            2,
            head_dim=16,
            sliding_window=20,
            query_pre_attn_scalar=50,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=4.0,
        ),
    ),
    "gemma2_no_softcaps_untied": (
        "gemma2",
        heads(
            4,
            4,
            head_dim=20,
            sliding_window=600,
            tie_word_embeddings=False,
            attention_bias=True,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    "gemma3_windows": (
        "gemma3_text",
        heads(
            6,
            2,
            head_dim=16,
            sliding_window=20,
            query_pre_attn_scalar=50,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "gemma3_groups_of_1_softcap": (
        "gemma3_text",
        heads(4, 4, head_dim=20, sliding_window=600, final_logit_softcapping=5.0, attention_bias=True),
    ),
    "gemma3_untied_linear_rope_in_full_layers": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 33,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 70000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "seed_oss": ("seed_oss", heads(6, 2, head_dim=16)),
    "seed_oss_all_biases_tied": (
        "seed_oss",
        heads(4, 4, head_dim=12, attention_out_bias=True, tie_word_embeddings=True),
    ),
    "seed_oss_no_bias": ("seed_oss", heads(6, 2, head_dim=8, attention_bias=False)),
    "smollm3_every_fourth_layer_without_rope": ("smollm3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "smollm3_layers_listed_untied_bias": (
        "smollm3",
        heads(6, 6, no_rope_layers=[0, 1], tie_word_embeddings=False, attention_bias=True, pad_token_id=0),
    ),
    "smollm3_window_in_layers_without_rope": (
        "smollm3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 20, "pad_token_id": 0},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
        },
    ),
    "granite_no_multipliers_tied_bias": (
        "granite",
        heads(6, 6, attention_multiplier=0.3, tie_word_embeddings=True, attention_bias=True),
    ),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "pad_token_id": 0,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7},
        },
    ),
    "ministral3_window_tied": (
        "ministral3",
        heads(
            4,
            4,
            head_dim=12,
            sliding_window=20,
            tie_word_embeddings=True,
            pad_token_id=0,
            rope_parameters=YARN | {"llama_4_scaling_beta": 0.1},
        ),
    ),
    "olmo2": ("olmo2", heads(6, 2)),
    "olmo2_groups_of_1_bias_tied": ("olmo2", heads(4, 4, attention_bias=True, tie_word_embeddings=True)),
    "olmo3_windows": ("olmo3", heads(6, 2, num_hidden_layers=5, sliding_window=20)),
    "olmo3_layers_listed_yarn_in_full_layers": (
        "olmo3",
        {
            "sliding_window": 33,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "exaone4_windows": ("exaone4", heads(6, 2, num_hidden_layers=5, sliding_window=20)),
    "exaone4_no_window_tied": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True},
    ),
    "exaone4_listed_pattern_in_letters": (
        "exaone4",
        {
            "head_dim": 12,
            "sliding_window": 600,
            "sliding_window_pattern": "LG",
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "ernie4_5": ("ernie4_5", heads(6, 2, head_dim=16)),
    "ernie4_5_untied": ("ernie4_5", heads(4, 4, head_dim=12, tie_word_embeddings=False)),
    "glm4": ("glm4", heads(6, 2, head_dim=16, pad_token_id=0)),
    "glm4_no_bias_other_share_tied": (
        "glm4",
        heads(
            4,
            4,
            head_dim=16,
            attention_bias=False,
            tie_word_embeddings=True,
            pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        ),
    ),
    "glm4_moe_groups_qk_norm_bias": (
        "glm4_moe",
        heads(
            6,
            2,
            num_hidden_layers=3,
            head_dim=16,
            use_qk_norm=True,
            attention_bias=True,
            n_routed_experts=12,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            n_shared_experts=2,
        ),
    ),
    "glm4_moe_one_group_two_dense_layers_tied": (
        "glm4_moe",
        heads(
            4,
            4,
            num_hidden_layers=3,
            head_dim=12,
            n_routed_experts=60,
            num_experts_per_tok=7,
            moe_intermediate_size=16,
            norm_topk_prob=False,
            first_k_dense_replace=2,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        ),
    ),
    "gpt_oss_windows_yarn": (
        "gpt_oss",
        heads(
            6,
            2,
            head_dim=16,
            sliding_window=20,
            num_local_experts=8,
            num_experts_per_tok=3,
            intermediate_size=32,
            swiglu_limit=2.0,
            pad_token_id=0,
            rope_parameters=YARN | {"truncate": False},
        ),
    ),
    "gpt_oss_no_window_default_rope_tied": (
        "gpt_oss",
        heads(
            4,
            4,
            head_dim=16,
            sliding_window=600,
            num_local_experts=5,
            num_experts_per_tok=1,
            intermediate_size=48,
            tie_word_embeddings=True,
            pad_token_id=0,
            layer_types=["full_attention", "sliding_attention"],
            swiglu_alpha=1.3,
        ),
    ),
    "gemma4_shared_kv_inputs_of_layers": (
        "gemma4_text",
        heads(
            4,
            2,
            num_hidden_layers=6,
            head_dim=16,
            per_layer_config={"1": {"head_dim": 32}, "5": {"head_dim": 32}},
            sliding_window=20,
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=97,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            layer_types=[
                *("sliding_attention", "full_attention", "sliding_attention"),
                *("sliding_attention", "sliding_attention", "full_attention"),
            ],
        ),
    ),
    "gemma4_experts_keys_as_values_softcap": (
        "gemma4_text",
        heads(
            4,
            2,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            head_dim=16,
            global_head_dim=32,
            num_global_key_value_heads=1,
            sliding_window=20,
            attention_k_eq_v=True,
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=2,
            moe_intermediate_size=16,
            hidden_size_per_layer_input=0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma4_dense_untied": (
        "gemma4_text",
        heads(
            4,
            4,
            num_hidden_layers=2,
            head_dim=12,
            global_head_dim=24,
            sliding_window=600,
            hidden_size_per_layer_input=0,
            attention_bias=True,
            tie_word_embeddings=False,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 70000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        ),
    ),
    "phi3_part_of_a_head_rotated": (
        "phi3",
        heads(
            3,
            1,
            pad_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        ),
    ),
    "phi3_part_rotated_longrope": (
        "phi3",
        heads(
            3,
            1,
            tie_word_embeddings=True,
            pad_token_id=0,
            original_max_position_embeddings=32,
            rope_parameters=LONGROPE | {"attention_factor": 1.3, "partial_rotary_factor": 0.5},
        ),
    ),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_every_fourth_tied_bias": (
        "qwen3_5_text",
        DELTA
        | {"num_hidden_layers": 4, "layer_types": None, "linear_value_head_dim": 16}
        | {"tie_word_embeddings": True, "attention_bias": True, "initializer_range": 0.04},
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA_EXPERTS),
    "qwen3_5_moe_wider_shared_expert": (
        "qwen3_5_moe_text",
        DELTA_EXPERTS | {"shared_expert_intermediate_size": 32},
    ),
    "qwen3_next": ("qwen3_next", DELTA_EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": False}),
}
BY_FLAG = {
    "gemma4_dense_untied",
    "glm4_moe_one_group_two_dense_layers_tied",
    "gpt_oss_no_window_default_rope_tied",
    "qwen3_5_moe_wider_shared_expert",
}
"""Variants that only --all-families compares."""
