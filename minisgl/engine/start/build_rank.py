"""Builds the engine of one rank: device, model, weights, KV pool, graphs and scheduler.

Promise: a failed start leaves the process group and closes the compile cache. Too little memory raises a
ConfigError that says which setting to lower.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from compile_cache.store import OpenCache
from minisgl.attention.backends import build_backend
from minisgl.attention.choice import parse
from minisgl.attention.flashinfer import AttentionShape
from minisgl.attention.interface import Attend, Backend
from minisgl.config import ResolvedConfig
from minisgl.engine.cpu_blocks.cpu_block import make_cpu_block
from minisgl.engine.device_faults import device_fault_of, name_device_faults
from minisgl.engine.engine import Engine
from minisgl.engine.graphs.buckets import buckets_of
from minisgl.engine.graphs.decode_graphs import KernelCompilations, import_compiler
from minisgl.engine.graphs.dry_runs import Peaks, measure_peaks
from minisgl.engine.graphs.rank_compile_cache import open_rank_compile_cache, publish_compile_cache
from minisgl.engine.graphs.recording import record_steps
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.page_events import PageEventPublisher, open_page_events
from minisgl.engine.start.device import free_host_bytes, keep_freed_memory, peak_host_bytes
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
from minisgl.engine.start.pool_division import cache_groups, num_places
from minisgl.engine.start.replace_kernels import replace_kernels
from minisgl.engine.start.startup_stages import StartupStages
from minisgl.engine.step.attention_planner import AttentionPlanner
from minisgl.engine.step.inputs import HostPageTable, Stager
from minisgl.engine.step.rows import Rows
from minisgl.errors import ConfigError
from minisgl.grammar.pending import PendingGrammars
from minisgl.kvcache.grouped_manager import Cache, GroupedCacheManager, WindowGroup
from minisgl.kvcache.manager import KVCacheManager
from minisgl.model_config.config import FP8_CACHE, ModelConfig
from minisgl.models.checkpoint import pack_weights
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.parallel.sizes import rank_sizes
from minisgl.progress import Progress, ShownProgress, logged_progress, no_progress
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler
from minisgl.weights.dummy import DUMMY_SEED, fill_dummy
from minisgl.weights.loader import load_weights
from triton_kernels.e4m3 import FP8
from triton_kernels.gated_delta import CHUNK as STATE_CHUNK

if TYPE_CHECKING:
    from minisgl.engine.ranks.follower_link import FollowerLink
    from minisgl.grammar.compiler import GrammarCompiler
    from minisgl.models.sharded import ShardedTensors
    from minisgl.parallel.mesh import Ranks

logger = logging.getLogger(__name__)


class Rendezvous(NamedTuple):
    """How a rank joins the other ranks."""

    rank: int
    store: str
    """The address of the ranks' torch store, see `parallel.mesh.open_store`."""
    on_arrival: Callable[[], None]
    """Called just before the rank joins. Joining waits for all ranks."""


