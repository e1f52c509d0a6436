"""The decode step under torch.compile: compiled once, recorded as one CUDA graph per batch bucket.

Promise: after `warm_up` a decode batch up to the largest bucket compiles nothing and records nothing;
whatever does all the same is counted, and an error with --strict-compile. Use from one thread only:
CUDA graph trees keep their state per thread.
"""

import time
from collections.abc import Callable

import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor
from triton import knobs

from minisgl.engine.buckets import bucket_for
from minisgl.engine.steps import DecodeStep
from minisgl.errors import MinisglError


class CompiledDecode:
    """A decode step that replays a graph.

    Args:
        buckets: ascending batch sizes to record; one of 1 gets code of its own, the others share one
            dynamic compilation.
        cudagraph_or_error: make anything that keeps a graph from being recorded an error.
    """

    def __init__(
        self, step: DecodeStep, buckets: tuple[int, ...], device: torch.device, *, strict: bool
    ) -> None:
        self._step = step
        self._buckets = buckets
        self._device = device
        self._strict = strict
        self._max_rows = step.rows.max_rows
        # Floats of modules (eps, scale) are constants, not inputs with guards.
        torch._dynamo.config.specialize_float = True
        torch._inductor.config.triton.cudagraph_or_error = True
        torch._inductor.config.triton.cudagraph_dynamic_shape_warn_limit = None
        torch._inductor.config.triton.slow_path_cudagraph_asserts = False
        self._compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)
        self._row_ids: dict[int, Tensor] = {}
        for bucket in buckets:
            row_ids = torch.full((bucket,), self._max_rows, dtype=torch.int32, device=device)
            torch._dynamo.mark_static_address(row_ids, guard=False)
            if bucket > 1:
                torch._dynamo.mark_dynamic(row_ids, 0, min=2, max=max(buckets[-1], 3))
            self._row_ids[bucket] = row_ids
        self._batches: dict[int, tuple[int, ...]] = {}  # bucket -> rows its row_ids hold
        self._expected = (0, 0)
        self._num_probes = 0
        self.num_recompiles = 0
        self.num_graph_misses = 0

    def warm_up(self, on_bucket: Callable[[int, float], None]) -> None:
        """Compile and record every bucket, largest first, with padding rows only.

        Calls `on_bucket(bucket, duration_ms)` after each.
        """
        for bucket in reversed(self._buckets):
            started = time.perf_counter()
            for _ in range(3):  # the code runs uncaptured, is recorded, is replayed
                self._compiled(self._row_ids[bucket])
            torch.cuda.synchronize(self._device)
            on_bucket(bucket, (time.perf_counter() - started) * 1e3)
        self._expected = self._counts()

    def __call__(self, rows: tuple[int, ...]) -> Tensor:
        """Decode these rows; int32 [at least len(rows)] on the device, overwritten by the next call."""
        bucket = bucket_for(len(rows), self._buckets)
        if bucket is None:
            self._note_miss(f"no graph holds {len(rows)} rows (the largest: {self._buckets[-1]})")
            return self._step(torch.tensor(rows, dtype=torch.int32).to(self._device))
        row_ids = self._row_ids[bucket]
        if self._batches.get(bucket) != rows:
            padded = [*rows, *[self._max_rows] * (bucket - len(rows))]
            row_ids.copy_(torch.tensor(padded, dtype=torch.int32).pin_memory(), non_blocking=True)
            self._batches[bucket] = rows
        token_ids = self._compiled(row_ids)
        counts = self._counts()
        if counts != self._expected:
            self.num_recompiles += counts[0] - self._expected[0]
            self._expected = counts
            self._note_miss(f"a decode step of {len(rows)} rows was compiled or recorded while serving")
        return token_ids

    def _note_miss(self, what: str) -> None:
        self.num_graph_misses += 1
        if self._strict:
            raise MinisglError(f"--strict-compile: {what}")

    def _counts(self) -> tuple[int, int]:
        """(graphs compiled, CUDA graphs recorded) in this process so far."""
        from torch._inductor import cudagraph_trees  # lazy: it touches CUDA

        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        manager = cudagraph_trees.get_manager(self._device.index or 0, create_if_none_exists=False)
        if manager is None:
            return compiled, 0
        # Every graph takes the next id, and so does this look at it.
        recorded = manager.new_graph_id().id - self._num_probes
        self._num_probes += 1
        return compiled, recorded


class KernelCompilations:
    """Counts Triton kernels that are compiled outside torch.compile, which after warm-up should be none."""

    def __init__(self) -> None:
        self.count = 0
        knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *, is_manual_warmup: bool = False, **_: object) -> None:
        self.count += 1
