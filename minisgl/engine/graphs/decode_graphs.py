"""The decode step as CUDA graphs: one per batch bucket, recorded once and then replayed.

`--compile-mode` selects how graphs are made:

    layers   torch.compile over one block, which all blocks share; one CUDA graph around the whole step
    full     torch.compile(mode="reduce-overhead") over the whole step: CUDA graph trees record it
    off      the uncompiled step, in one CUDA graph

Promise: after `warm_up`, a decode batch up to the largest bucket compiles and records nothing. A violation is
counted, and raises with --strict-compile. Use it from one thread: CUDA graph trees keep state per thread.
"""

import importlib
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
from minisgl.engine.graphs.buckets import bucket_for
from minisgl.engine.graphs.durations import MeasuredDurations
from minisgl.engine.graphs.graph_recorder import GraphRecorder
from minisgl.engine.graphs.graph_table import GraphTable
from minisgl.engine.step.inputs import row_ids_to_device
from minisgl.engine.step.step_inputs import decode_shapes
from minisgl.engine.step.steps import DecodeStep, RowLogits, StepOutput
from minisgl.errors import MinisglError
from minisgl.models.decoder import RunBlock, call_block
from triton_kernels.decode_config import DecodeShape, starts_early
from triton_kernels.early_start import EARLY_KERNELS
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.launch import ceil_div
from triton_kernels.linear import MAX_ROWS

MAX_MEASURED_BUCKETS = 4
"""Most buckets whose duration is measured at the start."""


class StepGraphs(Protocol):
    """Graphs of the decode step, one per recorded tensor of row ids."""

    def record(self, row_ids: Tensor) -> None:
        """Compile the step if needed, and record it on these row ids, int32 [R], which must stay in place."""
        ...

    def replay(self, row_ids: Tensor) -> StepOutput:
        """Run the step on a recorded tensor of row ids. The next replay overwrites the returned tensors."""
        ...

    def counts(self) -> tuple[int, int]:
        """(graphs compiled, CUDA graphs recorded) in this process so far."""
        ...

    def release(self) -> None:
        """Free the CUDA graphs. No step can be replayed afterwards."""
        ...


PlanDecode = Callable[[tuple[int, ...], int], None]
"""Called with a batch's rows and its padded number of rows, before the batch runs or is recorded."""


def no_plan(rows: tuple[int, ...], num_rows: int) -> None:
    """A `PlanDecode` that does nothing."""


@dataclass
class RecordedRows:
    """The input of one recorded decode step."""

    row_ids: Tensor  # int32 [bucket]
    rows: tuple[int, ...] = ()  # that row_ids holds, before padding