class _Hardware(NamedTuple):
    """The device that one rank computes on."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    """Of keys and values."""
    available_bytes: int
    """Memory that the engine may use."""


@name_device_faults()
def build_rank(
    config: ResolvedConfig,
    folder: Path,
    model_config: ModelConfig,
    stages: StartupStages,
    rendezvous: Rendezvous | None,
    followers: "FollowerLink | None",
    max_queued_grammars: int | None = None,
) -> Engine:
    """Build the engine of one rank.

    Args:
        rendezvous: None if there is only one rank.
        followers: the other ranks' processes; None on all ranks but rank 0.
        max_queued_grammars: see `build_engine`.

    Raises:
        ConfigError: a setting is impossible, or there is too little memory.
        ModelError: the folder's model can't be loaded.
        DeviceFaultError: the GPU failed.
    """
    # RoPE's table has one row per position of the longest context. LongRoPE chooses its factors by that.
    model_config = replace(model_config, max_position=config.max_context_tokens)
    hardware = _set_up_hardware(config, rendezvous)
    is_first = rendezvous is None or rendezvous.rank == 0
    page_events = None
    cache = open_rank_compile_cache(config, hardware.device, 0 if rendezvous is None else rendezvous.rank)
    ranks = None
    stages.finish("settings and device")

    importing = threading.Thread(target=import_compiler, name="import-compiler", daemon=True)
    if config.compile_mode != "off":
        importing.start()  # loading weights waits for the disk and copies, so Python is free
    try:
        if is_first:
            page_events = open_page_events(config)  # before the model: a port that is in use ends the start
        rank_config = rank_sizes(model_config, config.tp)
        stager = Stager(hardware.device)
        attention = _build_attention(config, rank_config, hardware, stager)
        model = _allocate_model(config, model_config, attention.attend, hardware)
        stages.finish("allocate the model")
        loadable = model
        if rendezvous is not None:
            ranks, hardware = _join(rendezvous, config.tp, config.ranks_per_host == config.tp, hardware)
            if followers is not None:
                followers.set_ranks(ranks)
            loadable = _shard_model(model, model_config, ranks)
            stages.finish(f"meet the other {config.tp - 1} ranks" if config.tp > 2 else "meet the other rank")
        if config.dummy_weights:
            fill_dummy(model, DUMMY_SEED)
            stages.finish("dummy weights")
        else:
            # All ranks load at the same pace, so only rank 0 shows the progress.
            if is_first:
                with ShownProgress(logged_progress(logger)) as shown:
                    _load_weights(loadable, folder, model_config, hardware, shown)
            else:
                _load_weights(loadable, folder, model_config, hardware, no_progress)
            stages.finish("load weights")
        if importing.ident is not None:
            importing.join()
            stages.finish("import the compiler")
        with torch.inference_mode():
            engine = _assemble(
                config,
                rank_config,
                model,
                attention,
                stager,
                hardware,
                stages,
                cache,
                ranks,
                followers,
                PendingGrammars(partial(_grammar_compiler, folder, rank_config, max_queued_grammars)),
                page_events,
            )
        if cache is not None:
            publish_compile_cache(cache)
            stages.finish("compile cache")
        return engine
    except BaseException as error:
        if ranks is not None and device_fault_of(error) is None:  # after a fault, this could hang
            ranks.leave()
        if page_events is not None:
            page_events.close()
        if cache is not None:
            cache.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise ConfigError(
                "the GPU's memory did not suffice for the start; lower --max-step-tokens "
                f"({config.max_step_tokens}), --max-running-requests ({config.max_running_requests}) or "
                f"--memory-fraction ({config.memory_fraction}). CUDA said: {error}"
            ) from error
        raise


def _assemble(
    config: ResolvedConfig,
    model_config: ModelConfig,
    model: Decoder,
    attention: Backend,
    stager: Stager,
    hardware: _Hardware,
    stages: StartupStages,
    cache: OpenCache | None,
    ranks: "Ranks | None",
    followers: "FollowerLink | None",
    grammars: PendingGrammars,
    page_events: PageEventPublisher | None,
) -> Engine:
    """Build tables, KV pool, graphs and scheduler around a loaded model.

    Args:
        model_config: the sizes of this rank's share of the model.
    """
    device = hardware.device
    kernels = KernelCompilations() if device.type == "cuda" else None
    page_size = config.page_size
    pages_per_row = -(-config.max_context_tokens // page_size)
    num_groups = len(cache_groups(model_config.kv_groups, config.keep_window_pages))
    rows = Rows(config.max_running_requests, pages_per_row, page_size, device, num_groups)
    replace_kernels(model, rows, config.kernel)
    if device.type == "cpu" and config.compile_mode == "off":
        pack_weights(model)
        stages.finish("pack weights")
    pages = HostPageTable(rows.max_rows, pages_per_row, page_size, num_groups)
    planner = AttentionPlanner(attention, pages)
    tables_bytes = module_bytes(rows) + attention.num_bytes
    weights_bytes = module_bytes(model)
    # The states have their final size, because the memory profile runs steps. One snapshot, if there may be
    # any, selects the prefill kernels that save states, so that these are compiled now.
    may_save = config.prefix_cache and config.state_cache_memory != 0
    model.allocate_states(rows.max_rows, int(may_save), hardware.dtype, device)
    budget = _plan_memory(config, model_config, model, rows, planner, weights_bytes, tables_bytes, hardware)
    if ranks is not None:
        parts = [part._replace(num_pages=ranks.minimum(part.num_pages)) for part in budget.parts]
        budget = replace(budget, parts=tuple(parts))
    logger.info("memory: %s", budget.describe())
    num_pages = [part.num_pages for part in budget.parts]
    states = model.allocate_states(rows.max_rows, budget.num_snapshots, hardware.dtype, device)
    model.allocate_kv(num_pages if num_groups > 1 else num_pages[0], page_size, hardware.cache_dtype, device)
    stages.finish("memory profile and KV pool")
    recorded = record_steps(config, model, rows, pages, planner, stager, device, kernels, stages, ranks)
    cpu_block = make_cpu_block(config, model) if device.type == "cpu" else None
    runner = ModelRunner(model, rows, pages, planner, stager, device, recorded, states, cpu_block)
    if ranks is not None:
        runner.allocate_logit_tables()  # later, a rank without memory for them would end the engine
    kv_cache = _make_cache(config, model_config, budget, page_events is not None)
    scheduler = _make_scheduler(config, model_config, kv_cache)
    return Engine(
        config, scheduler, kv_cache, runner, recorded, cache, ranks, followers, grammars, page_events
    )


def _grammar_compiler(folder: Path, model_config: ModelConfig, max_queued: int | None) -> "GrammarCompiler":
    """The compiler of grammars for the tokenizer in `folder`.

    Raises:
        OSError: the folder has no tokenizer.json.
    """
    # Lazy: its library is needed only with the first grammar.
    from minisgl.grammar.compiler import GrammarCompiler

    text = (folder / "tokenizer.json").read_text()
    return GrammarCompiler(text, model_config.vocab_size, model_config.eos_token_ids, max_queued=max_queued)


def _set_up_hardware(config: ResolvedConfig, rendezvous: Rendezvous | None) -> _Hardware:
    if config.cpu_threads is not None or config.tp > 1:
        torch.set_num_threads(config.cpu_threads or max(1, torch.get_num_threads() // config.ranks_per_host))
    if config.device == "cuda":
        index = torch.cuda.current_device() if rendezvous is None else rendezvous.rank % config.ranks_per_host
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        torch.cuda.init()
        available_bytes = int(torch.cuda.mem_get_info(device)[0] * config.memory_fraction)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        available_bytes = int(free_host_bytes() * config.memory_fraction) // config.ranks_per_host
    dtype = getattr(torch, config.dtype)
    return _Hardware(device, dtype, FP8 if config.kv_dtype == FP8_CACHE else dtype, available_bytes)


def _build_attention(
    config: ResolvedConfig, model_config: ModelConfig, hardware: _Hardware, stager: Stager
) -> Backend:
    """Build the attention backends for this rank's share of the model."""
    shape = AttentionShape(
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        page_size=config.page_size,
        scale=model_config.head_dim**-0.5
        if model_config.attention_scale is None
        else model_config.attention_scale,
        windows=frozenset(model_config.windows or (0,)),
        dtype=hardware.dtype,
        device=hardware.device,
    )
    return build_backend(
        parse(config.attention_backend),
        shape,
        lambda target, source: stager.overwrite(target, [source]),
        buckets=buckets_of(config).decode,
        max_rows=config.max_running_requests,
        max_context_tokens=config.max_context_tokens,
    )


