"""`minisgl plan`: computes how many requests of a model fit on a GPU, from its config.json alone.

Promise: the arithmetic is the engine's own (`minisgl/engine/start/memory.py`). Only activations, which the
engine measures, are estimated here. The GPU's memory comes from a table or from the user.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from minisgl.config import GIB, MIB, DeviceFacts, EngineConfig, ResolvedConfig, resolve_engine_config
from minisgl.engine.start.memory import (
    MemoryBudget,
    check_states_fit,
    check_weights_fit,
    estimate_activation_bytes,
    graph_reserve_bytes,
    logit_extras_bytes,
    module_bytes,
    plan_memory,
    pool_limits,
)
from minisgl.engine.start.pool_division import PoolLimits, PoolPart, cache_groups
from minisgl.engine.step.rows import Rows
from minisgl.errors import ConfigError
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.models.registry import build_model
from minisgl.parallel.sizes import rank_sizes

GPU_GIB = {
    "B200": 178.3,
    "H200": 139.8,
    "H100": 79.1,
    "A100-80GB": 79.2,
    "A100-40GB": 39.4,
    "RTX-6000-Ada": 47.4,
    "L40S": 44.4,
    "RTX-5090": 31.3,
    "RTX-4090": 23.5,
    "RTX-3090": 23.6,
    "A10": 22.0,
    "L4": 22.0,
}
"""Memory as CUDA reports it, in GiB, rounded down."""
OTHER_COMPUTE = {
    "B200": (10, 0),
    "A100-80GB": (8, 0),
    "A100-40GB": (8, 0),
    "RTX-6000-Ada": (8, 9),
    "L40S": (8, 9),
    "RTX-5090": (12, 0),
    "RTX-4090": (8, 9),
    "RTX-3090": (8, 6),
    "A10": (8, 6),
    "L4": (8, 9),
}
"""Compute capabilities. GPUs not listed here, and those given only by memory, count as Hopper (9.0)."""
CONTEXT_GIB = 0.6
"""Memory of a CUDA context, which is in use before the engine queries the free memory."""


class Capacity(NamedTuple):
    """The memory budget and how many requests fit."""

    config: ResolvedConfig
    budget: MemoryBudget
    requests: dict[int, int]
    """Context in tokens -> requests of that length whose pages fit, ignoring --max-running-requests."""
    quantized: str = ""
    """How weights are quantized, as the end of a phrase."""


def gpu_gib(name: str) -> float:
    """Memory of a GPU in GiB. `name`: a key of GPU_GIB in upper or lower case, or a number of GiB.

    Raises:
        ConfigError: it is neither.
    """
    known = _known_gpu(name)
    if known is not None:
        return GPU_GIB[known]
    try:
        memory = float(name)
    except ValueError:
        memory = 0.0
    if not 1 <= memory <= 1e6:
        raise ConfigError(f"--gpu must be one of {', '.join(GPU_GIB)}, or its memory in GiB, got {name!r}")
    return memory


def _known_gpu(name: str) -> str | None:
    wanted = name.lower().removeprefix("nvidia ").replace(" ", "-")
    return next((gpu for gpu in GPU_GIB if gpu.lower() == wanted), None)


def gpu_is_here() -> bool:
    """Whether torch sees a GPU on this machine. The plan itself does not use it."""
    return torch.cuda.is_available()


def find_capacity(config: EngineConfig, folder: Path, gpu: str) -> Capacity:
    """Compute how much of the model in `folder` fits on the GPU, or on each of `config.tp` GPUs.

    Raises:
        ConfigError: the model does not fit, or a setting is impossible.
        ModelError: config.json can't be read.
    """
    model = read_model_config(folder, config.quantization, config.kv_dtype)
    capability = OTHER_COMPUTE.get(_known_gpu(gpu) or "", (9, 0))
    # The packages of that machine are unknown, so flashinfer is assumed to be installed.
    facts = DeviceFacts(has_cuda=True, cuda_name=gpu, compute_capability=capability, flashinfer="assumed")
    resolved = resolve_engine_config(config, model, facts)
    if resolved.device != "cuda":
        raise ConfigError("minisgl plan plans for GPUs; leave --device away")
    available_bytes = int((gpu_gib(gpu) - CONTEXT_GIB) * GIB * resolved.memory_fraction)
    meta = torch.device("meta")
    decoder = build_model(
        model,
        attention_backend="torch",  # any backend would do: none has weights
        dtype=getattr(torch, resolved.dtype),
        device=meta,
        tp=resolved.tp,
    )
    weights_bytes = module_bytes(decoder)
    model = replace(rank_sizes(model, resolved.tp), max_position=resolved.max_context_tokens)
    check_weights_fit(weights_bytes, available_bytes, resolved)
    check_states_fit(model, resolved, weights_bytes, available_bytes)
    pages_per_row = -(-resolved.max_context_tokens // resolved.page_size)
    num_groups = len(cache_groups(model.kv_groups, resolved.keep_window_pages))
    budget = plan_memory(
        model,
        resolved,
        available_bytes=available_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=estimate_activation_bytes(model, resolved, resolved.max_step_tokens),
        tables_bytes=module_bytes(
            Rows(resolved.max_running_requests, pages_per_row, resolved.page_size, meta, num_groups)
        ),
        reserve_bytes=estimate_activation_bytes(model, resolved, resolved.max_graph_tokens)
        + graph_reserve_bytes(resolved)
        + logit_extras_bytes(model, resolved),
    )
    contexts = [1 << power for power in range(10, 31) if 1 << power < resolved.max_context_tokens]
    limits = pool_limits(resolved)
    requests = {
        context: requests_that_fit(budget.parts, limits, context)
        for context in (*contexts, resolved.max_context_tokens)
    }
    quantized = "" if model.quantization is None else f" and {model.quantization.describe()}"
    return Capacity(resolved, budget, requests, quantized)


def requests_that_fit(parts: Sequence[PoolPart], limits: PoolLimits, context: int) -> int:
    """How many requests of `context` tokens have their pages in each group."""
    pages = -(-context // limits.page_size)
    return min(
        (part.num_pages - 1) // min(pages, limits.window_pages(part.window) if part.window else pages)
        for part in parts  # one page is the scratch page
    )


def _tokens_of(part: PoolPart, config: ResolvedConfig) -> str:
    """The tokens of one group of layers."""
    window = f", for layers with a window of {part.window:,}" if part.window else ""
    return (
        f"{(part.num_pages - 1) * config.page_size:,} tokens of "
        f"{part.page_bytes / config.page_size / 1024:.4g} KiB in {config.kv_dtype or config.dtype}{window}"
    )


def describe(capacity: Capacity, model: str, gpu: str) -> str:
    """The plan as text for the user."""
    config, budget, requests = capacity.config, capacity.budget, capacity.requests
    parts = [
        ("weights", budget.weights_bytes, f"in {config.dtype}{capacity.quantized}"),
        ("activations", budget.activation_bytes, f"estimated, {config.max_step_tokens} tokens a step"),
        ("tables", budget.tables_bytes, f"{config.max_running_requests} rows"),
        ("states", budget.states_bytes, f"{config.max_running_requests} rows of linear attention"),
        (
            "snapshots",
            budget.num_snapshots * budget.snapshot_bytes,
            f"{budget.num_snapshots} of {budget.snapshot_bytes / MIB:.1f} MiB, for prefix hits",
        ),
        ("reserve", budget.reserve_bytes, "CUDA graphs, penalties, log probabilities, libraries"),
        ("KV pool", budget.pool_bytes, _tokens_of(budget.parts[0], config)),
        *(("", 0, _tokens_of(part, config)) for part in budget.parts[1:]),
    ]
    if not budget.states_bytes:
        parts = [part for part in parts if part[0] not in ("states", "snapshots")]
    unused = budget.available_bytes - sum(size for _, size, _ in parts)
    parts.append(("unused", unused, "more than the requests below can use" if unused > GIB else ""))
    each = f"each of {config.tp} " if config.tp > 1 else ""
    lines = [
        f"{model} on {each}{gpu}: {gpu_gib(gpu):.1f} GiB, of which the engine may take "
        f"{budget.available_bytes / GIB:.1f} (--memory-fraction {config.memory_fraction:g})",
        *(
            f"  {name:<12}{size / GIB:>9.2f} GiB  {note}".rstrip() if name else f"{'':29}{note}"
            for name, size, note in parts
        ),
        "",
        f"{'context':>12}{'requests at once':>20}",
    ]
    for context, fitting in requests.items():
        limit = "the KV pool" if fitting < config.max_running_requests else "--max-running-requests"
        lines.append(f"{context:>12,}{min(fitting, config.max_running_requests):>20,}  limited by {limit}")
    return "\n".join(lines)
