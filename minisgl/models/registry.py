"""Builds the model of a Hugging Face architecture name.

How to add a model: docs/adding-a-model.md.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from minisgl.attention.backends import select
from minisgl.attention.interface import Attend
from minisgl.errors import ModelError
from minisgl.model_config.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.gemma import build_gemma
from minisgl.models.gemma4 import build_gemma4
from minisgl.models.output_norms import build_glm4, build_with_output_norms
from minisgl.parallel.sizes import rank_sizes, vocabulary_rows

BUILDERS: dict[str, Callable[[ModelConfig, Attend, torch.dtype, torch.device], Decoder]] = {
    "Ernie4_5ForCausalLM": Decoder,
    "Exaone4ForCausalLM": build_with_output_norms,
    "Gemma2ForCausalLM": build_gemma,
    "Gemma3ForCausalLM": build_gemma,
    "Gemma4ForCausalLM": build_gemma4,
    "Glm4ForCausalLM": build_glm4,
    "Glm4MoeForCausalLM": Decoder,
    "GptOssForCausalLM": Decoder,
    "GraniteForCausalLM": Decoder,
    "LlamaForCausalLM": Decoder,
    "Ministral3ForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "MixtralForCausalLM": Decoder,
    "Olmo2ForCausalLM": build_with_output_norms,
    "Olmo3ForCausalLM": build_with_output_norms,
    "Phi3ForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen2MoeForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
    "Qwen3MoeForCausalLM": Decoder,
    "Qwen3NextForCausalLM": Decoder,
    "Qwen3_5ForCausalLM": Decoder,
    "Qwen3_5MoeForCausalLM": Decoder,
    "SeedOssForCausalLM": Decoder,
    "SmolLM3ForCausalLM": Decoder,
}
"""The same names as `minisgl.model_config.hf_folder.families.FAMILIES`, which a test checks."""


def build_model(
    config: ModelConfig,
    *,
    attention_backend: str | Attend,
    dtype: torch.dtype,
    device: torch.device | str,
    tp: int = 1,
) -> Decoder:
    """The model with parameters allocated as `dtype` on `device`, their values undefined until loaded.

    Args:
        attention_backend: the layers' attention function, or the name of a stateless backend.
        tp: number of ranks; above 1 this is one rank's part (minisgl/models/sharded.py connects the parts).

    Raises:
        ModelError: the architecture is not supported.
        ConfigError: the attention backend is unknown, or `tp` does not divide the model.
    """
    if config.architecture not in BUILDERS:
        raise ModelError(
            f"the model's architecture is not supported: got {config.architecture}; "
            f"supported: {', '.join(BUILDERS)}"
        )
    builder = BUILDERS[config.architecture]
    config = replace(rank_sizes(config, tp), vocab_size=vocabulary_rows(config.vocab_size, tp))
    attend = select(attention_backend) if isinstance(attention_backend, str) else attention_backend
    return builder(config, attend, dtype, torch.device(device))
