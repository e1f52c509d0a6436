"""The least work of a step: bytes to read and FLOPs to compute.

Promise: each weight, key and value that the step needs counts once, states of linear attention count twice
(read and written), and nothing else counts. In a layer with a window, only the tokens inside the window
count. Of the experts, only those that get a token count. In the last layer, keys and values of all tokens
count, and the other work only for tokens whose logits are needed.
Products of quantized weights count as many FLOPs as others, so a GPU that has a faster rate for them may come
under the floor of a large prefill.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.benchmark.kernels.kernel_timing import Ceilings
from minisgl.engine.model_runner import ModelRunner
from minisgl.model_config.config import ExpertsConfig, ModelConfig
from minisgl.model_config.kv_groups import KVShape, StateShape


class Work(NamedTuple):
    """The least work of a step."""

    num_bytes: float
    flop: float

    def floor_ms(self, ceilings: Ceilings) -> float:
        return 1e-9 * max(self.num_bytes / ceilings.copy_tb_s, self.flop / ceilings.matmul_tflop_s)

    def limit(self, ceilings: Ceilings) -> str:
        """Which of the two limits the step: "memory" or "compute"."""
        by_bytes = self.num_bytes / ceilings.copy_tb_s >= self.flop / ceilings.matmul_tflop_s
        return "memory" if by_bytes else "compute"


class Attending(NamedTuple):
    """A layer with keys and values."""

    window: int  # in tokens; 0 = all
    kv_bytes: int  # of one token
    pair_flop: int  # of one query token and one key token


class Costs(NamedTuple):
    """A model's weights and K/V that steps read."""

    block_parameters: int  # without experts
    head_parameters: int  # without a separate embedding, of which a step reads few rows
    item_bytes: int
    attending: tuple[Attending, ...]
    last_parameters: int = 0  # of the last layer, without its K and V projections and experts
    expert_parameters: int = 0  # one expert in every layer that has experts
    last_expert_parameters: int = 0  # one expert of the last layer
    experts_per_token: int = 0
    saved_bytes: int = 0  # of the blocks' parameters, because they are quantized
    saved_expert_bytes: float = 0  # of one expert in every layer likewise
    state_bytes: int = 0  # of a row's states of linear attention
    state_flop: int = 0  # of a token's reading and writing of them

    def decode(self, batch: int, context: float, experts_hit: float = 0.0) -> Work:
        """A decode step of `batch` rows with `context` tokens each, the new one included.

        Args:
            experts_hit: experts that get at least one token, the mean over layers.
        """
        seen = [batch * min(context, layer.window or context) for layer in self.attending]
        kv_bytes = sum(tokens * layer.kv_bytes for tokens, layer in zip(seen, self.attending, strict=True))
        return Work(
            self._weight_bytes(experts_hit) + kv_bytes + 2 * batch * self.state_bytes,
            batch * (2 * self._parameters_per_token + 2 * self.head_parameters + self.state_flop)
            + sum(tokens * layer.pair_flop for tokens, layer in zip(seen, self.attending, strict=True)),
        )

    def prefill(self, num_tokens: int, prefix: int, experts_hit: float = 0.0) -> Work:
        """A prefill step: `num_tokens` of one prompt after `prefix` tokens, logits of the last token only."""
        seen = np.arange(prefix + 1, prefix + num_tokens + 1)  # by each token in a layer without a window
        attended = [np.minimum(seen, layer.window or seen) for layer in self.attending]
        # In the last layer, only the last token attends.
        attended[-1:] = [counts[-1:] for counts in attended[-1:]]
        pair_flop = sum(
            int(counts.sum()) * layer.pair_flop
            for counts, layer in zip(attended, self.attending, strict=True)
        )
        for_one = self.last_parameters + self.experts_per_token * self.last_expert_parameters
        kv_bytes = sum(
            layer.kv_bytes * (num_tokens + min(prefix, layer.window - 1 if layer.window else prefix))
            for layer in self.attending
        )
        return Work(
            self._weight_bytes(experts_hit) + kv_bytes + self.state_bytes * (1 + (prefix > 0)),
            num_tokens * self.state_flop
            + 2 * num_tokens * (self._parameters_per_token - for_one)
            + 2 * (for_one + self.head_parameters)
            + pair_flop,
        )

    @property
    def _parameters_per_token(self) -> int:
        return self.block_parameters + self.experts_per_token * self.expert_parameters

    def _weight_bytes(self, experts_hit: float) -> float:
        parameters = self.block_parameters + self.head_parameters + experts_hit * self.expert_parameters
        return parameters * self.item_bytes - self.saved_bytes - experts_hit * self.saved_expert_bytes