def _allocate_model(
    config: ResolvedConfig, model_config: ModelConfig, attend: Attend, hardware: _Hardware
) -> Decoder:
    build = partial(
        build_model,
        model_config,
        attention_backend=attend,
        dtype=hardware.dtype,
        tp=config.tp,
    )
    weights_bytes = module_bytes(build(device=torch.device("meta")))
    check_weights_fit(weights_bytes, hardware.available_bytes, config)
    check_states_fit(model_config, config, weights_bytes, hardware.available_bytes)
    model = build(device=hardware.device)
    model.requires_grad_(False)
    return model


def _join(
    rendezvous: Rendezvous, size: int, one_host: bool, hardware: _Hardware
) -> "tuple[Ranks, _Hardware]":
    """Join the other ranks. The returned hardware has less available memory: NCCL takes some."""
    from minisgl.parallel.mesh import join, open_store  # lazy: one rank needs no torch.distributed

    device = hardware.device
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    rendezvous.on_arrival()
    store = open_store(rendezvous.store, size)
    ranks = join(rendezvous.rank, size, store, device, one_host=one_host)
    ranks.minimum(0)  # the first collective allocates NCCL's memory
    if device.type == "cuda":
        taken_bytes = free_bytes - torch.cuda.mem_get_info(device)[0]
        hardware = hardware._replace(available_bytes=hardware.available_bytes - taken_bytes)
    return ranks, hardware


