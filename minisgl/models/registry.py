"""From a Hugging Face architecture name to the module that runs it.

To add a model: teach minisgl/model_config.py to read its settings, then name its builder here.
"""

from collections.abc import Callable

import torch

from minisgl.attention.backends import select
from minisgl.attention.interface import Attend
from minisgl.config import ModelConfig
from minisgl.errors import ModelError
from minisgl.models.decoder import Decoder

BUILDERS: dict[str, Callable[[ModelConfig, Attend, torch.dtype, torch.device], Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}
"""The same names as `minisgl.model_config.ARCHITECTURES`, which a test holds together."""


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
