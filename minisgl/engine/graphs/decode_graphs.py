"""The decode step as CUDA graphs: one for each batch bucket, recorded once, replayed afterwards.

Three ways to get there, behind one contract (`--compile-mode`):

    layers   torch.compile over one block, which all blocks share; one CUDA graph around the whole step
    full     torch.compile(mode="reduce-overhead") over the whole step: CUDA graph trees record it
    off      the step as it is, in one CUDA graph

Promise: after `warm_up` a decode batch up to the largest bucket compiles nothing and records nothing;
whatever does all the same is counted, and an error with --strict-compile. Use from one thread only:
CUDA graph trees keep their state per thread.
"""

import importlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from triton import knobs

import triton_kernels
from compile_cache.key import sources_digest
from minisgl.attention.interface import AttentionInputs
from minisgl.engine.buckets import bucket_for
from minisgl.engine.early_starts import instantiate_with_early_starts
from minisgl.engine.inputs import row_ids_on
from minisgl.engine.measured import MeasuredDurations
from minisgl.engine.steps import DecodeStep
from minisgl.errors import MinisglError
from minisgl.models.decoder import RunBlock, call_block
from triton_kernels.early_start import EARLY_KERNELS
from triton_kernels.launch import ceil_div
from triton_kernels.linear import MAX_ROWS

EARLY_ATTENTION_HEADS = 192
"""Rows times KV heads up to which attention starts early. In larger batches it has a few long units for each
multiprocessor, and those that are free before others would get more of them."""

MEASURED = 4
"""Decode steps whose duration is measured at the start, at most."""

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Runs a function and records it; what comes back runs it again on what its tensors hold by then."""


class StepGraphs(Protocol):
    """One graph of the decode step for each tensor of row ids that was recorded."""

    @property
    def own_step(self) -> DecodeStep | None:
        """The step, its blocks compiled, that goes into graphs of ours; None = somebody else records it."""
        ...

    def record(self, row_ids: Tensor) -> None:
        """Compile what is missing and record the step on these row ids, int32 [R], which stay in place."""
        ...

    def replay(self, row_ids: Tensor) -> Tensor:
        """Run the step on a recorded tensor of row ids; the tokens, overwritten by the next replay."""
        ...

    def counts(self) -> tuple[int, int]:
        """(graphs compiled, CUDA graphs recorded) in this process so far, by whomever."""
        ...

    def release(self) -> None:
        """Let go of the CUDA graphs: nothing can be replayed any more."""
        ...


PlanDecode = Callable[[tuple[int, ...], int], None]
"""Called with a batch's rows, and with how many there are with padding, before it runs or is recorded."""


def no_plan(rows: tuple[int, ...], num_rows: int) -> None:
    """A `PlanDecode` that does nothing."""


class CompiledDecode:
    """A decode step that replays a graph.

    Args:
        step: the step on the device, uncompiled: what runs when no bucket is large enough.
        graphs: how it is compiled and recorded.
        buckets: ascending batch sizes to record, at least 2.
    """

    def __init__(
        self,
        step: DecodeStep,
        graphs: StepGraphs,
        buckets: tuple[int, ...],
        device: torch.device,
        *,
        strict: bool,
        plan: PlanDecode = no_plan,
    ) -> None:
        self._step = step
        self._plan = plan
        self._graphs = graphs
        self._buckets = buckets
        self._recorded: tuple[int, ...] = ()  # ascending, as `_buckets`
        self._wanted: int | None = None  # the bucket of the batch before
        self._device = device
        self._strict = strict
        self._max_rows = step.rows.max_rows
        self._row_ids: dict[int, Tensor] = {}
        self._run_us = MeasuredDurations()  # by rows
        self._batches: dict[int, tuple[int, ...]] = {}  # bucket -> rows its row_ids hold
        self.num_recompiles = 0
        self.num_graph_misses = 0

    @property
    def own_step(self) -> DecodeStep | None:
        """`StepGraphs.own_step`."""
        return self._graphs.own_step

    def release(self) -> None:
        """`StepGraphs.release`."""
        self._graphs.release()

    def warm_up(
        self,
        buckets: Iterable[int],
        on_bucket: Callable[[int, float], None],
        clock: Callable[[], float] = time.perf_counter,
        agree: Callable[[int], int] = int,
    ) -> None:
        """Compile and record these buckets, largest first, with padding rows only; then measure some.

        Calls `on_bucket(bucket, duration_ms)` after each, with the host's time.

        Args:
            agree: the least of all ranks' measured microseconds: they must decide alike.
        """
        for bucket in sorted(buckets, reverse=True):
            started = time.perf_counter()
            self._record(bucket)
            self._graphs.replay(self._row_ids[bucket])
            on_bucket(bucket, (time.perf_counter() - started) * 1e3)
        self._wait()  # not in between: the device runs while the host records the next
        with self._step.rows.measurable(self._step.model.vocab_size):
            for bucket in sorted(self._recorded[:: -ceil_div(len(self._recorded), MEASURED)]):
                row_ids = self._row_ids[bucket]
                row_ids.copy_(torch.arange(bucket, device=self._device) % self._max_rows)
                self._run_us.add(bucket, agree(min(self._measure(bucket, clock) for _ in range(2))))
                row_ids.fill_(self._max_rows)

    def _measure(self, bucket: int, clock: Callable[[], float]) -> int:
        """Microseconds of a step of rows that have no token yet."""
        self._step.rows.context_len.zero_()
        self._plan((), bucket)
        self._wait()
        begin = clock()
        self._graphs.replay(self._row_ids[bucket])
        self._wait()
        return round(1e6 * (clock() - begin))

    def duration_us(self, num_rows: int) -> float:
        """How long a step of so many rows takes, but for what grows with their keys, as `warm_up` measured;
        where no graph holds them, how long the largest takes."""
        return self._run_us.of(self.bucket_of(num_rows) or self._buckets[-1])

    @property
    def num_missing(self) -> int:
        """Buckets without a graph, whose batches run in a larger one."""
        return len(self._buckets) - len(self._recorded)

    @property
    def is_urgent(self) -> bool:
        """Never: a larger one is there."""
        return False

    def record_next(self) -> None:
        """Record a missing bucket: the last batch's, or else the largest."""
        missing = [bucket for bucket in self._buckets if bucket not in self._row_ids]
        self._record(self._wanted if self._wanted in missing else missing[-1])

    def give_up(self) -> None:
        """Do with the graphs there are."""
        self._buckets = self._recorded

    def bucket_of(self, num_rows: int) -> int | None:
        """Rows of the graph that so many rows run in; None = there is none."""
        return bucket_for(num_rows, self._recorded)

    def __call__(self, rows: tuple[int, ...]) -> Tensor:
        """Decode these rows; int32 [at least len(rows)] on the device, overwritten by the next call."""
        bucket = self.bucket_of(len(rows))
        if self.num_missing:
            self._wanted = bucket_for(len(rows), self._buckets)
        if bucket is None:
            self._note_miss(f"no graph holds {len(rows)} rows (the largest: {self._buckets[-1]})")
            self._plan(rows, len(rows))
            return self._step(row_ids_on(self._device, rows))
        row_ids = self._row_ids[bucket]
        if self._batches.get(bucket) != rows:
            padded = [*rows, *[self._max_rows] * (bucket - len(rows))]
            on_cuda = self._device.type == "cuda"
            row_ids.copy_(torch.tensor(padded, dtype=torch.int32, pin_memory=on_cuda), non_blocking=True)
            self._batches[bucket] = rows
        self._plan(rows, bucket)
        before = self._graphs.counts()
        token_ids = self._graphs.replay(row_ids)
        after = self._graphs.counts()
        if after != before:
            self.num_recompiles += after[0] - before[0]
            self._note_miss(f"a decode step of {len(rows)} rows was compiled or recorded while serving")
        return token_ids

    def _record(self, bucket: int) -> None:
        row_ids = torch.full((bucket,), self._max_rows, dtype=torch.int32, device=self._device)
        self._plan((), bucket)
        self._graphs.record(row_ids)
        self._row_ids[bucket] = row_ids
        self._recorded = tuple(sorted(self._row_ids))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _note_miss(self, what: str) -> None:
        self.num_graph_misses += 1
        if self._strict:
            raise MinisglError(f"--strict-compile: {what}")


class GraphRecorder:
    """Records functions as CUDA graphs that share one memory pool.

    So their replays must follow each other on one stream.

    Args:
        early_starts: kernels may start while the one before them still ends, in graphs for which it is asked.
            Only where all kernels are ours and the GPU can: early_start.can_start_early.
    """

    def __init__(self, *, early_starts: bool = False) -> None:
        self._can_start_early = early_starts
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(
        self, run: Callable[[], Tensor], *, early: Mapping[str, str | None] | None = None
    ) -> Callable[[], Tensor]:
        """Run it, which compiles what is missing, then record it; what comes back replays it.

        Args:
            early: kernels that may start early, where the recorder may, too: some of EARLY_KERNELS.

        Raises:
            whatever `run` does; nothing is left recording then.
        """
        if not self._can_start_early:
            early = None
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph(keep_graph=early is not None)
        try:
            with torch.cuda.stream(self._stream):
                run()
                _free_cublas_workspaces()
                # Not torch.cuda.graph(): that collects garbage and empties the cache before each recording.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                finally:
                    graph.capture_end()
                    _free_cublas_workspaces()
                if early is not None:
                    self._can_start_early = instantiate_with_early_starts(graph, early)
        finally:
            current.wait_stream(self._stream)  # also after a failure: the run before may still be going on
        self._graphs.append(graph)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def release(self) -> None:
        """Let go of all graphs: nothing can be replayed any more."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old one ended with its last graph


def _free_cublas_workspaces() -> None:
    """Before and after a recording: so cuBLAS takes its workspace from the graph's pool, which keeps it.

    One from outside would be freed under the graph by any CUDA graph trees of this process (mode "full", or
    compiled code of whoever uses the engine), which do this around each of their own recordings.
    """
    torch._C._cuda_clearCublasWorkspaces()


class CapturedSteps:
    """Modes "layers" and "off": the whole step in a CUDA graph of our own, its blocks compiled or not.

    For the other arguments see `compiled_block`.

    Args:
        early_rows: of the largest step in which kernels start early.
    """

    def __init__(
        self,
        step: DecodeStep,
        recorder: GraphRecorder,
        *,
        compile_blocks: bool,
        max_batch: int,
        early_rows: int,
        keep: bool = True,
    ) -> None:
        run_block = compiled_block(max_batch, keep=keep) if compile_blocks else call_block
        self.own_step = DecodeStep(step.model, step.rows, run_block)
        self._recorder = recorder
        self._early_rows = early_rows
        self._replays: dict[int, Callable[[], Tensor]] = {}  # by number of rows

    def record(self, row_ids: Tensor) -> None:
        num_rows = row_ids.shape[0]
        early = None
        if num_rows <= self._early_rows:
            early = early_kernels(num_rows, self.own_step.num_kv_heads)
        self._replays[num_rows] = self._recorder.record(lambda: self.own_step(row_ids), early=early)

    def replay(self, row_ids: Tensor) -> Tensor:
        return self._replays[row_ids.shape[0]]()

    def counts(self) -> tuple[int, int]:
        return _graphs_compiled(), len(self._replays)

    def release(self) -> None:
        self._recorder.release()


def early_kernels(num_rows: int, num_kv_heads: int) -> Mapping[str, str | None]:
    """Those of EARLY_KERNELS that start early in a step of so many rows, if any do."""
    if num_rows * num_kv_heads <= EARLY_ATTENTION_HEADS:
        return EARLY_KERNELS
    return {name: before for name, before in EARLY_KERNELS.items() if name != "_paged_decode_kernel"}


def compiled_block(max_batch: int, backend: str | Callable = "inductor", *, keep: bool = True) -> RunBlock:
    """One compiled function for all blocks of a model, whose weights and pools are its inputs.

    It compiles twice: for up to linear.MAX_ROWS rows, and for more, up to `max_batch`.

    Args:
        keep: another start may reuse what is compiled. False where functions other than ours are in it:
            torch would not notice that somebody edited theirs.
    """
    _configure_inductor(keep)
    compiled = torch.compile(call_block, fullgraph=True, dynamic=False, backend=backend)

    def run(
        block: nn.Module,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        inputs: AttentionInputs,
    ) -> tuple[Tensor, Tensor]:
        for tensor in (x, residual, positions, inputs.row_ids, inputs.context_len, inputs.slot_mapping):
            _mark_rows(tensor, max_batch)
        return compiled(block, x, residual, positions, cos_sin, inputs)

    return run


class WholeStep:
    """Mode "full": the whole step as one compiled graph, which CUDA graph trees record.

    It compiles twice, as `compiled_block`, whose arguments it takes.
    """

    def __init__(self, step: DecodeStep, device: torch.device, *, max_batch: int, keep: bool = True) -> None:
        _configure_inductor(keep)
        torch._inductor.config.triton.cudagraph_or_error = True
        torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None
        torch._inductor.config.triton.slow_path_cudagraph_asserts = False
        self.own_step = None
        self._compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)
        self._device = device
        self._max_batch = max_batch
        self._num_probes = 0

    def record(self, row_ids: Tensor) -> None:
        torch._dynamo.mark_static_address(row_ids, guard=False)
        _mark_rows(row_ids, self._max_batch)
        for _ in range(2):  # the code runs uncaptured, then is recorded
            self._compiled(row_ids)

    def replay(self, row_ids: Tensor) -> Tensor:
        return self._compiled(row_ids)

    def counts(self) -> tuple[int, int]:
        from torch._inductor import cudagraph_trees  # lazy: it touches CUDA

        manager = cudagraph_trees.get_manager(self._device.index or 0, create_if_none_exists=False)
        if manager is None:
            return _graphs_compiled(), 0
        # Every graph takes the next id, and so does this look at it.
        recorded = manager.new_graph_id().id - self._num_probes
        self._num_probes += 1
        return _graphs_compiled(), recorded

    def release(self) -> None:
        from torch._inductor import cudagraph_trees  # lazy: as above

        cudagraph_trees.reset_cudagraph_trees()


def _mark_rows(tensor: Tensor, max_batch: int) -> None:
    """Let the first dimension vary over all the batch sizes, at least 2, for which the same kernels run."""
    if tensor.shape[0] <= MAX_ROWS:
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=MAX_ROWS)
    else:
        torch._dynamo.mark_dynamic(tensor, 0, min=MAX_ROWS + 1, max=max(max_batch, MAX_ROWS + 2))


def _configure_inductor(keep: bool) -> None:
    _without_workers()
    # Floats of modules (eps, scale) are constants, not inputs with guards.
    torch._dynamo.config.specialize_float = True
    # torch's own key has the kernels' sources, not the host code that chooses their grids and options.
    ours = Path(__file__).parents[1], Path(triton_kernels.__path__[0])
    torch.compiler.config.cache_key_tag = sources_digest(ours) if keep else secrets.token_hex()


def _graphs_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def import_compiler() -> None:
    """Import what torch.compile otherwise imports on first use: some two seconds."""
    _without_workers()
    importlib.import_module("torch._inductor.compile_fx")


def _without_workers() -> None:
    """Have torch start no processes to compile in: on import, or when it compiles; a setting of the thread.

    What they compile has another key in Triton's cache than what this process does, so the next start would
    compile our kernels again; and there are few.
    """
    torch._inductor.config.compile_threads = 1


class KernelCompilations:
    """Counts Triton kernels from here on.

    Attributes:
        count: those that a launch waited for, compiled or read from disk, without torch.compile's; while
            serving it should be none.
        num_compiled: all that were compiled in this process, because no former start did.
    """

    def __init__(self) -> None:
        self.count = 0
        self.num_compiled = 0
        knobs.runtime.jit_post_compile_hook = self._note
        knobs.compilation.listener = self._note_compilation

    def _note(self, *, is_manual_warmup: bool = False, **_: object) -> None:
        self.count += not is_manual_warmup

    def _note_compilation(self, *, cache_hit: bool, **_: object) -> None:
        self.num_compiled += not cache_hit