def _shard_model(model: Decoder, model_config: ModelConfig, ranks: "Ranks") -> "ShardedTensors":
    from minisgl.models.sharded import shard_model  # lazy: as above

    return shard_model(model, model_config, ranks)


def _load_weights(
    loadable: "Decoder | ShardedTensors",
    folder: Path,
    model_config: ModelConfig,
    hardware: _Hardware,
    on_progress: Progress,
) -> None:
    began = time.perf_counter()
    num_bytes = load_weights(
        loadable,
        folder,
        model_config,
        dtype=hardware.dtype,
        device=hardware.device,
        on_progress=on_progress,
    )
    if hardware.device.type == "cuda":
        torch.cuda.synchronize(hardware.device)
    loaded_s = time.perf_counter() - began
    logger.info(
        "weights: %.2f GB in %.1f s, %.2f GB/s; peak host memory so far %.2f GB",
        num_bytes / 1e9,
        loaded_s,
        num_bytes / 1e9 / loaded_s,
        peak_host_bytes() / 1e9,
    )


def _plan_memory(
    config: ResolvedConfig,
    model_config: ModelConfig,
    model: Decoder,
    rows: Rows,
    planner: AttentionPlanner,
    weights_bytes: int,
    tables_bytes: int,
    hardware: _Hardware,
) -> MemoryBudget:
    reserve_bytes = 0
    if hardware.device.type == "cpu":
        peaks = Peaks(estimate_activation_bytes(model_config, config, config.max_step_tokens), 0, 0)
    else:
        peaks = measure_peaks(config, model, rows, planner, hardware.device, hardware.cache_dtype)
        recorded_bytes = peaks.decode_bytes + peaks.recorded_prefill_bytes
        reserve_bytes = recorded_bytes + graph_reserve_bytes(config)
        reserve_bytes += logit_extras_bytes(model_config, config)
    return plan_memory(
        model_config,
        config,
        available_bytes=hardware.available_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=peaks.prefill_bytes,
        tables_bytes=tables_bytes,
        reserve_bytes=reserve_bytes,
    )


def _make_cache(
    config: ResolvedConfig, model_config: ModelConfig, budget: MemoryBudget, notes_changes: bool
) -> Cache:
    has_snapshots = model_config.has_states and config.prefix_cache
    if len(budget.parts) == 1 and not budget.parts[0].window and not has_snapshots:
        return KVCacheManager(
            num_pages=budget.num_pages,
            page_size=config.page_size,
            prefix_cache=config.prefix_cache,
            notes_changes=notes_changes,
        )
    limits = pool_limits(config)
    return GroupedCacheManager(
        num_places=num_places(budget.parts, limits),
        page_size=config.page_size,
        keeps_all=not budget.parts[0].window,
        windows=[WindowGroup(part.window, part.num_pages) for part in budget.parts if part.window],
        prefix_cache=config.prefix_cache,
        tile_tokens=limits.tile_tokens,
        num_snapshots=budget.num_snapshots if has_snapshots else None,
    )


def _make_scheduler(config: ResolvedConfig, model_config: ModelConfig, kv_cache: Cache) -> Scheduler:
    pool_tokens = kv_cache.num_usable_pages * config.page_size
    if pool_tokens < config.max_context_tokens:
        logger.warning(
            "the KV pool holds %d tokens: requests may have that many, not %d; see --num-pages",
            pool_tokens,
            config.max_context_tokens,
        )
    limits = SchedulerConfig(
        max_rows=config.max_running_requests,
        max_step_tokens=config.max_step_tokens,
        chunk_tokens=config.chunk_tokens,
        mixed_step_tokens=config.mixed_step_tokens,
        max_context_tokens=min(config.max_context_tokens, pool_tokens),
        vocab_size=model_config.vocab_size,
        output_reserve_tokens=config.output_reserve_tokens,
        eos_token_ids=model_config.eos_token_ids,
        chunk_multiple=STATE_CHUNK if model_config.has_states else 1,
    )
    return Scheduler(limits, kv_cache)
