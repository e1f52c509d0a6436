"""Attention by flashinfer's kernels after FlashAttention 2 and 3, over our pool as it is (its layout NHD).

flashinfer divides a batch's work among the multiprocessors on the host, from the rows' lengths: each batch is
planned once, which writes tables on the device, and then run in every layer. Wrappers of a fixed batch size
keep these tables where they are, so that a recorded CUDA graph may read them.

Promise: planning and running wait for no launched step. What is planned is what the next `attend` of the same
kind of step, and of as many rows in a decode step, computes.

R rows, T new tokens, H query heads, K KV heads, D head dim, P pages, S page size. Workspaces follow
PrefillPlan in flashinfer's scheduler.cuh (0.6.14).
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
"""What flashinfer recommends for partial results; a batch of many heads may need more."""
TABLE_BYTES = MIB
"""Of the tables of one batch size: three numbers for each of its tiles, a few for each row."""
LARGEST_TILE = 128
"""Query heads times tokens that a program of the FA2 kernels takes, at most."""


class Copy(Protocol):
    """Copies int32 numbers from the host to the device, behind what was launched, without waiting for it."""

    def __call__(self, target: Tensor, source: np.ndarray) -> None: ...


class AttentionShape(NamedTuple):
    """What all batches of a model have in common; heads as this rank has them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    windows: frozenset[int]  # of the model's layers; 0 = a layer that sees all
    dtype: torch.dtype
    device: torch.device


class _Planned(ABC):
    """Attention over the batch that was planned last."""

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
    ) -> Tensor:
        """q [T, H, D] over the planned rows' pages of k_cache and v_cache [P, S, K, D] -> [T, H, D]."""
        return torch.ops.minisgl.flashinfer_attend(q, k_cache, v_cache, self._number, window)

    @abstractmethod
    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int) -> Tensor:
        """What the op does."""


# torch.compile takes numbers and tensors into its graph, not objects, so the op finds its backend by number.
_BACKENDS: weakref.WeakValueDictionary[int, _Planned] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class FlashinferPrefill(_Planned):
    """Prompts, in batches of any shape; never recorded.

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

        # Two take turns: a prompt's tables are copied behind the decodes of their step, so they may still be
        # on their way when the next step is planned.
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
        """`attend`, as the op calls it."""
        return self._turns[0][window].own.run(q, (k_cache, v_cache), out=q.new_empty(q.shape))


class FlashinferDecode(_Planned):
    """Decode steps by the FA2 kernels, whose tensor cores take all query heads of a KV head at once.

    Args:
        flashinfer: the package.
        buckets: batch sizes that are recorded; a step of another size is planned without a graph in mind.
        max_pages: that all rows of a batch can have together.
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
        # One set of tables serves all batch sizes: steps run one after the other, each behind its own tables.
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
            self._plan_anew(wrapper, window, _one_page_each(rows))  # loads the kernels: the fast way does not
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
        """Prepare `attend`, or the replay of what was recorded with it, for this batch."""
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
        """`attend`, as the op calls it."""
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
        """page_start, last_page_len and page_ids of a batch of so many rows: parts of the packed buffer."""
        first, second = align_up(rows + 1), align_up(rows + 1) + align_up(rows)
        return self._packed[: rows + 1], self._packed[first : first + rows], self._packed[second:]


def tile_of(group: int, head_dim: int) -> int:
    """Query heads that a program of the FA2 kernels takes in a decode step (FA2DetermineCtaTileQ)."""
    if group > 64 and head_dim < 256:
        return 128
    return 64 if group > 16 else 16


def split_workspace_bytes(shape: AttentionShape, num_processors: int, rows: int, tile: int) -> int:
    """What the partial results of rows whose keys are split may take, in bytes.

    Args:
        rows: of the largest recorded decode step, which has a place for a tile of each; 0 = none.
    """
    group = shape.num_heads // shape.num_kv_heads
    tiles = max(2 * num_processors // shape.num_kv_heads, -(-rows * group // tile) + rows)
    return shape.num_heads * tiles * tile * (shape.head_dim + 1) * 4 + MIB


class _Wrapper:
    """One of flashinfer's wrappers, and when the pinned memory that it plans in may be written again."""

    def __init__(self, own: Any, device: torch.device) -> None:
        self.own = own
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def plan(self, function: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Call a function that plans."""
        if self._copied is None:
            function(*arguments, **options)
            return
        self._copied.synchronize()
        function(*arguments, **options)
        self._copied.record()


def _sizes(shape: AttentionShape) -> tuple[int, int, int, int]:
    """As both kinds of step are planned with them."""
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size


def _options(shape: AttentionShape, window: int) -> dict[str, Any]:
    """As both kinds of step are planned with them."""
    return {
        "sm_scale": shape.scale,
        "window_left": window - 1,  # tokens before the own one; -1 = all
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
    }


def _workspace(num_bytes: int, device: torch.device) -> Tensor:
    return torch.zeros(max(num_bytes, WORKSPACE_BYTES), dtype=torch.uint8, device=device)


def _one_page_each(rows: int) -> BatchPages:
    """A batch of rows with a key each, in page 0."""
    starts = np.arange(rows + 1, dtype=np.int32)
    return BatchPages(starts, starts, np.ones(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32))


def _packed(*parts: np.ndarray) -> np.ndarray:
    """The parts one after the other, each aligned."""
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