def costs_of(runner: ModelRunner, config: ModelConfig) -> Costs:
    """The costs of a model, or of one rank's share; `config` must have the rank's sizes."""
    model = runner.model
    embedding = model.embed_tokens.weight
    item_bytes = embedding.element_size()
    cache = model.attention_layers()[0].k_cache
    head = sum(_numbers_in(parameter) for parameter in model.lm_head.parameters())
    is_shared = any(parameter is embedding for parameter in model.lm_head.parameters())
    outside = 0 if is_shared else embedding.numel()
    of_experts = [parameter for layer in model.expert_layers() for parameter in layer.experts.parameters()]
    seen_apart = {id(parameter) for parameter in of_experts}

    def without_experts(module: nn.Module) -> list[Tensor]:
        return [parameter for parameter in module.parameters() if id(parameter) not in seen_apart]

    blocks = sum(_numbers_in(parameter) for parameter in without_experts(model)) - head - outside
    last = sum(_numbers_in(parameter) for parameter in without_experts(model.layers[-1]))
    last_shape = config.layer_shapes[-1]
    if isinstance(last_shape, KVShape):
        projections = 1 if config.num_layers - 1 in config.layers_with_keys_as_values else 2
        last -= projections * last_shape.num_elements // 2 * config.hidden_size
    expert = last_expert = experts_per_token = 0
    saved_expert = 0.0
    if config.experts is not None:
        experts_per_token = config.experts.experts_per_token
        width = 3 * config.hidden_size * config.experts.intermediate_size
        expert = width * len(model.expert_layers())
        last_expert = width if config.num_layers - 1 not in config.experts.dense_layers else 0
        of_one = sum(parameter.nbytes for parameter in of_experts) / config.experts.num_experts
        if model.expert_layers()[0].has_shared_among_experts:
            of_one *= config.experts.num_experts / (config.experts.num_experts + 1)
            blocks, last = blocks + expert, last + last_expert
        saved_expert = expert * item_bytes - of_one
    states = [shape for shape in config.cache_shapes if isinstance(shape, StateShape)]
    return Costs(
        block_parameters=blocks,
        head_parameters=head,
        item_bytes=item_bytes,
        attending=tuple(
            Attending(
                config.windows[layer] if config.windows else 0,
                shape.num_elements * cache.element_size(),
                4 * config.num_heads * shape.head_dim,
            )
            for layer, shape in enumerate(config.layer_shapes)
            if isinstance(shape, KVShape)
        ),
        last_parameters=last,
        expert_parameters=expert,
        last_expert_parameters=last_expert,
        experts_per_token=experts_per_token,
        saved_bytes=sum(
            _numbers_in(parameter) * item_bytes - parameter.nbytes
            for parameter in without_experts(model.layers)
            if parameter.element_size() < item_bytes
        ),
        saved_expert_bytes=saved_expert,
        state_bytes=sum(shape.num_bytes(item_bytes) for shape in states),
        # The products of the state with k and with q, and of what is written with k.
        state_flop=sum(6 * shape.num_heads * shape.key_dim * shape.value_dim for shape in states),
    )


def _numbers_in(parameter: Tensor) -> int:
    """Its elements; two in a byte of packed 4-bit numbers."""
    return parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1)


def expected_experts_hit(config: ModelConfig, num_tokens: int, num_at_last: int) -> float:
    """The expected `experts_hit` if the router chose experts at random; 0 without experts.

    Args:
        num_at_last: tokens that go through the last layer's experts.
    """
    experts = config.experts
    if experts is None:
        return 0.0
    at_layer = [num_tokens] * (config.num_layers - 1) + [num_at_last]
    missed_by_one = 1 - experts.experts_per_token / experts.num_experts
    hit = [
        experts.num_experts * (1 - missed_by_one**count)
        for layer, count in enumerate(at_layer)
        if layer not in experts.dense_layers
    ]
    return sum(hit) / len(hit)


def experts_hit(runner: ModelRunner, run: Callable[[], object]) -> float:
    """Run `run`, which must call the model uncompiled, and count the experts of a layer that get a token.

    Returns the mean over layers and calls, without padding tokens; 0 without experts.
    """
    counts: list[int] = []

    def count(config: ExpertsConfig, experts: nn.Module, arguments: tuple[Any, ...]) -> None:
        logits, top_k = arguments[1][:, : config.num_experts], arguments[2]  # without a shared one's gate
        routed = logits[logits.amax(1) > float("-inf")]
        counts.append(routed.topk(top_k, dim=1).indices.unique().numel())

    layers = runner.model.expert_layers()
    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.experts.register_forward_pre_hook(partial(count, layer.config)).remove)
        if layers:
            run()
    return sum(counts) / len(counts) if counts else 0.0
