"""From a Hugging Face architecture name to the module that runs it.

How to add a model: docs/adding-a-model.md.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from minisgl.attention.backends import select
from minisgl.attention.interface import Attend
from minisgl.errors import ModelError
from minisgl.model_config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.gemma3 import build_gemma3
from minisgl.parallel.sizes import rank_sizes, vocabulary_rows

BUILDERS: dict[str, Callable[[ModelConfig, Attend, torch.dtype, torch.device], Decoder]] = {
    "Gemma3ForCausalLM": build_gemma3,
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "MixtralForCausalLM": Decoder,
    "Phi3ForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
    "Qwen3MoeForCausalLM": Decoder,
}
"""The same names as `minisgl.hf_config.FAMILIES`, which a test holds together."""


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
        attention_backend: what the layers attend by, or the name of a backend that needs no more than a name.
        tp: ranks that share the model; with several, one rank's part (minisgl/models/sharded.py joins them).

    Raises:
        ModelError: nothing here runs the architecture.
        ConfigError: there is no such attention backend, or `tp` does not suit the model.
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
