"""Attention by flashinfer's FlashAttention 2 and 3 kernels over our pool (flashinfer's layout NHD).

flashinfer plans each batch on the host: from the rows' lengths it divides the work among multiprocessors and
writes tables to the device, which every layer then uses. In wrappers of a fixed batch size these tables stay
in place, so that CUDA graphs can read them.

Promise: planning and running do not wait for launched steps. The next `attend` of the same kind of step (for
decode: with the same number of rows) computes the batch that was planned last.

R rows, T new tokens, H query heads, K KV heads, D head dim, P pages, S page size.
"""

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.interface import AttentionInputs, BatchPages
from triton_kernels.launch import align_up

MIB = 1 << 20
WORKSPACE_BYTES = 128 * MIB
"""The size that flashinfer recommends for partial results. Models with many heads may need more."""
TABLE_BYTES = MIB
"""Size of the tables of one batch size: three numbers per tile, a few per row."""
LARGEST_TILE = 128
"""Most query heads times tokens of one program of the FA2 kernels."""


class Copy(Protocol):
    """Copies int32 numbers from host to device in stream order, without waiting for launched work."""

    def __call__(self, target: Tensor, source: np.ndarray) -> None: ...


class AttentionShape(NamedTuple):
    """The sizes that all batches of a model share; heads are those of this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    windows: frozenset[int]  # of the model's layers; 0 = a layer that sees all
    dtype: torch.dtype
    device: torch.device


class _Planned(ABC):
    """Attention over the batch that was planned last; registers itself for the op."""

    def __init__(self) -> None:
        self._number = next(_NUMBERS)
        _BACKENDS[self._number] = self

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        kv_scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] over the planned rows' pages of k_cache and v_cache [P, S, K, D] -> [T, H, D]."""
        assert softcap == 0, "choice.py refuses this backend for models with a soft cap"
        assert sinks is None, "choice.py refuses this backend for models with sinks"
        assert kv_scales is None, "choice.py refuses this backend for a cache of FP8"
        return torch.ops.minisgl.flashinfer_attend(q, k_cache, v_cache, self._number, window)

    @abstractmethod
    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int) -> Tensor:
        """Compute attention; the op calls this."""


# The graphs of torch.compile hold numbers and tensors, not objects, so the op finds its backend by number.
_BACKENDS: weakref.WeakValueDictionary[int, _Planned] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class FlashinferPrefill(_Planned):
    """Prompts, in batches of any shape; never recorded as CUDA graphs.

    Args:
        flashinfer: the package.
        kernels: "fa2" or "fa3".
        num_processors: multiprocessors of the GPU.
    """

    def __init__(
        self, flashinfer: Any, kernels: str, shape: AttentionShape, copy: Copy, num_processors: int
    ) -> None:
        super().__init__()
        self._shape = shape
        self._copy = copy
        workspace = _workspace(split_workspace_bytes(shape, num_processors, 0, LARGEST_TILE), shape.device)

        def wrapper() -> "_Wrapper":
            own = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernels)
            return _Wrapper(own, shape.device)

        # Two sets take turns: a prompt's tables are copied after the decodes of the same step, so the copy
        # may still be pending when the next step is planned.
        self._turns = [{window: wrapper() for window in shape.windows} for _ in range(2)]
        self.plan(_one_page_each(1))  # loads the kernels

    def plan(self, pages: BatchPages) -> None:
        """Prepare `attend` for this batch."""
        shape = self._shape
        indices = torch.empty(align_up(len(pages.page_ids)), dtype=torch.int32, device=shape.device)
        self._copy(indices, _packed(pages.page_ids))
        self._turns.reverse()
        for window, wrapper in self._turns[0].items():
            wrapper.plan(
                wrapper.own.plan,
                torch.from_numpy(pages.row_start),
                torch.from_numpy(pages.page_start),
                indices[: len(pages.page_ids)],
                torch.from_numpy(pages.last_page_len),
                *_sizes(shape),
                causal=True,
                **_options(shape, window),
            )

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int) -> Tensor:
        """Compute attention; the op calls this."""
        return self._turns[0][window].own.run(q, (k_cache, v_cache), out=q.new_empty(q.shape))