class DecodeGraphs:
    """The decode step, which replays the graph of the batch's bucket.

    Args:
        step: the uncompiled step, which runs batches larger than all buckets.
        graphs: compiles and records the step.
        buckets: ascending batch sizes to record, at least 2.

    Attributes:
        table: the graphs by bucket. The largest exists from the start.
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
        self.table: GraphTable[int, RecordedRows] = GraphTable(self._record, reversed(buckets))
        self._device = device
        self._strict = strict
        self._max_rows = step.rows.max_rows
        self._run_us = MeasuredDurations()  # by rows
        self.num_recompiles = 0
        self.num_graph_misses = 0

    def release(self) -> None:
        """`StepGraphs.release`."""
        self._graphs.release()

    def warm_up(
        self,
        buckets: Iterable[int],
        on_bucket: Callable[[int, float], None],
        clock: Callable[[], float] = time.perf_counter,
        minimum_over_ranks: Callable[[int], int] = int,
    ) -> None:
        """Compile and record these buckets on padding rows, largest first. Then measure some of them.

        Args:
            on_bucket: called after each bucket with its size and the host's milliseconds.
            minimum_over_ranks: the smallest value of all ranks. Ranks must decide by equal durations.
        """
        for bucket in sorted(buckets, reverse=True):
            started = time.perf_counter()
            self._graphs.replay(self.table.record(bucket).row_ids)
            on_bucket(bucket, (time.perf_counter() - started) * 1e3)
        self._wait()  # not after each bucket: the device runs while the host records the next one
        sizes = self.table.sizes
        with self._step.rows.filled_for_measuring(self._step.model.vocab_size):
            for bucket in sorted(sizes[:: -ceil_div(len(sizes), MAX_MEASURED_BUCKETS)]):
                row_ids = self.table[bucket].row_ids
                row_ids.copy_(torch.arange(bucket, device=self._device) % self._max_rows)
                self._run_us.add(
                    bucket, minimum_over_ranks(min(self._measure_us(bucket, clock) for _ in range(2)))
                )
                row_ids.fill_(self._max_rows)

    def _measure_us(self, bucket: int, clock: Callable[[], float]) -> int:
        """Microseconds of one step of rows without context."""
        self._step.rows.context_len.zero_()
        self._plan((), bucket)
        self._wait()
        begin = clock()
        self._graphs.replay(self.table[bucket].row_ids)
        self._wait()
        return round(1e6 * (clock() - begin))

    def duration_us(self, num_rows: int) -> float:
        """Estimated microseconds of a step of `num_rows` rows, without the time that grows with their keys.

        It interpolates what `warm_up` measured. Above the largest graph, it is the time of that graph.
        """
        return self._run_us.estimate_us(self.bucket_of(num_rows) or self._buckets[-1])

    def bucket_of(self, num_rows: int) -> int | None:
        """The size of the recorded graph that holds `num_rows` rows; None if there is none."""
        return bucket_for(num_rows, self.table.sizes)

    def __call__(self, rows: tuple[int, ...]) -> Tensor:
        """Decode these rows. Returns int32 [>= len(rows)] on the device, which the next call overwrites."""
        output = self._replay(rows)
        return output.token_ids if output is not None else self._step(self._uncaptured(rows))

    def logits(self, rows: tuple[int, ...]) -> RowLogits:
        """Decode these rows for a step with extras, which samples them itself.

        It replays the same graphs, whose tokens are dropped. Padding rows follow the others. The next call
        overwrites the result.
        """
        output = self._replay(rows)
        if output is not None and output.logits is not None:
            return output.logits
        return self._step.logits(self._uncaptured(rows))

    def _replay(self, rows: tuple[int, ...]) -> StepOutput | None:
        """Replay the graph that holds these rows. Returns None if there is none."""
        if self.table.num_missing:
            self.table.want(bucket_for(len(rows), self._buckets))
        bucket = self.bucket_of(len(rows))
        if bucket is None:
            self._note_miss(f"no graph holds {len(rows)} rows (the largest: {self._buckets[-1]})")
            return None
        recorded = self.table[bucket]
        if recorded.rows != rows:
            padded = [*rows, *[self._max_rows] * (bucket - len(rows))]
            on_cuda = self._device.type == "cuda"
            staged = torch.tensor(padded, dtype=torch.int32, pin_memory=on_cuda)
            recorded.row_ids.copy_(staged, non_blocking=True)
            recorded.rows = rows
        self._plan(rows, bucket)
        before = self._graphs.counts()
        output = self._graphs.replay(recorded.row_ids)
        after = self._graphs.counts()
        if after != before:
            self.num_recompiles += after[0] - before[0]
            self._note_miss(f"a decode step of {len(rows)} rows was compiled or recorded while serving")
        return output

    def _uncaptured(self, rows: tuple[int, ...]) -> Tensor:
        """Prepare an uncaptured step of these rows. Returns their ids on the device."""
        self._plan(rows, len(rows))
        return row_ids_to_device(self._device, rows)

    def _record(self, bucket: int) -> RecordedRows:
        row_ids = torch.full((bucket,), self._max_rows, dtype=torch.int32, device=self._device)
        self._plan((), bucket)
        self._graphs.record(row_ids)
        return RecordedRows(row_ids)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _note_miss(self, what: str) -> None:
        self.num_graph_misses += 1
        if self._strict:
            raise MinisglError(f"--strict-compile: {what}")


class CapturedSteps:
    """Modes "layers" and "off": we record the whole step, with compiled or uncompiled blocks.

    Args:
        early_rows: most rows of a step in which kernels start early.
        max_batch: see `compiled_block`.
        keep: see `compiled_block`.
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
        self._step = DecodeStep(step.model, step.rows, run_block)
        self._recorder = recorder
        self._early_rows = early_rows
        self._replays: dict[int, Callable[[], StepOutput]] = {}  # by number of rows

    def record(self, row_ids: Tensor) -> None:
        num_rows = row_ids.shape[0]
        early = None
        if num_rows <= self._early_rows:
            early = early_kernels(num_rows, decode_shapes(self._step.model), gpu_of(row_ids.device))
        self._replays[num_rows] = self._recorder.record(lambda: self._step.run(row_ids), early=early)

    def replay(self, row_ids: Tensor) -> StepOutput:
        return self._replays[row_ids.shape[0]]()

    def counts(self) -> tuple[int, int]:
        return _graphs_compiled(), len(self._replays)

    def release(self) -> None:
        self._recorder.release()


