"""How much memory the KV pool may take: profile the largest step, then a budget that adds up.

Promise: what the budget promises is there: the pool is sized from what is left after weights, the
largest step's activations, the device tables and a reserve for graphs were taken off.
"""

from dataclasses import dataclass

import torch
from torch import nn

from minisgl.config import GIB, MIB, ResolvedConfig
from minisgl.engine.logits import SLICE_ROWS, LogitTables
from minisgl.errors import ConfigError
from minisgl.model_config import DTYPE_BYTES, ModelConfig

CPU_POOL_BYTES = 1 * GIB
LIBRARY_RESERVE_BYTES = GIB // 2
"""Kept free on CUDA for what the libraries take on first use."""
GRAPH_BYTES = 24 * MIB
"""Kept free for each recorded graph (measured by others: 6 to 26 MiB)."""

SLICE_BYTES_PER_LOGIT = 40
"""Intermediates of `LogitTables.ruled` and `pack_logprobs` per logit of a slice, about ten in float32."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Where the device's memory goes, in bytes; the parts add up to `available_bytes` or less."""

    available_bytes: int
    """What the engine may take: memory_fraction of what was free before it started."""
    weights_bytes: int
    activation_bytes: int
    """Peak of the largest prefill step beyond weights."""
    tables_bytes: int
    reserve_bytes: int
    """For recorded graphs and their memory, steps with penalties or log probabilities, and the libraries."""
    page_bytes: int
    num_pages: int

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"weights {self.weights_bytes / GIB:.2f} GiB, KV pool {self.pool_bytes / GIB:.2f} GiB "
            f"({self.num_pages} pages), activations {self.activation_bytes / GIB:.2f} GiB, "
            f"tables {self.tables_bytes / MIB:.1f} MiB, reserve {self.reserve_bytes / GIB:.2f} GiB "
            f"of {self.available_bytes / GIB:.2f} GiB"
        )


def bytes_of(module: nn.Module) -> int:
    """Parameters and buffers, shared ones once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_weights_fit(weights_bytes: int, available_bytes: int, config: ResolvedConfig) -> None:
    """Refuse a model that is too large before anything is allocated.

    Raises:
        ConfigError: weights alone take more than the engine may have.
    """
    if weights_bytes > available_bytes:
        raise ConfigError(
            f"the weights take {weights_bytes / GIB:.2f} GiB in {config.dtype}, but the engine may use "
            f"{available_bytes / GIB:.2f} GiB; use a smaller model or dtype, or raise --memory-fraction "
            f"({config.memory_fraction})"
        )


def estimate_activation_bytes(model: ModelConfig, config: ResolvedConfig, num_tokens: int) -> int:
    """What a step of so many tokens takes beyond weights, pool and tables, generously, where it can't be
    measured."""
    per_token = 8 * model.hidden_size + 3 * model.mlp_elements_per_token
    logits = 3 * config.max_running_requests * model.vocab_size
    return DTYPE_BYTES[config.dtype] * (num_tokens * per_token + logits)


def graph_reserve_bytes(num_graphs: int) -> int:
    """Kept free on CUDA for recorded graphs and the libraries."""
    return LIBRARY_RESERVE_BYTES + GRAPH_BYTES * num_graphs


def special_steps_bytes(model: ModelConfig, config: ResolvedConfig) -> int:
    """What steps with penalties, biases, bans or log probabilities take, at most.

    That is their tables, which are allocated when the first such request comes, copies of the logits, and of
    prompts whose log probabilities are wanted x and the residual, which others do not keep until the head.
    """
    num_rows = config.max_running_requests
    tables = LogitTables(num_rows, model.vocab_size, torch.device("meta"))
    logits_bytes = num_rows * model.vocab_size * DTYPE_BYTES[config.dtype]
    slice_bytes = min(SLICE_ROWS, num_rows) * model.vocab_size * SLICE_BYTES_PER_LOGIT
    stream_bytes = 2 * config.max_step_tokens * model.hidden_size * DTYPE_BYTES[config.dtype]
    return bytes_of(tables) + 2 * logits_bytes + slice_bytes + stream_bytes


def page_bytes(model: ModelConfig, config: ResolvedConfig) -> int:
    """Bytes of one page: K and V of page_size tokens in all layers."""
    return model.kv_elements_per_token * config.page_size * DTYPE_BYTES[config.dtype]


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
    """Size the pool, or check the --num-pages that was asked for.

    Raises:
        ConfigError: the pool would hold too little to serve one request, or more than there is.
    """
    on_cuda = config.device == "cuda"
    one_page = page_bytes(model, config)
    free_bytes = available_bytes - weights_bytes - activation_bytes - tables_bytes - reserve_bytes
    fitting = max(free_bytes, 0) // one_page
    if config.num_pages is not None:
        num_pages = config.num_pages
        if num_pages > fitting:
            raise ConfigError(
                f"--num-pages {num_pages} needs {num_pages * one_page / GIB:.2f} GiB, "
                f"but {fitting} pages fit; "
                f"lower it, or raise --memory-fraction ({config.memory_fraction})"
            )
    else:
        num_pages = fitting
        if not on_cuda:
            num_pages = min(num_pages, CPU_POOL_BYTES // one_page)
        # More than every row at full length is of no use, with as much again for the prefix cache.
        pages_per_row = -(-config.max_context_tokens // config.page_size)
        num_pages = min(num_pages, 2 * config.max_running_requests * pages_per_row + 1)
    if config.num_pages is not None and (num_pages - 1) * config.page_size < 2:
        raise ConfigError(
            f"--num-pages {num_pages} of {config.page_size} tokens can't hold a request: one page is "
            "scratch, and a request needs at least 2 tokens"
        )
    if (num_pages - 1) * config.page_size < 2:
        raise ConfigError(
            f"no memory is left for the KV cache: of {available_bytes / GIB:.2f} GiB the weights take "
            f"{weights_bytes / GIB:.2f} and the largest step {activation_bytes / GIB:.2f}; raise "
            f"--memory-fraction ({config.memory_fraction}), lower --max-step-tokens "
            f"({config.max_step_tokens}), or use a smaller model"
        )
    return MemoryBudget(
        available_bytes=available_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        tables_bytes=tables_bytes,
        reserve_bytes=reserve_bytes,
        page_bytes=one_page,
        num_pages=num_pages,
    )
