"""Gemma 2 and the text model of Gemma 3: a `Decoder` with blocks of another kind.

A block has four norms and a GELU in the gate of its MLP. Two of the norms are applied to the outputs of
attention and MLP before these are added to the residual. All other differences are numbers in the config,
which `Decoder` reads: embedding and score scales, norm weights less 1, windows, RoPE and soft caps.

T new tokens, N of them that leave the attention layer, M model width.
"""

import torch
from torch import Tensor, nn

from minisgl.attention.interface import Attend, AttentionInputs
from minisgl.layers.mlp import GeluMLP
from minisgl.model_config.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.self_attention import SelfAttention, make_norm


def build_gemma(config: ModelConfig, attend: Attend, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder of Gemma blocks."""
    return Decoder(config, attend, dtype, device, GemmaBlock)


class GemmaBlock(nn.Module):
    """Attention and MLP, each between two norms. Modules are named as in the checkpoint."""

    def __init__(
        self, config: ModelConfig, layer: int, attend: Attend, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = make_norm(config, width, dtype, device)
        self.self_attn = SelfAttention(config, layer, attend, dtype, device)
        self.post_attention_layernorm = make_norm(config, width, dtype, device)
        self.pre_feedforward_layernorm = make_norm(config, width, dtype, device)
        name = f"model.layers.{layer}.mlp"
        self.mlp = GeluMLP(width, config.intermediate_size, dtype, device, config.quantization, name)
        self.post_feedforward_layernorm = make_norm(config, width, dtype, device)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        """x and residual, [T, M] -> [N, M]; their sum is the residual stream."""
        x, residual = self.input_layernorm.forward_add(x, residual)
        x, residual = self.self_attn(x, positions, cos_sin, inputs), inputs.select_outputs(residual)
        x = self.post_attention_layernorm(x)
        x, residual = self.pre_feedforward_layernorm.forward_add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual
