"""The engine: scheduler and model runner joined by one function, `step`.

Promise: everything that is added is answered through `step`, refusals and aborts included; serial and
overlapped execution are the same code and give the same tokens.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from compile_cache.key import machine_facts
from compile_cache.seal import CacheError
from compile_cache.store import OpenCache, open_cache
from minisgl.config import EngineConfig, ModelConfig, resolve_engine_config
from minisgl.engine.buckets import PrefillBucket, decode_buckets, prefill_buckets
from minisgl.engine.compiled import (
    CapturedSteps,
    CompiledDecode,
    GraphRecorder,
    KernelCompilations,
    WholeStep,
    import_compiler,
)
from minisgl.engine.device import find_device_facts, free_host_bytes, peak_host_bytes
from minisgl.engine.inputs import HostPageTable, Stager
from minisgl.engine.memory import check_weights_fit, graph_reserve_bytes, plan_memory
from minisgl.engine.model_runner import LaunchedStep, ModelRunner
from minisgl.engine.prefill_graphs import PrefillGraphs, Record
from minisgl.engine.profile import bytes_of, measure_peaks, warm_up_prefill
from minisgl.engine.profiler import StepProfiler
from minisgl.engine.replace_kernels import replace_kernels
from minisgl.engine.rows import Rows
from minisgl.engine.special_steps import SpecialDecode
from minisgl.engine.steps import DecodeStep, prefill_step
from minisgl.engine.timeline import Timeline
from minisgl.errors import ConfigError, RequestError
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.page_allocator import BrokenInvariantError
from minisgl.messages import AddRequest, Status
from minisgl.model_config import read_model_config
from minisgl.models.decoder import Decoder
from minisgl.models.registry import build_model
from minisgl.parallel.sizes import rank_sizes
from minisgl.request import RequestOutput
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler, SchedulerConfig
from minisgl.weights.dummy import fill_dummy
from minisgl.weights.loader import load_weights
from minisgl.weights.progress import logged_progress

if TYPE_CHECKING:
    from minisgl.engine.follower_link import FollowerLink
    from minisgl.models.sharded import ShardedTensors
    from minisgl.parallel.mesh import Ranks

logger = logging.getLogger(__name__)

OnStage = Callable[[str, float], None]
"""Called when a stage of the start is over: its name and milliseconds."""


class Engine:
    """Serves requests step by step. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        cache: KVCacheManager,
        runner: ModelRunner,
        compiled: CompiledDecode | None,
        kernels: KernelCompilations | None,
        compile_cache: OpenCache | None,
        ranks: "Ranks | None",
        followers: "FollowerLink | None",
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        self.cache = cache
        self.runner = runner
        self._compiled = compiled
        self._kernels = kernels
        self._compile_cache = compile_cache
        self._ranks = ranks
        self._followers = followers
        self._launched: deque[LaunchedStep] = deque()
        self.timeline = Timeline()
        self.profiler = StepProfiler(Path(config.profile_dir).expanduser() if config.profile_dir else None)
        self.num_broken_counts = 0  # times `check_at_idle` found pages lost

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt + output of one request: the least of the model's, the flag's and the pool's."""
        return self._scheduler.config.max_context_tokens

    @property
    def num_pages(self) -> int:
        """Pages of the pool that requests can use."""
        return self.cache.num_usable_pages

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or return anything."""
        return self._scheduler.has_work

    def add(self, request: AddRequest) -> None:
        """Take in a request; its first output, or its refusal, comes out of a later `step`."""
        prompt = np.frombuffer(request.prompt_ids, dtype="<i4").astype(np.int32)
        if request.params.changes_logits:
            try:
                self.runner.allocate_logit_tables()
            except torch.OutOfMemoryError:
                refusal = RequestError(
                    503,
                    "out_of_memory",
                    "no memory is left for penalties, biases and bans; start the server with a lower "
                    "--memory-fraction or --max-running-requests",
                )
                self._scheduler.refuse(request.request_id, refusal)
                return
        self._scheduler.add(request.request_id, prompt, request.params, request.priority)

    def abort(self, request_id: int) -> None:
        """Stop a request; a later `step` gives its final ABORT output. Unknown and ended ids are ignored."""
        self._scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Plan and launch a step, collect the one before (with overlap) or this one; what came of it.

        Raises:
            EngineDeadError: another rank has ended.
        """
        if self._followers is None:
            return self._step()
        try:
            self._followers.check()
            return self._step()
        except Exception as error:
            cause = self._followers.explain(error)
            raise cause from (error if cause is not error else None)

    def _step(self) -> list[RequestOutput]:
        begin_s = time.perf_counter()
        plan = self._scheduler.plan()
        planned_s = time.perf_counter()
        if plan is not None:
            if self._followers is not None:
                self._followers.send(plan)
            self._launched.append(self.runner.launch(plan))
            launched_s = time.perf_counter()
            self.timeline.launched(plan, self.runner.buckets_of(plan), begin_s, planned_s, launched_s)
        # With overlap one step stays in flight while the next is planned; without a plan nothing can.
        keep_in_flight = 1 if self.config.overlap and plan is not None else 0
        while len(self._launched) > keep_in_flight:
            step = self._launched.popleft()
            waiting_s = time.perf_counter()
            step.wait()
            collected_s = time.perf_counter()
            result = self.runner.collect(step)
            if self._followers is not None:
                self._followers.note(result.token_ids)
            self._scheduler.apply(step.plan, *result)
            self.timeline.applied(waiting_s, collected_s, time.perf_counter())
            self.profiler.step_is_over()
        return self._scheduler.take_outputs()

    def follow(self, plan: StepPlan) -> list[list[int]]:
        """Execute a plan of rank 0, as a further rank; the tokens of each step that is over by now."""
        if any(init.rules is not None for init in plan.row_inits):
            self.runner.allocate_logit_tables()
        self._launched.append(self.runner.launch(plan))
        over = []
        while len(self._launched) > (1 if self.config.overlap else 0):
            over.append(self.runner.collect(self._launched.popleft()).token_ids)
        return over

    def status(self, sequence: int) -> Status:
        """The answer to a ping."""
        stats = self._scheduler.stats
        num_recompiles = self._compiled.num_recompiles if self._compiled else 0
        num_recompiles += self._kernels.count if self._kernels else 0
        return Status(
            sequence,
            num_steps=stats.num_steps,
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_free_pages=self.cache.num_free_pages,
            num_cached_pages=self.cache.num_cached_pages,
            num_preemptions=stats.num_preemptions,
            num_recompiles=num_recompiles,
            num_graph_misses=self._compiled.num_graph_misses if self._compiled else 0,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_output_tokens=stats.num_output_tokens,
            num_broken_counts=self.num_broken_counts,
            num_held_pages=self.cache.num_usable_pages
            - self.cache.num_free_pages
            - self.cache.num_evictable_pages,
            num_held_rows=self._scheduler.num_held_rows,
        )

    def check_at_idle(self) -> None:
        """Recount all pages while nothing runs: a broken count is logged, and the cache starts over.

        A lost page must not end a server that could go on; tests call the same check after every step.
        """
        if self.has_work:
            return
        try:
            self.cache.check_invariants()
            lost = self.cache.num_usable_pages - self.cache.num_free_pages - self.cache.num_evictable_pages
            problem = f"{lost} pages are held though nothing runs" if lost else ""
        except BrokenInvariantError as error:
            problem = str(error)
        if problem:
            logger.error(
                "the page count is broken (a bug, please report it): %s; the cache starts over", problem
            )
            self.num_broken_counts += 1
            self.cache.start_over()

    def flush_prefix_cache(self) -> int:
        """Forget the K/V of all finished requests; returns the pages freed."""
        return self.cache.flush()

    def close(self) -> None:
        """Wait for launched steps, let go of them and of the compile cache. Open requests get no answer."""
        try:
            while self._launched:
                self.runner.collect(self._launched.popleft())
        finally:
            if self._followers is not None:
                self._followers.close()
            if self._ranks is not None:
                self._ranks.leave()
            if self._compile_cache is not None:
                self._compile_cache.close()


def build_engine(
    config: EngineConfig,
    folder: Path,
    on_stage: OnStage,
    *,
    ipc_dir: Path | None = None,
    on_lost_rank: Callable[[str], None] = lambda reason: None,
) -> Engine:
    """An engine that is ready to serve the model in `folder`, all its stages reported to `on_stage`.

    With `config.tp` above 1 it starts the other ranks' processes, and ends them in `close`.

    Args:
        ipc_dir: a private directory for their sockets, which the caller removes; None = one of its own.
        on_lost_rank: called with the reason, from another thread, when a rank has ended; the next `step`
            raises, but this one may not return until its process ends.

    Raises:
        ConfigError: a setting is impossible, or memory does not suffice.
        ModelError: the folder's model can't be loaded.
        EngineDeadError: another rank could not start.
    """
    stages = _Stages(on_stage)
    model_config = read_model_config(folder)
    must_compile = config.strict_compile or config.compile_mode is not None
    config = resolve_engine_config(config, model_config, find_device_facts())
    if config.tp == 1:
        return _build_rank(config, folder, model_config, stages, None, None, must_compile=must_compile)
    _check_ranks_fit(config, model_config)
    # Lazy: torch.distributed takes a while, and one rank needs none of it.
    from minisgl.engine.follower_link import FollowerLink

    followers = FollowerLink(config, folder, must_compile=must_compile, ipc_dir=ipc_dir, on_lost=on_lost_rank)
    meeting = Meeting(0, followers.store, followers.wait_for_all)
    try:
        return _build_rank(
            config, folder, model_config, stages, meeting, followers, must_compile=must_compile
        )
    except BaseException as error:
        cause = followers.explain(error) if isinstance(error, Exception) else error
        followers.close(at_once=True)
        raise cause from (error if cause is not error else None)


