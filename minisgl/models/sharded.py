"""One rank's part of a model: its layers' shares, and the places where ranks add up or gather.

Promise: with the same tokens, every rank's forward pass returns the whole model's logits, all the same. What
a step computes with are plain tensors, the local parts of the DTensors that a checkpoint is loaded into.

T tokens, R rows, V vocabulary, M model width.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.layers.embedding import Embedding
from minisgl.layers.linear import Linear
from minisgl.layers.norm import RMSNorm
from minisgl.model_config import ModelConfig
from minisgl.models.decoder import Block, Decoder
from minisgl.models.registry import build_model
from minisgl.parallel.collectives import RankSum, all_gather
from minisgl.parallel.mesh import Ranks
from minisgl.parallel.placements import Split, place_tensors, plan_for
from minisgl.parallel.sizes import vocabulary_rows
from triton_kernels.registry import KERNELS


class ShardedTensors:
    """What `load_weights` fills: the checkpoint's tensors as DTensors over the model's own memory."""

    def __init__(self, model: Decoder, tensors: dict[str, Tensor]) -> None:
        self._model = model
        self._tensors = tensors

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """By the checkpoint's name, in the checkpoint's shape."""
        return self._tensors

    def loaded(self) -> None:
        """As the model's."""
        self._model.loaded()


def share_out(model: Decoder, config: ModelConfig, ranks: Ranks) -> ShardedTensors:
    """Join the parts of a model that each rank built with `build_model(..., tp=ranks.size)`.

    Call it once, before loading and before anything is traced.

    Args:
        config: of the whole model.

    Raises:
        ConfigError: the family has no plan.
    """
    plan = plan_for(config.architecture)
    whole = build_model(config, attention_backend="torch", dtype=torch.float32, device="meta")
    shapes = {name: tensor.shape for name, tensor in whole.checkpoint_tensors().items()}
    tensors = place_tensors(model.checkpoint_tensors(), shapes, plan, config.num_kv_heads, ranks)
    rank_sum = RankSum(ranks)
    norms_add = all(isinstance(layer, Block) for layer in model.layers)
    eps = config.rms_norm_eps if norms_add else None  # a number of the compiled kernel
    rank_sum.prepare(ranks, config.hidden_size, model.embed_tokens.weight.dtype, eps=eps)
    if norms_add:
        # Whatever is shared out goes straight into a norm that adds it to the residual.
        _wrap(model, RMSNorm, NORMS_THAT_ADD, partial(SummingNorm, rank_sum=rank_sum))
        embedding = SharedEmbedding(model.embed_tokens, config.vocab_size, ranks, None)
    else:
        rowwise = {name for name, split in plan.items() if split is Split.ROWWISE}
        _wrap(model, Linear, rowwise, partial(SummedLayer, rank_sum=rank_sum))
        embedding = SharedEmbedding(model.embed_tokens, config.vocab_size, ranks, rank_sum)
    model.add_module("embed_tokens", embedding)
    model.add_module("lm_head", SharedHead(model.lm_head, config.vocab_size, ranks))
    model.vocab_size = config.vocab_size
    return ShardedTensors(model, tensors)


NORMS_THAT_ADD = {"input_layernorm", "post_attention_layernorm", "norm"}
"""The norms of a `Decoder` of `Block`s that take what attention, MLP or embedding yield."""


def _wrap(
    model: nn.Module, kind: type[nn.Module], names: Collection[str], wrap: Callable[[Any], nn.Module]
) -> None:
    """Put `wrap(module)` in place of each module of this kind and one of these names."""
    for outer in list(model.modules()):
        for name, module in list(outer.named_children()):
            if name in names and isinstance(module, kind):
                outer.add_module(name, wrap(module))


class SummingNorm(nn.Module):
    """A norm that first adds up what the ranks have."""

    def __init__(self, norm: RMSNorm, rank_sum: RankSum) -> None:
        super().__init__()
        self.norm = norm
        self.rank_sum = rank_sum

    def forward_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(sum of x + residual), sum of x + residual), each [T, M]; x is lost."""
        if self.norm.kernels.add_rms_norm is not KERNELS.add_rms_norm:  # somebody's own, for an experiment
            return self.norm.forward_add(self.rank_sum(x), residual)
        return self.rank_sum.norm(x, residual, self.norm.weight, self.norm.eps)


class SummedLayer(nn.Module):
    """A layer of which each rank has a part: what they yield is added up."""

    def __init__(self, part: nn.Module, rank_sum: RankSum) -> None:
        super().__init__()
        self.part = part
        self.rank_sum = rank_sum

    def forward(self, x: Tensor) -> Tensor:
        """As the layer: [T, M] of all ranks."""
        return self.rank_sum(self.part(x))


class SharedEmbedding(nn.Module):
    """The embedding of which each rank has some rows: the others' tokens give zeros.

    Args:
        rank_sum: adds the ranks' up; None = whatever comes next does.
    """

    def __init__(self, shard: Embedding, vocab_size: int, ranks: Ranks, rank_sum: RankSum | None) -> None:
        super().__init__()
        num_rows = vocabulary_rows(vocab_size, ranks.size)
        self.shard = shard
        self.first = ranks.rank * num_rows
        self.num_rows = num_rows
        self.rank_sum = rank_sum

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.shard.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """int32 or int64 [T] -> [T, M]."""
        places = token_ids - self.first
        inside = places.clamp(0, self.num_rows - 1)
        x = torch.where((places == inside).unsqueeze(1), self.shard(inside), 0)
        return x if self.rank_sum is None else self.rank_sum(x)


class SharedHead(nn.Module):
    """The head of which each rank has some rows: the ranks' logits are gathered, without the padding."""

    def __init__(self, shard: Linear, vocab_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.shard = shard
        self.vocab_size = vocab_size
        self.size = ranks.size
        self.group = ranks.group

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.shard.weight

    def forward(self, x: Tensor) -> Tensor:
        """[R, M] -> [R, V], rows strided."""
        return all_gather(self.shard(x), self.size, self.group)[:, : self.vocab_size]
