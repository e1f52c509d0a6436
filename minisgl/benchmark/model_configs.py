"""Public models as their config.json: to run their shapes with dummy weights, without a checkpoint.

Promise: this is the only table of model sizes in the benchmarks. Its fields are those of the models' own
config.json on the Hugging Face hub that an engine reads.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError, ModelError
from minisgl.progress import Progress, no_progress
from minisgl.weights.sources import resolve_model_folder


def _decoder(
    architecture: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    *,
    max_position: int,
    rope_theta: float,
    **others: Any,
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    } | others


def _llama(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **others: Any
) -> dict[str, Any]:
    """Llama 3.1 and 3.2."""
    stretch = {
        "rope_type": "llama3",
        "factor": others.pop("rope_factor", 8.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _decoder(
        "LlamaForCausalLM",
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        128256,
        max_position=131072,
        rope_theta=500000.0,
        model_type="llama",
        rms_norm_eps=1e-5,
        rope_scaling=stretch,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        **others,
    )


def _qwen3_5(
    architecture: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **others: Any
) -> dict[str, Any]:
    """The text part of Qwen3.5 and 3.6: three of four layers have linear attention."""
    sizes = {
        "head_dim": 256,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "rms_norm_eps": 1e-6,
    }
    return _decoder(
        architecture,
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        248320,
        max_position=262144,
        rope_theta=1e7,
        **{**sizes, **others},
    )


def _gemma_4(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **others: Any
) -> dict[str, Any]:
    """The text part of Gemma 4 without inputs of layers: every sixth layer attends to all tokens."""
    settings = {
        "model_type": "gemma4_text",
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * (layers // 6),
        "sliding_window": 1024,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "hidden_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    config = _decoder(
        "Gemma4ForCausalLM",
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        262144,
        max_position=262144,
        rope_theta=1000000.0,
        **settings,
        **others,
    )
    for key in ("rope_theta", "hidden_act"):  # it has others in their place
        del config[key]
    return config


def _qwen3(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, **others: Any
) -> dict[str, Any]:
    """Qwen3, dense or with experts: RMSNorm of q and k, no attention bias."""
    return _decoder(
        others.pop("architecture", "Qwen3ForCausalLM"),
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        151936,
        max_position=40960,
        rope_theta=1000000.0,
        **(
            {
                "model_type": "qwen3",
                "head_dim": 128,
                "rms_norm_eps": 1e-6,
                "rope_scaling": None,
                "attention_bias": False,
                "use_sliding_window": False,
                "sliding_window": None,
                "bos_token_id": 151643,
                "eos_token_id": 151645,
            }
            | others
        ),
    )


MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma-3-1b": _decoder(
        "Gemma3ForCausalLM",
        26,
        1152,
        6912,
        4,
        1,
        262144,
        max_position=32768,
        rope_theta=1000000.0,
        model_type="gemma3_text",
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=1e-6,
        rope_local_base_freq=10000,
        sliding_window=512,
        sliding_window_pattern=6,
        query_pre_attn_scalar=256,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=[1, 106],
    ),
    "llama-3.1-8b": _llama(32, 4096, 14336, 32, 8),
    "llama-3.1-70b": _llama(80, 8192, 28672, 64, 8),
    "llama-3.2-1b": _llama(16, 2048, 8192, 32, 8, head_dim=64, tie_word_embeddings=True, rope_factor=32.0),
    "mistral-7b": _decoder(
        "MistralForCausalLM",
        32,
        4096,
        14336,
        32,
        8,
        32768,
        max_position=32768,
        rope_theta=1000000.0,
        model_type="mistral",
        rms_norm_eps=1e-5,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "phi-3-mini-4k": _decoder(
        "Phi3ForCausalLM",
        32,
        3072,
        8192,
        32,
        32,
        32064,
        max_position=4096,
        rope_theta=10000.0,
        model_type="phi3",
        rms_norm_eps=1e-5,
        rope_scaling=None,
        sliding_window=2047,
        original_max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=32000,
        pad_token_id=32000,
    ),
    "glm-4.5-air": _decoder(
        "Glm4MoeForCausalLM",
        46,
        4096,
        10944,
        96,
        8,
        151552,
        max_position=131072,
        rope_theta=1000000.0,
        model_type="glm4_moe",
        head_dim=128,
        rms_norm_eps=1e-5,
        attention_bias=True,
        use_qk_norm=False,
        partial_rotary_factor=0.5,
        first_k_dense_replace=1,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
        eos_token_id=[151329, 151336, 151338],
    ),
    "qwen2.5-7b": _decoder(
        "Qwen2ForCausalLM",
        28,
        3584,
        18944,
        28,
        4,
        152064,
        max_position=32768,
        rope_theta=1000000.0,
        model_type="qwen2",
        rms_norm_eps=1e-6,
        use_sliding_window=False,
        sliding_window=131072,
        max_window_layers=28,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, 8),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, 8),
    "qwen3-30b-a3b": _qwen3(
        48,
        2048,
        6144,
        32,
        4,
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "qwen3.5-9b": _qwen3_5("Qwen3_5ForCausalLM", 32, 4096, 12288, 16, 4),
    "qwen3.5-27b": _qwen3_5("Qwen3_5ForCausalLM", 64, 5120, 17408, 24, 4, linear_num_value_heads=48),
    "qwen3.5-35b-a3b": _qwen3_5(
        "Qwen3_5MoeForCausalLM",
        40,
        2048,
        512,
        16,
        2,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "gemma-4-26b-a4b": _gemma_4(
        30,
        2816,
        2112,
        16,
        8,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "gemma-4-31b": _gemma_4(60, 5376, 21504, 32, 16, num_global_key_value_heads=4),
    "gpt-oss-20b": _decoder(
        "GptOssForCausalLM",
        24,
        2880,
        2880,
        64,
        8,
        201088,
        max_position=131072,
        rope_theta=150000.0,
        model_type="gpt_oss",
        head_dim=64,
        attention_bias=True,
        num_local_experts=32,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        rms_norm_eps=1e-5,
        layer_types=["sliding_attention", "full_attention"] * 12,
        sliding_window=128,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
        eos_token_id=200002,
    ),
    "mixtral-8x7b": _decoder(
        "MixtralForCausalLM",
        32,
        4096,
        14336,
        32,
        8,
        32000,
        max_position=32768,
        rope_theta=1000000.0,
        model_type="mixtral",
        rms_norm_eps=1e-5,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "smollm2-135m": _decoder(
        "LlamaForCausalLM",
        30,
        576,
        1536,
        9,
        3,
        49152,
        max_position=8192,
        rope_theta=100000.0,
        model_type="llama",
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
"""Models by the name that `--model` takes together with --dummy-weights."""


@contextmanager
def model_folder(
    config: EngineConfig, *, cache_dir: Path | None = None, progress: Progress = no_progress
) -> Iterator[Path]:
    """A folder for `build_engine`: the model's own folder.

    With dummy weights and a name in MODEL_CONFIGS, it is a temporary folder with only config.json.

    Raises:
        ModelError: there is no such model.
        ConfigError: the name is in MODEL_CONFIGS, but the settings lack dummy weights.
    """
    if config.dummy_weights and config.model in MODEL_CONFIGS:
        with tempfile.TemporaryDirectory(prefix="minisgl-") as name:
            text = json.dumps(MODEL_CONFIGS[config.model], indent=1)
            (Path(name) / "config.json").write_text(text, encoding="utf-8")
            yield Path(name)
        return
    try:
        folder = resolve_model_folder(
            config.model,
            revision=config.revision,
            tokenizer=config.tokenizer,
            with_weights=not config.dummy_weights,
            cache_dir=cache_dir,
            progress=progress,
        )
    except ModelError as error:
        if config.model in MODEL_CONFIGS:
            raise ConfigError(
                f"only the shape of {config.model} is known here: add --dummy-weights, or give --model a "
                "folder or hub name"
            ) from error
        known = f"; with --dummy-weights also one of {', '.join(MODEL_CONFIGS)}"
        raise ModelError(f"{error}{known if config.dummy_weights else ''}") from error
    yield folder
