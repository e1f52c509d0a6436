"""Records functions as CUDA graphs. Promise: graphs share their memory, results included."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from minisgl.engine.graphs.early_starts import instantiate_with_early_starts

Result = TypeVar("Result")


class Record(Protocol):
    """Records a function. The returned one replays it on the current contents of its tensors."""

    def __call__(self, run: Callable[[], Result], /) -> Callable[[], Result]: ...


class GraphRecorder:
    """Records functions as CUDA graphs that share one memory pool.

    Because of the shared pool, replays must follow each other on one stream, and each overwrites the results
    of all others.

    Args:
        early_starts: allow graphs in which a kernel starts before its predecessor has ended. All kernels must
            be ours, and the GPU must support it: early_start.can_start_early.
    """

    def __init__(self, *, early_starts: bool = False) -> None:
        self._can_start_early = early_starts
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def record(
        self,
        run: Callable[[], Result],
        *,
        early: Mapping[str, str | None] | None = None,
    ) -> Callable[[], Result]:
        """Run a function once, which compiles its kernels, then record it. The returned function replays it.

        Args:
            run: returns a tensor, or a named tuple of such results. Those of a replay lie in the pool and are
                valid until the next replay of any graph.
            early: kernels that may start early, some of EARLY_KERNELS. Ignored without `early_starts`.

        Raises:
            Exception: the same as `run`. The recording has ended then.
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
                # Not torch.cuda.graph(): it collects garbage and empties the cache before each recording.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                finally:
                    graph.capture_end()
                    _free_cublas_workspaces()
                if early is not None:
                    self._can_start_early = instantiate_with_early_starts(graph, early)
        finally:
            current.wait_stream(self._stream)  # also after a failure: the first run may still be in progress
        self._graphs.append(graph)
        # So later recordings may use the same memory: the logits of all graphs would take gigabytes.
        unowned = _without_ownership(result)

        def replay() -> Result:
            graph.replay()
            return unowned

        return replay

    def release(self) -> None:
        """Free all graphs. Nothing can be replayed afterwards."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old pool ended with its last graph


def _free_cublas_workspaces() -> None:
    """Make cuBLAS allocate a new workspace. Call it before and after a recording.

    Within a recording, cuBLAS then allocates from the graph's pool, which keeps the workspace. CUDA graph
    trees of this process (mode "full", or other compiled code) free any shared workspace when they record,
    also if a graph of ours still used it.
    """
    torch._C._cuda_clearCublasWorkspaces()


class _Memory:
    """A tensor's memory, in the form from which `torch.as_tensor` makes a tensor without ownership."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"<i{size}" if size > 1 else "|i1",  # no format knows bfloat16
        }


def _without_ownership(result: Any) -> Any:
    """The same tensors, in a tensor or named tuples, which do not keep their memory from being used again."""
    if isinstance(result, Tensor):
        return torch.as_tensor(_Memory(result), device=result.device).view(result.dtype)
    if isinstance(result, tuple):
        return type(result)(*map(_without_ownership, result))
    return result