def build_follower(
    config: EngineConfig, folder: Path, meeting: "Meeting", *, must_compile: bool, on_stage: OnStage
) -> Engine:
    """A further rank's engine, whose `follow` executes rank 0's plans: its own scheduler is never asked.

    Args:
        config: resolved, as rank 0's.

    Raises:
        MinisglError: as `build_engine`.
    """
    model_config = read_model_config(folder)
    return _build_rank(
        config, folder, model_config, _Stages(on_stage), meeting, None, must_compile=must_compile
    )


class Meeting(NamedTuple):
    """Where and how a rank meets the others."""

    rank: int
    store: Path
    on_arrival: Callable[[], None]
    """Called just before joining, which waits for all ranks."""


def _check_ranks_fit(config: EngineConfig, model_config: ModelConfig) -> None:
    rank_sizes(model_config, config.tp)
    if config.device == "cuda" and torch.cuda.device_count() < config.tp:
        raise ConfigError(
            f"--tp {config.tp} needs {config.tp} GPUs and torch sees {torch.cuda.device_count()}; lower it"
        )


def _build_rank(
    config: EngineConfig,
    folder: Path,
    model_config: ModelConfig,
    stages: "_Stages",
    meeting: Meeting | None,
    followers: "FollowerLink | None",
    *,
    must_compile: bool,
) -> Engine:
    """One rank's engine, or the only one's."""
    assert config.device is not None
    assert config.dtype is not None
    if config.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if meeting is None else meeting.rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dtype = getattr(torch, config.dtype)
    if config.cpu_threads is not None or config.tp > 1:
        torch.set_num_threads(config.cpu_threads or max(1, torch.get_num_threads() // config.tp))
    if device.type == "cuda":
        torch.cuda.init()
        available_bytes = int(torch.cuda.mem_get_info(device)[0] * config.memory_fraction)
    else:
        available_bytes = int(free_host_bytes() * config.memory_fraction) // config.tp
    rank = 0 if meeting is None else meeting.rank
    cache = _open_compile_cache(config, device, rank)
    ranks = None
    stages.done("settings and device")

    importing = threading.Thread(target=import_compiler, name="import-compiler", daemon=True)
    if config.compile_mode != "off":
        importing.start()  # loading weights is work for disk and copies, and leaves Python free
    assert config.attention_backend is not None
    build = partial(
        build_model, model_config, attention_backend=config.attention_backend, dtype=dtype, tp=config.tp
    )
    try:
        check_weights_fit(bytes_of(build(device="meta")), available_bytes, config)
        model = build(device=device)
        model.requires_grad_(False)
        stages.done("allocate the model")
        loadable = model
        if meeting is not None:
            free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            ranks = _join(meeting, config.tp, device)
            if device.type == "cuda":
                available_bytes -= free_bytes - torch.cuda.mem_get_info(device)[0]  # NCCL's buffers
            loadable = _share_out(model, model_config, ranks)
            stages.done(f"meet the other {config.tp - 1} ranks" if config.tp > 2 else "meet the other rank")
        if config.dummy_weights:
            fill_dummy(model, config.seed)
        else:
            began = time.perf_counter()
            num_bytes = load_weights(
                loadable,
                folder,
                model_config,
                dtype=dtype,
                device=device,
                on_progress=logged_progress(logger),
            )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            loaded_s = time.perf_counter() - began
            logger.info(
                "weights: %.2f GB in %.1f s, %.2f GB/s; peak host memory so far %.2f GB",
                num_bytes / 1e9,
                loaded_s,
                num_bytes / 1e9 / loaded_s,
                peak_host_bytes() / 1e9,
            )
        stages.done("dummy weights" if config.dummy_weights else "load weights")
        if importing.ident is not None:
            importing.join()
            stages.done("import the compiler")
        with torch.inference_mode():
            engine = _assemble(
                config,
                rank_sizes(model_config, config.tp),
                model,
                device,
                dtype,
                available_bytes,
                stages,
                cache,
                ranks,
                followers,
                must_compile=must_compile,
            )
        if cache is not None:
            _seal(cache)
            stages.done("compile cache")
        return engine
    except BaseException as error:
        if ranks is not None:
            ranks.leave()
        if cache is not None:
            cache.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise ConfigError(
                "the GPU's memory did not suffice for the start; lower --max-step-tokens "
                f"({config.max_step_tokens}), --max-running-requests ({config.max_running_requests}) or "
                f"--memory-fraction ({config.memory_fraction}). CUDA said: {error}"
            ) from error
        raise


def _join(meeting: Meeting, size: int, device: torch.device) -> "Ranks":
    from minisgl.parallel.mesh import join  # lazy: as in `build_engine`

    meeting.on_arrival()
    ranks = join(meeting.rank, size, meeting.store, device)
    ranks.minimum(0)  # the first collective takes what memory they need
    return ranks


def _share_out(model: Decoder, model_config: ModelConfig, ranks: "Ranks") -> "ShardedTensors":
    from minisgl.models.sharded import share_out  # lazy: as in `build_engine`

    return share_out(model, model_config, ranks)


class _Stages:
    """Measures from the end of one stage to the end of the next, so that the stages add up."""

    def __init__(self, on_stage: OnStage) -> None:
        self._on_stage = on_stage
        self._last = time.perf_counter()

    def done(self, name: str) -> None:
        now = time.perf_counter()
        self._on_stage(name, (now - self._last) * 1e3)
        self._last = now


def _assemble(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    available_bytes: int,
    stages: _Stages,
    cache: OpenCache | None,
    ranks: "Ranks | None",
    followers: "FollowerLink | None",
    *,
    must_compile: bool,
) -> Engine:
    """Tables, pool, graphs and scheduler around a loaded model; model_config: as this rank has it."""
    assert config.max_running_requests is not None
    assert config.max_context_tokens is not None
    assert config.max_step_tokens is not None
    assert config.chunk_tokens is not None
    assert config.mixed_step_tokens is not None
    assert config.max_graph_batch is not None
    assert config.max_graph_tokens is not None
    page_size = config.page_size
    pages_per_row = -(-config.max_context_tokens // page_size)
    rows = Rows(config.max_running_requests, pages_per_row, page_size, device)
    replace_kernels(model, rows, config.kernel)
    buckets = decode_buckets(config.max_graph_batch)
    chunk_buckets = prefill_buckets(config.max_graph_tokens, config.max_running_requests)
    peaks = measure_peaks(config, model_config, model, rows, device, dtype)
    budget = plan_memory(
        model_config,
        config,
        available_bytes=available_bytes,
        weights_bytes=bytes_of(model),
        activation_bytes=peaks.prefill_bytes,
        tables_bytes=bytes_of(rows),
        reserve_bytes=(
            peaks.decode_bytes
            + peaks.recorded_prefill_bytes
            + graph_reserve_bytes(len(buckets) + len(chunk_buckets))
            if device.type == "cuda"
            else 0
        ),
    )
    if ranks is not None:
        budget = replace(budget, num_pages=ranks.minimum(budget.num_pages))
    logger.info("memory: %s", budget.describe())
    model.allocate_kv(budget.num_pages, page_size, dtype, device)
    stages.done("memory profile and KV pool")

    recorder = GraphRecorder() if buckets or chunk_buckets else None
    compiled = None
    if buckets:
        assert config.compile_mode is not None
        assert recorder is not None
        step = DecodeStep(model, rows)
        try:
            compiled = _record_graphs(config, step, recorder, config.compile_mode, buckets, device)
        except Exception as error:
            if must_compile or config.compile_mode == "off" or isinstance(error, torch.OutOfMemoryError):
                raise
            logger.warning(
                "this torch can't compile the decode step, so it goes into its graphs uncompiled; "
                "--compile-mode %s makes this an error. It said:",
                config.compile_mode,
                exc_info=True,
            )
        if compiled is None:  # only now: in the handler, the error keeps what was recorded alive
            compiled = _record_graphs(config, step, recorder, "off", buckets, device)
        stages.done(f"compile decode, record {len(buckets)} graphs")
    pages = HostPageTable(rows.max_rows, pages_per_row, page_size)
    stager = Stager(device)
    kernels = None
    if device.type == "cuda":
        warm_up_prefill(model, rows, min(config.chunk_tokens, config.max_context_tokens), device)
        stages.done("compile prefill kernels")
    chunk_graphs = None
    if chunk_buckets:
        assert recorder is not None
        chunk_graphs = _record_prefill(
            config, model, rows, recorder.record, chunk_buckets, pages, stager, device, ranks
        )
        num_recorded = len(chunk_graphs.buckets) if chunk_graphs is not None else 0
        stages.done(f"record {num_recorded} prefill graphs")
    if device.type == "cuda":
        kernels = KernelCompilations()
    runner = ModelRunner(
        model,
        rows,
        pages,
        stager,
        device,
        compiled,
        chunk_graphs,
        _special_decode(compiled, DecodeStep(model, rows), recorder, buckets, device),
    )

    kv_cache = KVCacheManager(
        num_pages=budget.num_pages, page_size=page_size, prefix_cache=config.prefix_cache
    )
    scheduler_config = SchedulerConfig(
        max_rows=config.max_running_requests,
        max_step_tokens=config.max_step_tokens,
        chunk_tokens=config.chunk_tokens,
        mixed_step_tokens=config.mixed_step_tokens,
        max_context_tokens=min(config.max_context_tokens, kv_cache.num_usable_pages * page_size),
        vocab_size=model_config.vocab_size,
        output_reserve_tokens=config.output_reserve_tokens,
        eos_token_ids=model_config.eos_token_ids,
        seed=config.seed,
    )
    if scheduler_config.max_context_tokens < config.max_context_tokens:
        logger.warning(
            "the KV pool holds %d tokens: requests may have that many, not %d; see --num-pages",
            scheduler_config.max_context_tokens,
            config.max_context_tokens,
        )
    scheduler = Scheduler(scheduler_config, kv_cache)
    return Engine(config, scheduler, kv_cache, runner, compiled, kernels, cache, ranks, followers)


def _open_compile_cache(config: EngineConfig, device: torch.device, rank: int) -> OpenCache | None:
    """Where compiled code of former starts lies; None = nothing is compiled, or torch's own place is used.

    Ranks start together, so each has an entry of its own.
    """
    if device.type == "cpu" or not config.compile_cache or config.kernel:
        return None
    try:
        facts = machine_facts(device)
        if config.tp > 1:
            facts |= {"rank": f"{rank} of {config.tp}"}
        cache = open_cache(Path(os.path.expanduser(config.compile_cache)), facts)
    except CacheError as error:
        logger.warning("starting without a compile cache: %s", error)
        return None
    if cache is not None and cache.note:
        logger.warning("%s", cache.note)
    return cache


def _seal(cache: OpenCache) -> None:
    try:
        cache.seal()
    except CacheError as error:
        logger.warning("the next start compiles again: %s", error)


def _record_graphs(
    config: EngineConfig,
    step: DecodeStep,
    recorder: GraphRecorder,
    mode: str,
    buckets: tuple[int, ...],
    device: torch.device,
) -> CompiledDecode:
    """The decode step, compiled as `mode` says, with a graph for every bucket."""
    keep = not config.kernel
    if mode == "full":
        graphs = WholeStep(step, device, max_batch=buckets[-1], keep=keep)
    else:
        graphs = CapturedSteps(
            step, recorder, compile_blocks=mode == "layers", max_batch=buckets[-1], keep=keep
        )
    compiled = CompiledDecode(step, graphs, buckets, device, strict=config.strict_compile)
    durations_ms: dict[int, float] = {}
    compiled.warm_up(durations_ms.__setitem__)
    slowest = sorted(durations_ms, key=durations_ms.__getitem__)[-2:]
    logger.info(
        "recorded %d decode graphs in %.1f s, most of it for %s",
        len(durations_ms),
        sum(durations_ms.values()) / 1e3,
        " and ".join(f"{bucket} rows ({durations_ms[bucket] / 1e3:.1f} s)" for bucket in slowest),
    )
    return compiled


def _special_decode(
    compiled: CompiledDecode | None,
    step: DecodeStep,
    recorder: GraphRecorder | None,
    buckets: tuple[int, ...],
    device: torch.device,
) -> SpecialDecode:
    """Decode steps with extras, recorded with the compiled blocks where the plain ones are."""
    own_step = compiled.own_step if compiled is not None else None
    if recorder is None or own_step is None:
        return SpecialDecode(step, None, (), device)
    return SpecialDecode(step, recorder.record, buckets, device, own_step)


def _record_prefill(
    config: EngineConfig,
    model: Decoder,
    rows: Rows,
    record: Record,
    buckets: tuple[PrefillBucket, ...],
    pages: HostPageTable,
    stager: Stager,
    device: torch.device,
    ranks: "Ranks | None" = None,
) -> PrefillGraphs | None:
    """The prefill step with graphs; None where it can't be recorded, which is said."""
    graphs = PrefillGraphs(partial(prefill_step, model, rows), record, buckets, pages, stager, device)
    try:
        graphs.warm_up(agree=bool if ranks is None else lambda worth: bool(ranks.minimum(worth)))
    except Exception as error:
        if config.strict_compile or isinstance(error, torch.OutOfMemoryError):
            raise
        logger.warning(
            "prefill can't be recorded, so it runs uncaptured, which is slower for short prompts; "
            "--max-graph-tokens 0 asks for that, --strict-compile makes this an error. It said:",
            exc_info=True,
        )
        return None
    return graphs
