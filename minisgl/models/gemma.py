"""Gemma 3's text model: the decoder's frame around blocks that differ in kind.

Four norms to a block, two of them on what attention and MLP yield, before it joins the stream; GELU in the
gate. What differs by numbers alone (scaled embeddings, weights of norms less 1, windows and their own theta
in most layers, the scores' scale) the frame reads from the config.

T new tokens, N of them that go on behind attention, M model width.
"""

import torch
from torch import Tensor, nn

from minisgl.attention.interface import Attend, AttentionInputs
from minisgl.layers.mlp import GeluMLP
from minisgl.model_config import ModelConfig
from minisgl.models.decoder import Decoder, SelfAttention, make_norm


def build_gemma3(config: ModelConfig, attend: Attend, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder of Gemma 3's blocks."""
    return Decoder(config, attend, dtype, device, Gemma3Block)


class Gemma3Block(nn.Module):
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
        self.mlp = GeluMLP(width, config.intermediate_size, dtype, device)
        self.post_feedforward_layernorm = make_norm(config, width, dtype, device)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        """x and residual, [T, M] -> [N, M]; their sum is the stream."""
        x, residual = self.input_layernorm.forward_add(x, residual)
        x, residual = self.self_attn(x, positions, cos_sin, inputs), inputs.keep(residual)
        x = self.post_attention_layernorm(x)
        x, residual = self.pre_feedforward_layernorm.forward_add(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual
