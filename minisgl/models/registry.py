"""From a Hugging Face architecture name to the module that runs it.

How to add a model: docs/adding-a-model.md.
"""

from collections.abc import Callable

import torch

from minisgl.attention.backends import select
from minisgl.attention.interface import Attend
from minisgl.config import ModelConfig
from minisgl.errors import ModelError
from minisgl.models.decoder import Decoder
from minisgl.models.gemma3 import build_gemma3

BUILDERS: dict[str, Callable[[ModelConfig, Attend, torch.dtype, torch.device], Decoder]] = {
    "Gemma3ForCausalLM": build_gemma3,
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "MixtralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
    "Qwen3MoeForCausalLM": Decoder,
}
"""The same names as `minisgl.model_config.FAMILIES`, which a test holds together."""


def build_model(
    config: ModelConfig, *, attention_backend: str, dtype: torch.dtype, device: torch.device | str
) -> Decoder:
    """The model with parameters allocated as `dtype` on `device`, their values undefined until loaded.

    Raises:
        ModelError: nothing here runs the architecture.
        ConfigError: there is no such attention backend.
    """
    if config.architecture not in BUILDERS:
        raise ModelError(
            f"the model's architecture is not supported: got {config.architecture}; "
            f"supported: {', '.join(BUILDERS)}"
        )
    builder = BUILDERS[config.architecture]
    return builder(config, select(attention_backend), dtype, torch.device(device))
