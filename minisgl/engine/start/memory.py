"""Sizes the KV pool from the memory that the rest of the engine leaves.

Promise: the pool fits. Its size is the available memory minus weights, the activations of the largest step,
the device tables, and a reserve for graphs and libraries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from minisgl.attention.choice import TRITON, WINDOW_TILE_TOKENS, parse
from minisgl.config import GIB, MIB, ResolvedConfig
from minisgl.engine.graphs.buckets import buckets_of
from minisgl.engine.start.pool_division import (
    PoolLimits,
    PoolPart,
    cache_groups,
    check_parts,
    divide_pool,
    pages_beside,
)
from minisgl.engine.step.logits import SLICE_ROWS, LogitTables
from minisgl.errors import ConfigError
from minisgl.model_config.config import DTYPE_BYTES, FP8_CACHE, ModelConfig

CPU_POOL_BYTES = 1 * GIB
LIBRARY_RESERVE_BYTES = GIB // 2
"""Reserve on CUDA for memory that libraries allocate on first use."""
GRAPH_BYTES = 24 * MIB
"""Reserve for each recorded graph. Published measurements are 6 to 26 MiB."""

SNAPSHOT_SHARE = 0.3
"""Most of what is free for the KV pool that snapshots of states get if --state-cache-memory does not say."""
SNAPSHOTS_PER_ROW = 8
"""Most snapshots for each running request, if --state-cache-memory does not say."""

SLICE_BYTES_PER_LOGIT = 12
"""Intermediates of `pack_logprobs` per logit of a slice: two float32, then one beside a flag and what topk
counts."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The parts of the device's memory, in bytes. Their sum is at most `available_bytes`."""

    available_bytes: int
    """Memory that the engine may use: memory_fraction of the memory that was free before the start."""
    weights_bytes: int
    activation_bytes: int
    """Peak of the largest prefill step, without weights."""
    tables_bytes: int
    states_bytes: int = 0
    """The states of all rows, in layers of linear attention."""
    snapshot_bytes: int = 0
    """One snapshot of a row's states."""
    num_snapshots: int = 0
    reserve_bytes: int
    """Reserve for recorded graphs, for steps with penalties or log probabilities, and for libraries."""
    parts: tuple[PoolPart, ...]
    """The KV pool; most models have one group of layers."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in the first group: keys and values of page_size tokens in its layers."""
        return self.parts[0].page_bytes

    @property
    def num_pages(self) -> int:
        """Pages of the first group, its scratch page included."""
        return self.parts[0].num_pages

    @property
    def pool_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def describe(self) -> str:
        """Describe the budget in one line for the log."""
        return (
            f"weights {self.weights_bytes / GIB:.2f} GiB, KV pool {self.pool_bytes / GIB:.2f} GiB "
            f"({describe_parts(self.parts)}), activations {self.activation_bytes / GIB:.2f} GiB, "
            f"tables {self.tables_bytes / MIB:.1f} MiB, {self._describe_states()}"
            f"reserve {self.reserve_bytes / GIB:.2f} GiB "
            f"of {self.available_bytes / GIB:.2f} GiB"
        )

    def _describe_states(self) -> str:
        if not self.states_bytes:
            return ""
        snapshots = f"{self.num_snapshots} snapshots {self.num_snapshots * self.snapshot_bytes / GIB:.2f} GiB"
        return f"states {self.states_bytes / GIB:.2f} GiB, {snapshots}, "


def describe_parts(parts: Sequence[PoolPart]) -> str:
    """Pages of each group, for example "900 pages" or "900 pages, windows of 512 tokens 200 pages"."""
    return ", ".join(
        f"windows of {part.window} tokens {part.num_pages} pages"
        if part.window
        else f"{part.num_pages} pages"
        for part in parts
    )


def module_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers. Shared ones count once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_weights_fit(weights_bytes: int, available_bytes: int, config: ResolvedConfig) -> None:
    """Refuse a model that is too large before anything is allocated.

    Raises:
        ConfigError: the weights alone take more than the engine may use.
    """
    if weights_bytes > available_bytes:
        raise ConfigError(
            f"the weights take {weights_bytes / GIB:.2f} GiB in {config.dtype}, but the engine may use "
            f"{available_bytes / GIB:.2f} GiB; use a smaller model or dtype, or raise --memory-fraction "
            f"({config.memory_fraction})"
        )


