"""One rank's part of a model: its parameters as shards, and the collectives between the layers.

Promise: for the same tokens, every rank's forward pass returns the same logits, those of the whole model. A
step computes with plain tensors: the local parts of the DTensors that the loader fills.

T tokens, R rows, V vocabulary, M model width.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.layers.embedding import Embedding
from minisgl.layers.linear import AnyWeight, Linear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.weight import InputFormat
from minisgl.model_config.config import ModelConfig
from minisgl.models.decoder import Block, Decoder
from minisgl.models.registry import build_model
from minisgl.parallel.collectives import RankSum, all_gather
from minisgl.parallel.mesh import Ranks
from minisgl.parallel.placements import Split, place_tensors, plan_for
from minisgl.parallel.sizes import vocabulary_rows
from triton_kernels.registry import KERNELS


class ShardedTensors:
    """The checkpoint's tensors as DTensors over the model's own memory, for `load_weights`."""

    def __init__(self, model: Decoder, tensors: dict[str, Tensor]) -> None:
        self._model = model
        self._tensors = tensors

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """DTensors of the checkpoint's shapes, by the checkpoint's names."""
        return self._tensors

    def finish_loading(self) -> None:
        """Call the model's `finish_loading`."""
        self._model.finish_loading()


def shard_model(model: Decoder, config: ModelConfig, ranks: Ranks) -> ShardedTensors:
    """Insert the collectives into a rank's part of a model, from `build_model(..., tp=ranks.size)`.

    Call it once, before loading and tracing.

    Args:
        config: the config of the whole model.

    Raises:
        ConfigError: the family has no plan.
    """
    plan = plan_for(config.architecture)
    whole = build_model(config, attention_backend="torch", dtype=torch.float32, device="meta")
    shapes = {name: tensor.shape for name, tensor in whole.checkpoint_tensors().items()}
    tensors = place_tensors(model.checkpoint_tensors(), shapes, plan, config.num_kv_heads, ranks)
    rank_sum = RankSum(ranks)
    norms_add = all(isinstance(layer, Block) for layer in model.layers)
    eps = config.rms_norm_eps if norms_add else None  # a constant of the compiled kernel
    rank_sum.prepare(ranks, config.hidden_size, model.embed_tokens.weight.dtype, eps=eps)
    if norms_add:
        # Each sharded output goes directly into a norm that adds it to the residual.
        _wrap(model, RMSNorm, SUMMING_NORMS, partial(SummingNorm, rank_sum=rank_sum))
        embedding = ShardedEmbedding(model.embed_tokens, config.vocab_size, ranks, None)
    else:
        rowwise = {name for name, split in plan.items() if split is Split.ROWWISE}
        _wrap(model, Linear, rowwise, partial(SummedLayer, rank_sum=rank_sum))
        embedding = ShardedEmbedding(model.embed_tokens, config.vocab_size, ranks, rank_sum)
    if config.qk_norm_of_all_heads:
        _wrap(model, RMSNorm, {"q_norm", "k_norm"}, partial(SplitNorm, ranks=ranks))
    model.add_module("embed_tokens", embedding)
    model.add_module("lm_head", ShardedHead(model.lm_head, config.vocab_size, ranks))
    model.vocab_size = config.vocab_size
    return ShardedTensors(model, tensors)


SUMMING_NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}
"""Norms of a `Decoder` with `Block`s that take the output of attention, MLP or embedding."""


def _wrap(
    model: nn.Module, kind: type[nn.Module], names: Collection[str], wrap: Callable[[Any], nn.Module]
) -> None:
    """Replace each module of this kind with one of these names by `wrap(module)`."""
    for outer in list(model.modules()):
        for name, module in list(outer.named_children()):
            if name in names and isinstance(module, kind):
                outer.add_module(name, wrap(module))


class SummingNorm(nn.Module):
    """A norm that first sums x over the ranks."""

    def __init__(self, norm: RMSNorm, rank_sum: RankSum) -> None:
        super().__init__()
        self.norm = norm
        self.rank_sum = rank_sum

    def forward_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(sum of x + residual), sum of x + residual), each [T, M]; overwrites x."""
        if self.norm.kernels.add_rms_norm is not KERNELS.add_rms_norm:  # the user has replaced the op
            return self.norm.forward_add(self.rank_sum(x), residual)
        return self.rank_sum.norm(x, residual, self.norm.weight, self.norm.eps)

    def forward_add_as(self, x: Tensor, residual: Tensor, wanted: InputFormat) -> tuple[Tensor, Tensor]:
        """`forward_add`: the sum's kernel emits plain rows, and the next layer rounds them itself."""
        return self.forward_add(x, residual)


class SplitNorm(nn.Module):
    """A norm of elements that are split among the ranks; heads that ranks share are on equally many."""

    def __init__(self, norm: RMSNorm, ranks: Ranks) -> None:
        super().__init__()
        self.norm = norm
        self.size = ranks.size
        self.group = ranks.group

    @property
    def weight(self) -> Tensor:
        """This rank's elements."""
        return self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the normalised rows, of x's shape [T, M / ranks]."""
        values = x.float()
        means = all_gather(values.square().mean(1, keepdim=True), self.size, self.group)
        scale = torch.rsqrt(means.mean(1, keepdim=True) + self.norm.eps)
        return (values * scale * self.norm.weight.float()).to(x.dtype)


class SummedLayer(nn.Module):
    """A layer that is split by input features: the ranks' outputs are summed."""

    def __init__(self, part: nn.Module, rank_sum: RankSum) -> None:
        super().__init__()
        self.part = part
        self.rank_sum = rank_sum

    @property
    def input_format(self) -> InputFormat:
        """What `forward` takes beside plain rows: nothing, so that the part rounds its own columns."""
        return InputFormat.PLAIN

    def forward(self, x: Tensor) -> Tensor:
        """The output [T, M] of the whole layer."""
        return self.rank_sum(self.part(x))


class ShardedEmbedding(nn.Module):
    """An embedding whose rows are split among the ranks. Tokens of other ranks' rows give zeros.

    Args:
        rank_sum: sums the ranks' outputs; None = the next layer does.
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


class ShardedHead(nn.Module):
    """An output head whose rows are split among the ranks; gathers the logits and drops the padding."""

    def __init__(self, shard: Linear, vocab_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.shard = shard
        self.vocab_size = vocab_size
        self.size = ranks.size
        self.group = ranks.group

    @property
    def weight(self) -> AnyWeight:
        """This rank's rows."""
        return self.shard.weight

    def forward(self, x: Tensor) -> Tensor:
        """[R, M] -> [R, V], rows strided."""
        return all_gather(self.shard(x), self.size, self.group)[:, : self.vocab_size]