def early_kernels(num_rows: int, shapes: Iterable[DecodeShape], gpu: Gpu) -> Mapping[str, str | None]:
    """The EARLY_KERNELS that start early in a step of `num_rows` rows; attention if all layers gain by it."""
    if all(starts_early(num_rows, shape, gpu) for shape in shapes):
        return EARLY_KERNELS
    return {name: before for name, before in EARLY_KERNELS.items() if name != "_paged_decode_kernel"}


def compiled_block(max_batch: int, backend: str | Callable = "inductor", *, keep: bool = True) -> RunBlock:
    """One compiled function for all blocks of a model. It takes their weights and KV pools as inputs.

    It compiles twice: for up to linear.MAX_ROWS rows, and for more rows, up to `max_batch`.

    Args:
        keep: let later starts reuse the compiled code. Must be False if it contains a user's functions,
            because torch does not notice when they are edited.
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
        if inputs.layer_input is not None:
            _mark_rows(inputs.layer_input, max_batch)
        return compiled(block, x, residual, positions, cos_sin, inputs)

    return run


class WholeStep:
    """Mode "full": the whole step is one compiled graph, which CUDA graph trees record.

    It compiles twice, and takes the same arguments as `compiled_block`. It keeps no logits, because the trees
    record again where an earlier result is still in use.
    """

    def __init__(self, step: DecodeStep, device: torch.device, *, max_batch: int, keep: bool = True) -> None:
        _configure_inductor(keep)
        torch._inductor.config.triton.cudagraph_or_error = True
        torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None
        torch._inductor.config.triton.slow_path_cudagraph_asserts = False
        self._compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)
        self._device = device
        self._max_batch = max_batch
        self._num_probes = 0

    def record(self, row_ids: Tensor) -> None:
        torch._dynamo.mark_static_address(row_ids, guard=False)
        _mark_rows(row_ids, self._max_batch)
        for _ in range(2):  # the first call runs the code, the second one records it
            self._compiled(row_ids)

    def replay(self, row_ids: Tensor) -> StepOutput:
        return StepOutput(self._compiled(row_ids), None)

    def counts(self) -> tuple[int, int]:
        from torch._inductor import cudagraph_trees  # lazy: it touches CUDA

        manager = cudagraph_trees.get_manager(self._device.index or 0, create_if_none_exists=False)
        if manager is None:
            return _graphs_compiled(), 0
        # Every graph takes the next id, and so does this call.
        recorded = manager.new_graph_id().id - self._num_probes
        self._num_probes += 1
        return _graphs_compiled(), recorded

    def release(self) -> None:
        from torch._inductor import cudagraph_trees  # lazy: as above

        cudagraph_trees.reset_cudagraph_trees()


def _mark_rows(tensor: Tensor, max_batch: int) -> None:
    """Mark the first dimension as dynamic, over the batch sizes from 2 that run the same kernels."""
    if tensor.shape[0] <= MAX_ROWS:
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=MAX_ROWS)
    else:
        torch._dynamo.mark_dynamic(tensor, 0, min=MAX_ROWS + 1, max=max(max_batch, MAX_ROWS + 2))


def _configure_inductor(keep: bool) -> None:
    _without_workers()
    # Floats of modules (eps, scale) become constants, not inputs with guards.
    torch._dynamo.config.specialize_float = True
    # torch's cache key has the kernels' sources, but not the host code that chooses grids and options.
    ours = Path(__file__).parents[1], Path(triton_kernels.__path__[0])
    torch.compiler.config.cache_key_tag = sources_digest(ours) if keep else secrets.token_hex()


def _graphs_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def import_compiler() -> None:
    """Import the modules that torch.compile imports on first use, which takes about two seconds."""
    _without_workers()
    importlib.import_module("torch._inductor.compile_fx")


def _without_workers() -> None:
    """Make torch compile in this process instead of worker processes. The setting is per thread.

    Triton caches a worker's kernels under other keys than this process's kernels, so the next start would
    compile ours again. There are only few kernels to compile.
    """
    torch._inductor.config.compile_threads = 1


class KernelCompilations:
    """Counts compilations of Triton kernels, from its construction on.

    Attributes:
        count: kernels that a launch waited for, compiled or read from disk, without torch.compile's kernels.
            While serving it should stay 0.
        num_compiled: all kernels compiled in this process, that is, not found in the cache.
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