class FlashinferDecode(_Planned):
    """Decode steps by the FA2 kernels, which process all query heads of a KV head together.

    Args:
        flashinfer: the package.
        buckets: batch sizes with a CUDA graph; steps of other sizes use a wrapper without graph support.
        max_pages: most pages of all rows of a batch together.
        num_processors: multiprocessors of the GPU.
    """

    def __init__(
        self,
        flashinfer: Any,
        shape: AttentionShape,
        copy: Copy,
        num_processors: int,
        *,
        buckets: tuple[int, ...],
        max_pages: int,
    ) -> None:
        self._fast_plan = flashinfer.fast_decode_plan
        super().__init__()
        self._shape = shape
        self._copy = copy
        most_rows = max(buckets, default=0)
        tile = tile_of(shape.num_heads // shape.num_kv_heads, shape.head_dim)
        workspace = _workspace(split_workspace_bytes(shape, num_processors, most_rows, tile), shape.device)
        # All batch sizes share one buffer: each step's copy and kernels run in stream order.
        self._packed = torch.zeros(
            align_up(most_rows + 1) + align_up(most_rows) + align_up(max_pages),
            dtype=torch.int32,
            device=shape.device,
        )
        tables = {
            window: torch.zeros(TABLE_BYTES, dtype=torch.uint8, device=shape.device)
            for window in shape.windows
        }

        def wrapper(window: int, rows: int) -> "_Wrapper":
            page_start, last_page_len, page_ids = self._buffers(rows)
            own = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=page_start,
                paged_kv_indices_buffer=page_ids,
                paged_kv_last_page_len_buffer=last_page_len,
                backend="fa2",
            )
            own.reset_workspace_buffer(workspace, tables[window])
            wrapper = _Wrapper(own, shape.device)
            # This loads the kernels, which the fast plan does not.
            self._plan_anew(wrapper, window, _one_page_each(rows))
            return wrapper

        self._recorded = {
            rows: {window: wrapper(window, rows) for window in shape.windows} for rows in buckets
        }
        self._others = {
            window: _Wrapper(
                flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    workspace, "NHD", use_tensor_cores=True, backend="fa2"
                ),
                shape.device,
            )
            for window in shape.windows
        }

    def plan(self, pages: BatchPages) -> None:
        """Prepare `attend`, or the replay of a graph that contains it, for this batch."""
        rows = len(pages.last_page_len)
        recorded = self._recorded.get(rows)
        if recorded is None:
            for window, wrapper in self._others.items():
                self._plan_anew(wrapper, window, pages)
            return
        packed = _packed(pages.page_start, pages.last_page_len, pages.page_ids)
        self._copy(self._packed[: len(packed)], packed)
        page_start = torch.from_numpy(pages.page_start)
        for window, wrapper in recorded.items():
            wrapper.plan(
                self._fast_plan,
                wrapper.own,
                page_start,
                self._buffers(rows)[2][: len(pages.page_ids)],
                torch.from_numpy(pages.last_page_len),
                *_sizes(self._shape),
                global_override_indptr_cpu=page_start,
                **_options(self._shape, window),
            )

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int) -> Tensor:
        """Compute attention; the op calls this."""
        wrapper = self._recorded.get(q.shape[0], self._others)[window]
        return wrapper.own.run(q, (k_cache, v_cache), out=q.new_empty(q.shape))

    def _plan_anew(self, wrapper: "_Wrapper", window: int, pages: BatchPages) -> None:
        shape = self._shape
        indices = torch.empty(align_up(len(pages.page_ids)), dtype=torch.int32, device=shape.device)
        self._copy(indices, _packed(pages.page_ids))
        wrapper.plan(
            wrapper.own.plan,
            torch.from_numpy(pages.page_start),
            indices[: len(pages.page_ids)],
            torch.from_numpy(pages.last_page_len),
            *_sizes(shape),
            **_options(shape, window),
        )

    def _buffers(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the packed buffer for this many rows: page_start, last_page_len and page_ids."""
        first, second = align_up(rows + 1), align_up(rows + 1) + align_up(rows)
        return self._packed[: rows + 1], self._packed[first : first + rows], self._packed[second:]


def tile_of(group: int, head_dim: int) -> int:
    """Query heads per program of the FA2 kernels in a decode step (flashinfer's FA2DetermineCtaTileQ)."""
    if group > 64 and head_dim < 256:
        return 128
    return 64 if group > 16 else 16


def split_workspace_bytes(shape: AttentionShape, num_processors: int, rows: int, tile: int) -> int:
    """Most bytes of the partial results of rows with split keys (after PrefillPlan in flashinfer's
    scheduler.cuh, 0.6.14).

    Args:
        rows: rows of the largest decode graph, which reserves a tile for each of them; 0 = no graph.
    """
    group = shape.num_heads // shape.num_kv_heads
    tiles = max(2 * num_processors // shape.num_kv_heads, -(-rows * group // tile) + rows)
    return shape.num_heads * tiles * tile * (shape.head_dim + 1) * 4 + MIB


class _Wrapper:
    """A flashinfer wrapper, with the event after which its pinned memory may be overwritten."""

    def __init__(self, own: Any, device: torch.device) -> None:
        self.own = own
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def plan(self, function: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Call a planning function once the last plan's copy to the device is done."""
        if self._copied is None:
            function(*arguments, **options)
            return
        self._copied.synchronize()
        function(*arguments, **options)
        self._copied.record()


def _sizes(shape: AttentionShape) -> tuple[int, int, int, int]:
    """Planning arguments that both kinds of step share."""
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size


def _options(shape: AttentionShape, window: int) -> dict[str, Any]:
    """Planning arguments that both kinds of step share."""
    return {
        "sm_scale": shape.scale,
        "window_left": window - 1,  # tokens before the query's own; -1 = all
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
    }


def _workspace(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(max(num_bytes, WORKSPACE_BYTES), dtype=torch.uint8, device=device)


def _one_page_each(rows: int) -> BatchPages:
    """A batch in which each row has one key, in page 0."""
    starts = np.arange(rows + 1, dtype=np.int32)
    return BatchPages(starts, starts, np.ones(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32))


def _packed(*parts: np.ndarray) -> np.ndarray:
    """Concatenate the parts, each aligned."""
    packed = np.zeros(sum(align_up(len(part)) for part in parts), dtype=np.int32)
    begin = 0
    for part in parts:
        packed[begin : begin + len(part)] = part
        begin += align_up(len(part))
    return packed


torch.library.define(
    "minisgl::flashinfer_attend",
    "(Tensor q, Tensor k_cache, Tensor v_cache, int backend, int window) -> Tensor",
)


@torch.library.impl("minisgl::flashinfer_attend", ("cpu", "cuda"))
def _flashinfer_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, backend: int, window: int) -> Tensor:
    return _BACKENDS[backend].run(q, k_cache, v_cache, window)


@torch.library.register_fake("minisgl::flashinfer_attend")
def _flashinfer_attend_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, backend: int, window: int) -> Tensor:
    return q.new_empty(q.shape)
