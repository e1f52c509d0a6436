"""The text part of Gemma 4: a `Decoder` with blocks of another kind.

Layers without a window have heads of their own size, and may take values from the keys' projection; the last
layers may read the keys and values of earlier ones. Experts, if there are any, run beside the MLP. Smaller
models add a vector for each token and layer (`LayerInputs`).

T new tokens, N of them that leave the attention layer, M model width, L layers, E width of a layer's input.
"""

import torch
from torch import Tensor, nn

from minisgl.attention.interface import Attend, AttentionInputs
from minisgl.layers.attention import Attention
from minisgl.layers.embedding import Embedding
from minisgl.layers.linear import FusedLinear, Linear
from minisgl.layers.mlp import GeluMLP
from minisgl.layers.moe import MoeMLP
from minisgl.layers.norm import Factor, RMSNorm
from minisgl.layers.qkv import rotate_queries
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.kv_groups import KVShape
from minisgl.model_config.quantization import layer_scheme
from minisgl.models.decoder import Decoder
from minisgl.models.self_attention import make_norm
from triton_kernels.mixture_norms import (
    EntryNorms,
    ExitNorms,
    enter_mixture,
    leave_mixture,
    suits_mixture_norms,
)
from triton_kernels.registry import KERNELS


def build_gemma4(config: ModelConfig, attend: Attend, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder of Gemma 4's blocks."""
    decoder = Decoder(config, attend, dtype, device, Gemma4Block)
    if config.layer_input_width:
        decoder.layer_inputs = LayerInputs(config, dtype, device)
    attentions = decoder.attention_layers()
    for layer, source in enumerate(config.kv_sources):
        if source != layer:
            attentions[layer].read_from(attentions[source])
    return decoder


class LayerInputs(nn.Module):
    """What each layer gets of a token beside the stream: from its id, and from its embedding."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_layers, self.width = config.num_layers, config.layer_input_width
        size = self.num_layers * self.width
        self.embed_tokens_per_layer = Embedding(config.layer_input_vocab, size, dtype, device)
        self.per_layer_model_projection = Linear(config.hidden_size, size, dtype, device)
        self.per_layer_projection_norm = make_norm(config, self.width, dtype, device)
        self.scale = torch.tensor(self.width**0.5, dtype=dtype, device="cpu").item()
        self.projection_scale = config.hidden_size**-0.5

    def forward(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """[L, T, E] of token_ids [T] and their scaled embeddings [T, M]."""
        projected = self.per_layer_model_projection(embedded) * self.projection_scale
        normed = self.per_layer_projection_norm(projected.view(-1, self.width))
        of_ids = self.embed_tokens_per_layer(token_ids) * self.scale
        both = (normed.view(of_ids.shape) + of_ids) * 2**-0.5
        return both.view(-1, self.num_layers, self.width).transpose(0, 1).contiguous()


class Gemma4Attention(nn.Module):
    """Attention with norms of q, k and v; a layer that reads another's keys and values has only queries."""

    def __init__(
        self, config: ModelConfig, layer: int, attend: Attend, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        shape = config.layer_shapes[layer]
        assert isinstance(shape, KVShape)
        self.q_size, kv_size = config.num_heads * shape.head_dim, shape.num_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.reads_another = bool(config.kv_sources) and config.kv_sources[layer] != layer
        self.values_are_keys = layer in config.layers_with_keys_as_values
        name = f"model.layers.{layer}.self_attn"
        parts = {"q_proj": self.q_size}
        if not self.reads_another:
            parts["k_proj"] = kv_size
            if not self.values_are_keys:
                parts["v_proj"] = kv_size
        scheme = layer_scheme(config.quantization, f"{name}.qkv_proj", tuple(parts))
        self.qkv_proj = FusedLinear(
            config.hidden_size, parts, dtype, device, bias=config.qkv_bias, scheme=scheme
        )
        self.q_norm = make_norm(config, shape.head_dim, dtype, device)
        self.k_norm = None if self.reads_another else make_norm(config, shape.head_dim, dtype, device)
        self.attention = Attention(
            config.num_heads,
            shape.num_heads,
            shape.head_dim,
            attend,
            window=config.windows[layer] if config.windows else 0,
            scale=config.attention_scale,
            scale_names=config.cache_scale_names,
            device=device,
        )
        scheme = layer_scheme(config.quantization, f"{name}.o_proj")
        self.o_proj = Linear(
            self.q_size, config.hidden_size, dtype, device, bias=config.o_bias, scheme=scheme
        )

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, inputs: AttentionInputs) -> Tensor:
        """[T, M] -> [N, M]."""
        qkv = self.qkv_proj(x)
        if self.reads_another:
            heads = qkv.reshape(-1, self.head_dim)
            q = self.q_norm(heads).view(-1, self.q_size // self.head_dim, self.head_dim)
            out = self.attention.attend_pool(rotate_queries(q, positions, cos_sin), inputs).flatten(1)
        else:
            norms = (self.q_norm, self.k_norm, "keys" if self.values_are_keys else "values")
            out = self.attention(qkv, positions, cos_sin, inputs, *norms)
        return self.o_proj(inputs.select_outputs(out))


class Gemma4Block(nn.Module):
    """Attention, MLP and perhaps experts, each between two norms. Modules are named as in the checkpoint."""

    def __init__(
        self, config: ModelConfig, layer: int, attend: Attend, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        width = config.hidden_size

        def norm() -> RMSNorm:
            return make_norm(config, width, dtype, device)

        self.input_layernorm = make_norm(config, width, dtype, device)
        self.self_attn = Gemma4Attention(config, layer, attend, dtype, device)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = make_norm(config, width, dtype, device)
        size = config.intermediate_size * (2 if layer in config.wide_mlp_layers else 1)
        name = f"model.layers.{layer}.mlp"
        self.mlp = GeluMLP(width, size, dtype, device, config.quantization, name)
        self.post_feedforward_layernorm = norm()
        self.layer_scalar = Factor(dtype, device)
        self.moe = None
        if config.experts is not None:
            experts = f"model.layers.{layer}"
            eps = config.rms_norm_eps
            self.moe = MoeMLP(config.experts, width, dtype, device, config.quantization, experts, eps)
            self.pre_feedforward_layernorm_2 = norm()
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
        self.has_input = bool(config.layer_input_width)
        if self.has_input:
            self.per_layer_input_gate = Linear(width, config.layer_input_width, dtype, device)
            self.per_layer_projection = Linear(config.layer_input_width, width, dtype, device)
            self.post_per_layer_input_norm = norm()

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
        if self.moe is not None and self._norms_are_fused(x):
            return self._mix_few(self.moe, x, residual, inputs.select_outputs(inputs.slot_mapping))
        x = self.post_attention_layernorm(x)
        x, residual = self.pre_feedforward_layernorm.forward_add(x, residual)
        x = self.mlp(x)
        if self.moe is not None:
            slots = inputs.select_outputs(inputs.slot_mapping)
            mixed = self.moe.mix_beside(self.pre_feedforward_layernorm_2(residual), residual, slots)
            x = self.post_feedforward_layernorm_1(x) + self.post_feedforward_layernorm_2(mixed)
        x = self.post_feedforward_layernorm(x)
        if self.has_input and inputs.layer_input is not None:
            residual = x + residual
            gate = torch.nn.functional.gelu(self.per_layer_input_gate(residual), approximate="tanh")
            x = self.per_layer_projection(gate * inputs.select_outputs(inputs.layer_input))
            x = self.post_per_layer_input_norm(x)
        return self.layer_scalar(x), self.layer_scalar(residual)

    def _norms_are_fused(self, x: Tensor) -> bool:
        """Whether the norms around MLP and experts are two launches for the rows of x."""
        if self.moe is None or self.has_input or not suits_mixture_norms(x):
            return False
        norm = self.post_attention_layernorm
        are_ours = isinstance(norm, RMSNorm) and norm.kernels.rms_norm is KERNELS.rms_norm
        return are_ours and self.moe.norm_and_router_are_ours()

    def _mix_few(
        self, moe: MoeMLP, x: Tensor, residual: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What `forward` returns, of the attention's output and the residual, [N, M] for few rows."""
        assert moe.router_scale is not None
        entry = EntryNorms(
            self.post_attention_layernorm.weight,
            self.pre_feedforward_layernorm.weight,
            self.pre_feedforward_layernorm_2.weight,
            moe.router_scale,
        )
        for_mlp, for_experts, residual, logits = enter_mixture(
            x, residual, entry, moe.eps, moe.router, moe.router_factor, slot_mapping
        )
        x = self.mlp(for_mlp)
        mixed, factors = moe.mix_unscaled(for_experts, logits)
        leaving = ExitNorms(
            self.post_feedforward_layernorm_1.weight,
            self.post_feedforward_layernorm_2.weight,
            self.post_feedforward_layernorm.weight,
        )
        return leave_mixture(x, mixed, factors, residual, leaving, moe.eps, self.layer_scalar.value)
