"""Blocks that normalise what attention and MLP put out, before it is added to the residual stream.

OLMo 2 and 3 and EXAONE 4 have these norms only; GLM-4 has one before attention and MLP, too.

T new tokens, N of them that leave the attention layer, M model width.
"""

import torch
from torch import Tensor, nn

from minisgl.attention.interface import Attend, AttentionInputs
from minisgl.layers.mlp import GatedMLP
from minisgl.model_config.config import ModelConfig
from minisgl.models.decoder import Decoder
from minisgl.models.self_attention import SelfAttention, make_norm


def build_with_output_norms(
    config: ModelConfig, attend: Attend, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """A decoder of `OutputNormBlock`s."""
    return Decoder(config, attend, dtype, device, OutputNormBlock)


def build_glm4(config: ModelConfig, attend: Attend, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder of `Glm4Block`s."""
    return Decoder(config, attend, dtype, device, Glm4Block)


class OutputNormBlock(nn.Module):
    """Attention and MLP, each before a norm. Modules are named as in the checkpoint."""

    def __init__(
        self, config: ModelConfig, layer: int, attend: Attend, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer, attend, dtype, device)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, dtype, device)
        self.mlp = _make_mlp(config, layer, dtype, device)
        self.post_feedforward_layernorm = make_norm(config, config.hidden_size, dtype, device)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        """x and residual, [T, M] -> [N, M]; their sum is the residual stream."""
        stream = x + residual
        x = self.post_attention_layernorm(self.self_attn(stream, positions, cos_sin, inputs))
        stream = x + inputs.select_outputs(stream)
        return self.post_feedforward_layernorm(self.mlp(stream)), stream


class Glm4Block(nn.Module):
    """Attention and MLP, each between two norms. Modules are named as in the checkpoint."""

    def __init__(
        self, config: ModelConfig, layer: int, attend: Attend, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = make_norm(config, width, dtype, device)
        self.self_attn = SelfAttention(config, layer, attend, dtype, device)
        self.post_self_attn_layernorm = make_norm(config, width, dtype, device)
        self.post_attention_layernorm = make_norm(config, width, dtype, device)
        self.mlp = _make_mlp(config, layer, dtype, device)
        self.post_mlp_layernorm = make_norm(config, width, dtype, device)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        """x and residual, [T, M] -> [N, M]; their sum is the residual stream."""
        wanted = self.self_attn.input_format
        normed, residual = self.input_layernorm.forward_add_as(x, residual, wanted)
        x = self.post_self_attn_layernorm(self.self_attn(normed, positions, cos_sin, inputs))
        residual = inputs.select_outputs(residual)
        normed, residual = self.post_attention_layernorm.forward_add_as(x, residual, self.mlp.input_format)
        return self.post_mlp_layernorm(self.mlp(normed)), residual


def _make_mlp(config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> GatedMLP:
    sizes = (config.hidden_size, config.intermediate_size)
    return GatedMLP(*sizes, dtype, device, config.quantization, f"model.layers.{layer}.mlp")
