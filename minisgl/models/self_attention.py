"""Attention with its projections, as all blocks have it.

T new tokens, N of them that leave the layer's attention, M model width.
"""

import torch
from torch import Tensor, nn

from minisgl.attention.interface import Attend, AttentionInputs
from minisgl.layers.attention import Attention
from minisgl.layers.linear import FusedLinear, Linear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.qkv import head_order_for_rotation, norm_all_heads, order_for_rotation, scale_queries
from minisgl.layers.weight import Input, InputFormat
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.quantization import layer_scheme


def make_norm(config: ModelConfig, width: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    """A norm with the model's eps and weight convention."""
    return RMSNorm(width, config.rms_norm_eps, dtype, device, weight_minus_one=config.norm_weights_minus_one)


class SelfAttention(nn.Module):
    """A layer's attention with its projections: q, k and v in one matrix product, and optional q/k norms.

    The attention normalises each head; a norm of all heads comes before it. With gates, each head's query is
    followed by a gate, whose sigmoid multiplies the head's output.
    """

    order: Tensor | None

    def __init__(
        self, config: ModelConfig, layer: int, attend: Attend, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.has_gate = config.attention_gate
        parts = {"q_proj": q_size * (2 if self.has_gate else 1), "k_proj": kv_size, "v_proj": kv_size}
        name = f"model.layers.{layer}.self_attn"
        scheme = layer_scheme(config.quantization, f"{name}.qkv_proj", tuple(parts))
        self.qkv_proj = FusedLinear(
            config.hidden_size, parts, dtype, device, bias=config.qkv_bias, scheme=scheme
        )
        self.q_norm = self.k_norm = None
        self.norms_all_heads = config.qk_norm_of_all_heads
        if config.qk_norm or config.qk_norm_of_all_heads:
            sizes = (q_size, kv_size) if config.qk_norm_of_all_heads else (config.head_dim, config.head_dim)
            self.q_norm, self.k_norm = (make_norm(config, size, dtype, device) for size in sizes)
        self.register_buffer("order", order_for_rotation(config, device), persistent=False)
        self.head_order = head_order_for_rotation(config, device)
        self.q_size = q_size
        self.head_dim = config.head_dim
        self.query_scaling = config.query_scaling
        window = config.windows[layer] if config.windows else 0
        self.attention = Attention(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            attend,
            window=window,
            scale=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
            scale_names=config.cache_scale_names,
            has_sinks=config.attention_sinks,
            device=device,
        )
        scheme = layer_scheme(config.quantization, f"{name}.o_proj")
        self.o_proj = Linear(q_size, config.hidden_size, dtype, device, bias=config.o_bias, scheme=scheme)

    @property
    def input_format(self) -> InputFormat:
        """What `forward` takes beside plain rows."""
        return self.qkv_proj.input_format

    def forward(self, x: Input, positions: Tensor, cos_sin: Tensor, inputs: AttentionInputs) -> Tensor:
        """[T, M] -> [N, M]."""
        qkv, q_norm, k_norm = self.qkv_proj(x), self.q_norm, self.k_norm
        gate = None
        if self.has_gate:
            gate = qkv[:, : 2 * self.q_size].unflatten(1, (-1, 2, self.head_dim))[:, :, 1]
        if self.norms_all_heads and q_norm is not None and k_norm is not None:
            qkv, q_norm, k_norm = norm_all_heads(qkv, q_norm, k_norm), None, None
        if self.order is not None:
            qkv = qkv.index_select(1, self.order)
        if self.query_scaling is not None:
            qkv = scale_queries(qkv, positions, self.q_size, self.query_scaling)
        out = self.attention(qkv, positions, cos_sin, inputs, q_norm, k_norm)
        out = inputs.select_outputs(out)
        if gate is not None:
            out = out * torch.sigmoid(inputs.select_outputs(gate)).flatten(1)
        return self.o_proj(out)

    def finish_loading(self) -> None:
        """Called once, after the checkpoint is loaded: norms of a head get the order of its elements."""
        if self.head_order is not None and not self.norms_all_heads:
            for norm in (self.q_norm, self.k_norm):
                if norm is not None:
                    norm.weight.copy_(norm.weight[self.head_order])
