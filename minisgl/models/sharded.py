"""One rank's part of a model: its layers' shares, and the places where ranks add up or gather.

Promise: with the same tokens, every rank's forward pass returns the whole model's logits, all the same. What
a step computes with are plain tensors, the local parts of the DTensors that a checkpoint is loaded into.

T tokens, R rows, V vocabulary, M model width.
"""

from functools import partial

import torch
from torch import Tensor, nn

from minisgl.config import ModelConfig
from minisgl.layers.moe import MoeMLP
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.parallel.collectives import all_gather, all_reduce_
from minisgl.parallel.mesh import Ranks
from minisgl.parallel.placements import Split, place_tensors, plan_for
from minisgl.parallel.sizes import vocabulary_rows


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
    add_up = partial(_add_up, ranks.group)
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if isinstance(module, MoeMLP) or plan.get(leaf) is Split.ROWWISE:
            module.register_forward_hook(add_up)
    model.add_module("embed_tokens", SharedEmbedding(model.embed_tokens, config.vocab_size, ranks))
    model.add_module("lm_head", SharedHead(model.lm_head, config.vocab_size, ranks))
    model.vocab_size = config.vocab_size
    return ShardedTensors(model, tensors)


class SharedEmbedding(nn.Module):
    """The embedding of which each rank has some rows: the others' tokens give zeros, which are added up."""

    def __init__(self, shard: nn.Module, vocab_size: int, ranks: Ranks) -> None:
        super().__init__()
        num_rows = vocabulary_rows(vocab_size, ranks.size)
        self.shard = shard
        self.first = ranks.rank * num_rows
        self.num_rows = num_rows
        self.group = ranks.group

    def forward(self, token_ids: Tensor) -> Tensor:
        """int32 or int64 [T] -> [T, M]."""
        places = token_ids - self.first
        elsewhere = (places < 0) | (places >= self.num_rows)
        x = self.shard(places.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(1), 0)
        all_reduce_(x, self.group)
        return x


class SharedHead(nn.Module):
    """The head of which each rank has some rows: the ranks' logits are gathered, without the padding."""

    def __init__(self, shard: nn.Module, vocab_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.shard = shard
        self.vocab_size = vocab_size
        self.size = ranks.size
        self.group = ranks.group

    def forward(self, x: Tensor) -> Tensor:
        """[R, M] -> [R, V], rows strided."""
        return all_gather(self.shard(x), self.size, self.group)[:, : self.vocab_size]


def _add_up(group: str, module: nn.Module, args: object, output: Tensor) -> None:
    all_reduce_(output, group)
