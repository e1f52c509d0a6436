"""The decoder of the Llama family, also the frame of other blocks (gemma.py, output_norms.py).

Promise: the forward pass is a straight line of tensor operations, without branches on tensor values, so it
traces as a single graph. The only state is in the attention layers' buffers: the KV pool, and the states of
linear attention.

T new tokens, N of them that leave the last layer's attention (all by default), M model width, V vocabulary,
D head dim, P pages, S page size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minisgl.attention.interface import Attend, AttentionInputs
from minisgl.layers.attention import Attention
from minisgl.layers.embedding import Embedding
from minisgl.layers.linear import Linear
from minisgl.layers.linear_attention import LinearAttention
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.moe import MoeMLP
from minisgl.layers.rotary import make_cos_sin, make_unrotated
from minisgl.layers.state_pool import StatePool
from minisgl.layers.weight import PlainWeight
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.kv_groups import StateShape
from minisgl.model_config.quantization import layer_scheme
from minisgl.models.checkpoint import finish_loading, tensors_by_name
from minisgl.models.delta_net import make_linear_attention
from minisgl.models.self_attention import SelfAttention, make_norm

RunBlock = Callable[..., tuple[Tensor, Tensor]]
"""`call_block`, or a compiled equivalent."""
MakeBlock = Callable[[ModelConfig, int, Attend, torch.dtype, torch.device], nn.Module]
"""Makes the block of a layer from the layer's index; the arguments are those of `Block`."""


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head. Modules are named as in the checkpoint, less its "model." prefix.

    Parameters are allocated as `dtype` on `device` and hold nothing until loaded (minisgl/weights).

    Args:
        make_block: makes the blocks of a family that does not use `Block`.
    """

    cos_sin: Tensor
    local_cos_sin: Tensor
    no_rope_cos_sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        attend: Attend,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        make_block: MakeBlock | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        make_block = make_block or Block
        self.vocab_size = config.vocab_size
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(
            make_block(config, layer, attend, dtype, device) for layer in range(config.num_layers)
        )
        self.norm = make_norm(config, config.hidden_size, dtype, device)
        self.is_tied = config.tie_word_embeddings
        self.lm_head = self._make_head(config, dtype, device)
        self.register_buffer("cos_sin", make_cos_sin(config, device), persistent=False)
        self.local_rope_layers = config.local_rope_layers
        if config.local_rope_layers:
            self.register_buffer("local_cos_sin", make_cos_sin(config, device, local=True), persistent=False)
        self.no_rope_layers = config.no_rope_layers
        self.layer_groups = config.layer_groups
        if config.no_rope_layers:
            self.register_buffer("no_rope_cos_sin", make_unrotated(config, device), persistent=False)
        self.embedding_scale = None
        if config.embedding_scale is not None:
            self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype, device="cpu").item()
        self.layer_inputs: nn.Module | None = None
        self.logits_divisor = config.logits_divisor
        self.logit_softcap = config.logit_softcap
        self.logits_dtype = dtype if config.logits_dtype is None else getattr(torch, config.logits_dtype)

    def _make_head(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Linear:
        """The output head. If it is tied, its values are the embedding's."""
        sizes = (config.hidden_size, config.vocab_size)
        if not config.tie_word_embeddings:
            return Linear(*sizes, dtype, device, scheme=layer_scheme(config.quantization, "lm_head"))
        head = Linear(*sizes, dtype, torch.device("meta"))
        assert isinstance(head.weight, PlainWeight)
        head.weight.values = self.embed_tokens.weight
        return head

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        logit_index: Tensor | None = None,
        run_block: RunBlock | None = None,
    ) -> Tensor:
        """Logits [N, V]; fills the tokens' slots in the pool.

        Args:
            token_ids: int32 [T], the new tokens of all rows, row after row.
            positions: int32 [T], each token's position in its sequence.
            logit_index: int [N], the tokens (0..T-1) whose logits are returned; None = all.
            run_block: calls a block; a compiled function that all blocks share.
        """
        return self.head(*self.run_blocks(token_ids, positions, inputs, logit_index, run_block))

    def run_blocks(
        self,
        token_ids: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        logit_index: Tensor | None = None,
        run_block: RunBlock | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All layers but the head: x and residual [N, M]; their sum is the residual stream.

        Arguments as `forward`.

        In the last layer, the output projection and the MLP compute only the tokens of `logit_index`. The
        other tokens only need their keys and values stored.
        """
        run_block = run_block or call_block
        x = self.embed_tokens(token_ids)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        residual = torch.zeros_like(x)
        layer_inputs = None if self.layer_inputs is None else self.layer_inputs(token_ids, x)
        for index, layer in enumerate(self.layers):
            cos_sin, own = self._cos_sin_of(index), inputs.of_group(self.layer_groups[index])
            if layer_inputs is not None:
                own = own._replace(layer_input=layer_inputs[index])
            if logit_index is not None and index == len(self.layers) - 1:
                own = own._replace(output_index=logit_index)
            x, residual = run_block(layer, x, residual, positions, cos_sin, own)
        return x, residual

    def _cos_sin_of(self, layer: int) -> Tensor:
        """The table of angles that a layer rotates by."""
        if layer in self.no_rope_layers:
            return self.no_rope_cos_sin
        return self.local_cos_sin if layer in self.local_rope_layers else self.cos_sin

    def head(self, x: Tensor, residual: Tensor) -> Tensor:
        """[N, M] each -> logits [N, V] of `logits_dtype`."""
        x, _ = self.norm.forward_add(x, residual)
        logits = self.lm_head(x)
        if self.logits_divisor is not None:
            logits = logits / self.logits_divisor
        if self.logit_softcap is not None:
            logits = self.logit_softcap * torch.tanh(logits.float() / self.logit_softcap)
        return logits

    def allocate_kv(
        self, num_pages: int | Sequence[int], page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Give every layer a zeroed pool of [P, S, K, D] keys and as many values.

        Args:
            num_pages: of every layer, or of the layers of each group.
        """
        for group, layer in zip(self.layer_groups, self.layers, strict=True):
            pages = num_pages if isinstance(num_pages, int) else num_pages[group]
            for attention in layer.modules():
                if isinstance(attention, Attention):
                    attention.allocate_kv(pages, page_size, dtype, device)

    def allocate_states(
        self, max_rows: int, num_snapshots: int, dtype: torch.dtype, device: torch.device | str
    ) -> StatePool | None:
        """Give the layers of linear attention zeroed states. Returns their pool; None = there are none."""
        layers = self.state_layers()
        return StatePool(layers, max_rows, num_snapshots, dtype, device) if layers else None

    def attention_layers(self) -> list[Attention]:
        """The attention of each block that has one, first to last; it owns its k_cache and v_cache."""
        return [module for module in self.modules() if isinstance(module, Attention)]

    def state_layers(self) -> list[LinearAttention]:
        """The linear attention of each block that has one, first to last; it owns its states."""
        return [module for module in self.modules() if isinstance(module, LinearAttention)]

    def expert_layers(self) -> list[MoeMLP]:
        """The mixture-of-experts layers, first to last."""
        return [module for module in self.modules() if isinstance(module, MoeMLP)]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Views of the parameters to fill, by their names in the checkpoint, which must have them all."""
        return tensors_by_name(self, is_tied=self.is_tied)

    def finish_loading(self) -> None:
        """Called once, after `checkpoint_tensors` are filled."""
        finish_loading(self)


def call_block(
    block: nn.Module,
    x: Tensor,
    residual: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    inputs: AttentionInputs,
) -> tuple[Tensor, Tensor]:
    """Apply a layer's block: x and residual, [T, M] -> [N, M]; their sum is the residual stream."""
    return block(x, residual, positions, cos_sin, inputs)


class Block(nn.Module):
    """Pre-norm attention, or linear attention, and MLP (or experts), whose outputs may be scaled."""

    def __init__(
        self, config: ModelConfig, layer: int, attend: Attend, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.input_layernorm = make_norm(config, config.hidden_size, dtype, device)
        self.self_attn = self.linear_attn = None
        if config.cache_shapes and isinstance(config.cache_shapes[layer], StateShape):
            self.linear_attn = make_linear_attention(config, layer, dtype, device)
        else:
            self.self_attn = SelfAttention(config, layer, attend, dtype, device)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, dtype, device)
        if config.experts is None or layer in config.experts.dense_layers:
            sizes = (config.hidden_size, config.intermediate_size)
            self.mlp = GatedMLP(*sizes, dtype, device, config.quantization, f"model.layers.{layer}.mlp")
        else:
            name = f"model.layers.{layer}.{config.experts.module_name}"
            self.mlp = MoeMLP(config.experts, config.hidden_size, dtype, device, config.quantization, name)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        """x and residual, [T, M] -> [N, M]; their sum is the residual stream."""
        attention = self.linear_attn if self.self_attn is None else self.self_attn
        assert attention is not None
        normed, residual = self.input_layernorm.forward_add_as(x, residual, attention.input_format)
        x = self._scaled(attention(normed, positions, cos_sin, inputs))
        residual, norm = inputs.select_outputs(residual), self.post_attention_layernorm
        if isinstance(self.mlp, MoeMLP):
            slots = inputs.select_outputs(inputs.slot_mapping)
            x, residual = self.mlp.forward_add(x, residual, norm, slots)
        else:
            normed, residual = norm.forward_add_as(x, residual, self.mlp.input_format)
            x = self.mlp(normed)
        return self._scaled(x), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale is None else x * self.residual_scale
