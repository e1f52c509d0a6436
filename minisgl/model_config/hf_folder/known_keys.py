"""Refuses keys of config.json that a family does not know, which may change what the model computes.

Promise: a key that has no effect on the output of this engine is never a reason to refuse a model.
"""

from typing import Any

from minisgl.model_config.hf_folder.json_fields import unsupported

EVERYWHERE = frozenset(
    [
        "architectures",
        "attention_bias",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "pretraining_tp",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "vocab_size",
    ]
)
"""Keys that every family reads, or that say nothing about the output."""
OF_PEOPLE = (
    *("_", "unsloth", "output_", "return_", "id2label", "label2id", "problem_type", "task_specific_params"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "router_aux_loss_coef", "router_jitter_noise"),
    "mtp_",
)
"""What keys begin with that tools leave in a file, or that matter to training or multi-token prediction."""
OF_IMAGES = (
    *("_token_id", "_token_index", "_soft_tokens_per_image"),
    *("vision_config", "audio_config", "text_config"),
)
"""What keys of models of text and images end with; their images are refused anyway."""


def refuse_unknown_keys(raw: dict[str, Any], known: frozenset[str]) -> None:
    """Refuse a key that is neither among `known` nor harmless. Null and false are harmless everywhere.

    Raises:
        ModelError: names the first such key.
    """
    for key, value in raw.items():
        is_known = key in EVERYWHERE or key in known or key.startswith(OF_PEOPLE)
        is_known = is_known or key.endswith(OF_IMAGES)
        if not is_known and value is not None and value is not False:
            raise unsupported(f"{key} = {value!r}, which this engine does not know for this architecture")