def row_state_bytes(model: ModelConfig, config: ResolvedConfig) -> int:
    """Bytes of a row's states, and of a snapshot; 0 for models without linear attention."""
    return sum(group.state_bytes(DTYPE_BYTES[config.dtype]) for group in model.kv_groups)


def states_bytes(model: ModelConfig, config: ResolvedConfig) -> int:
    """Bytes of the states of all rows, and of padding rows; 0 for models without linear attention."""
    return (config.max_running_requests + 1) * row_state_bytes(model, config)


def count_snapshots(model: ModelConfig, config: ResolvedConfig, free_bytes: int, pool_bytes: int = 0) -> int:
    """How many snapshots of rows' states there are, if they and the KV pool may take `free_bytes`.

    Args:
        pool_bytes: of the pages that --num-pages asks for, which snapshots leave free unless they are asked
            for, too.

    Raises:
        ConfigError: --state-cache-memory is more than that.
    """
    each = row_state_bytes(model, config)
    if not each or not config.prefix_cache:
        return 0
    if config.state_cache_memory is None:
        most_bytes = min(int(free_bytes * SNAPSHOT_SHARE), free_bytes - pool_bytes)
        return max(0, min(most_bytes // each, SNAPSHOTS_PER_ROW * config.max_running_requests))
    wanted_bytes = int(config.state_cache_memory * GIB)
    if wanted_bytes >= max(free_bytes, 1):
        raise ConfigError(
            f"--state-cache-memory {config.state_cache_memory:g} leaves nothing of the "
            f"{max(free_bytes, 0) / GIB:.2f} GiB that are free for keys and values; lower it"
        )
    return wanted_bytes // each


def _states_settings(config: ResolvedConfig) -> str:
    """The settings to lower where states leave no memory for a pool, for a list of such settings."""
    rows = f"lower --max-running-requests ({config.max_running_requests}), "
    snapshots = config.state_cache_memory
    return rows if snapshots is None else f"{rows}--state-cache-memory ({snapshots:g}), "


def check_states_fit(
    model: ModelConfig, config: ResolvedConfig, weights_bytes: int, available_bytes: int
) -> None:
    """Refuse more rows than there is memory for their states, before anything is allocated.

    Raises:
        ConfigError: the weights and the states take more than the engine may use.
    """
    needed = states_bytes(model, config)
    if needed and weights_bytes + needed > available_bytes:
        fitting = (available_bytes - weights_bytes) * (config.max_running_requests + 1) // needed - 1
        advice = f"lower --max-running-requests, below {fitting}"
        if fitting < 2:
            advice = f"use a smaller model, or raise --memory-fraction ({config.memory_fraction})"
        raise ConfigError(
            f"the states of {config.max_running_requests} requests take {needed / GIB:.2f} GiB beside "
            f"{weights_bytes / GIB:.2f} GiB of weights, but the engine may use {available_bytes / GIB:.2f} "
            f"GiB; {advice}"
        )


def estimate_activation_bytes(model: ModelConfig, config: ResolvedConfig, num_tokens: int) -> int:
    """Upper estimate of a step's activations, for devices where they can't be measured."""
    per_token = 8 * model.hidden_size + 3 * model.mlp_elements_per_token
    logits_bytes = config.max_running_requests * model.vocab_size * _logit_bytes(model, config)
    return DTYPE_BYTES[config.dtype] * num_tokens * per_token + 3 * logits_bytes


def graph_reserve_bytes(config: ResolvedConfig) -> int:
    """Reserve on CUDA for recorded graphs and libraries, without the activations of recorded steps."""
    return LIBRARY_RESERVE_BYTES + GRAPH_BYTES * buckets_of(config).num_graphs


def logit_extras_bytes(model: ModelConfig, config: ResolvedConfig) -> int:
    """Most memory on CUDA of the sampling of steps with penalties, biases, bans or log probabilities.

    It is the sum of their tables, which the engine allocates when the first such request comes (with several
    ranks, at the start), of copies of the logits, and of x and the residual of prompts whose log
    probabilities are wanted. Other prompts do not keep the latter two until the head.
    """
    num_rows = config.max_running_requests
    tables = LogitTables(num_rows, model.vocab_size, torch.device("meta"))
    stream_bytes = 2 * config.max_step_tokens * model.hidden_size * DTYPE_BYTES[config.dtype]
    return tables.num_bytes + _rules_bytes(model, config, num_rows) + stream_bytes


def _rules_bytes(model: ModelConfig, config: ResolvedConfig, num_rows: int) -> int:
    """Copies of the logits of `num_rows` rows (those that wait for masks, after rules, after masks), and the
    float32 intermediates of one slice of them."""
    logits_bytes = num_rows * model.vocab_size * _logit_bytes(model, config)
    slice_bytes = min(SLICE_ROWS, num_rows) * model.vocab_size * SLICE_BYTES_PER_LOGIT
    return 3 * logits_bytes + slice_bytes


def _logit_bytes(model: ModelConfig, config: ResolvedConfig) -> int:
    return DTYPE_BYTES[model.logits_dtype or config.dtype]


def pool_limits(config: ResolvedConfig) -> PoolLimits:
    """What the settings ask of the pool."""
    return PoolLimits(
        config.page_size,
        config.max_context_tokens,
        config.max_running_requests,
        config.max_step_tokens,
        WINDOW_TILE_TOKENS if TRITON in parse(config.attention_backend) else 1,
    )


def plan_memory(
    model: ModelConfig,
    config: ResolvedConfig,
    *,
    available_bytes: int,
    weights_bytes: int,
    activation_bytes: int,
    tables_bytes: int,
    reserve_bytes: int,
) -> MemoryBudget:
    """Size the pool, or check that the pages of --num-pages fit.

    Raises:
        ConfigError: the pool would be too small for one request, or larger than the free memory.
    """
    on_cuda = config.device == "cuda"
    element_bytes = 1 if config.kv_dtype == FP8_CACHE else DTYPE_BYTES[config.dtype]
    groups = cache_groups(model.kv_groups, config.keep_window_pages)
    windows = [group.window for group in groups]
    page_bytes = [group.elements_per_token * config.page_size * element_bytes for group in groups]
    limits = pool_limits(config)
    of_states = states_bytes(model, config)
    free_bytes = available_bytes - weights_bytes - activation_bytes - tables_bytes - reserve_bytes - of_states
    if not on_cuda and config.num_pages is None:
        free_bytes = min(free_bytes, CPU_POOL_BYTES + int((config.state_cache_memory or 0) * GIB))
    asked_pages = None
    needed_bytes = 0
    if config.num_pages is not None:
        asked_pages = pages_beside(config.num_pages, page_bytes, windows, limits)
        needed_bytes = sum(pages * size for pages, size in zip(asked_pages, page_bytes, strict=True))
    num_snapshots = count_snapshots(model, config, free_bytes, needed_bytes)
    free_bytes -= num_snapshots * row_state_bytes(model, config)
    if config.num_pages is not None and asked_pages is not None:
        num_pages = asked_pages
        if needed_bytes > free_bytes:
            fitting = int(config.num_pages * max(free_bytes, 0) / needed_bytes)
            raise ConfigError(
                f"--num-pages {config.num_pages} needs {needed_bytes / GIB:.2f} GiB, "
                f"but {fitting} pages fit; "
                f"lower it, or raise --memory-fraction ({config.memory_fraction})"
            )
    else:
        # Twice the pages of all rows at full length: half for running requests, half for the prefix cache.
        num_pages = divide_pool(free_bytes, page_bytes, windows, limits)
    if config.num_pages is not None and (num_pages[0] - 1) * config.page_size < 2:
        raise ConfigError(
            f"--num-pages {config.num_pages} of {config.page_size} tokens can't hold a request: one page is "
            "scratch, and a request needs at least 2 tokens"
        )
    if min(num_pages) < 2 or (num_pages[0] - 1) * config.page_size < 2:
        raise ConfigError(
            f"no memory is left for the KV cache: of {available_bytes / GIB:.2f} GiB the weights take "
            f"{weights_bytes / GIB:.2f} and the largest step {activation_bytes / GIB:.2f}; raise "
            f"--memory-fraction ({config.memory_fraction}), lower --max-step-tokens "
            f"({config.max_step_tokens}), {_states_settings(config) if of_states else ''}"
            "or use a smaller model"
        )
    parts = tuple(map(PoolPart, windows, page_bytes, num_pages))
    check_parts(parts, limits)
    return MemoryBudget(
        available_bytes=available_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        tables_bytes=tables_bytes,
        states_bytes=of_states,
        snapshot_bytes=row_state_bytes(model, config),
        num_snapshots=num_snapshots,
        reserve_bytes=reserve_bytes,
        parts=parts,
    )
