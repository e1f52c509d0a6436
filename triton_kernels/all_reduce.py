"""The sum over ranks of what each has, alone or with the residual add and RMSNorm behind it, in one launch.

    all_reduce(x)                 s = round(sum over ranks of x)
    all_reduce_norm(x, r, w)      s = round(round(sum over ranks of x) + r)
                                  y = w * round(s / sqrt(mean(s^2) + eps));  returns (y, s)

N ranks, each with a GPU of its own; T rows, M width. Sums are float32 in the order of the ranks, so all of
them get the same bits. T may be 0; then, as everywhere, all ranks must call with the same T.

The ranks' GPUs reach each other's memory: `addresses` names a region of each, `region_bytes(capacity)` long,
zeroed before the first call (`minisgl/parallel/regions.py` has them made). In a region lie a count of the
calls so far, flags, and three buffers of `capacity` bytes. Two ways, which a configuration chooses:

    one shot   each rank writes its x to its own region, says so to all, waits for all, and reads all regions
    two shots  ... and reads 1/N of the columns of all regions, writes their sums to all, says so, waits, and
               reads the rest of the sums from its own region

Program p of a rank waits for the programs p of the others alone, as all do the same rows; no more programs
are launched than run at once. A flag holds the number of the call, so none is ever reset. Calls take turns
with two buffers for x: whoever is a call ahead can't overwrite what another still reads, and nobody can be
two ahead.

Cost per rank and row: one shot reads (N - 1) * M elements over the link, two shots read M and write M *
(N - 1) / N, which pays off when N or T grows; with the norm, 4 * M elements of local memory. What is small
takes what the flags take: a few microseconds.

Promise: deterministic, recordable in a CUDA graph, on one stream per region. A rank that never calls leaves
the others waiting; `RELEASED` ends that.
"""

# Launching a kernel looks like calling it, but takes options that it does not declare.
# pyright: reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import next_power_of_2
from triton_kernels.rms_norm import add_rms_norm_reference
from triton_kernels.tuning import tuned

MAX_RANKS = 16
MAX_PROGRAMS = 128
"""Fewer than a GPU has multiprocessors, so that all of them run at once."""
RELEASED = (1 << 62) - 1
"""A number of calls that is never reached."""

# Places in a region, in bytes. The counters have a cache line of their own.
_FLAGS = tl.constexpr(256)
_FLAGS_PER_MEETING = tl.constexpr(MAX_PROGRAMS * MAX_RANKS)
_BUFFERS = tl.constexpr(256 + 2 * 8 * MAX_PROGRAMS * MAX_RANKS)
_RANKS = tl.constexpr(MAX_RANKS)


class AllReduceConfig(NamedTuple):
    """How to add up a certain number of bytes."""

    shots: int
    """1, 2, or 0: leave it to the collectives' library."""
    num_warps: int


class Regions(NamedTuple):
    """Memory of all ranks that this one's GPU can reach."""

    addresses: Tensor
    """int64 [N]: where each rank's region begins, in this rank's address space."""
    rank: int
    """Whose this process is."""
    capacity: int
    """Bytes of x at most, a multiple of 16."""


def region_bytes(capacity: int) -> int:
    """How long a region for up to `capacity` bytes of x is."""
    return _BUFFERS.value + 3 * capacity


def flags_of(region: Tensor) -> Tensor:
    """The flags in a region, uint8: int64.

    Filled with `RELEASED`, on a stream on which nothing waits, they let no call of this rank wait any more;
    what calls return then means nothing.
    """
    return region[_FLAGS.value : _BUFFERS.value].view(torch.int64)


def default_all_reduce_config(num_bytes: int, width: int, num_ranks: int) -> AllReduceConfig:
    """The configuration used where no other is given or tuned."""
    num_warps = min(16, max(4, next_power_of_2(width) // 512))
    if num_bytes * (num_ranks - 1) <= 512 << 10:
        return AllReduceConfig(1, num_warps)
    return AllReduceConfig(2 if num_bytes <= 4 << 20 else 0, num_warps)


def all_reduce_config(x: Tensor, num_ranks: int) -> AllReduceConfig:
    """The configuration for x [T, M] on its GPU."""
    num_bytes = x.numel() * x.element_size()
    return tuned(
        default_all_reduce_config(num_bytes, x.shape[1], num_ranks),
        "all_reduce",
        x.device,
        x.dtype,
        exact=(num_ranks,),
        near=(x.shape[1],),
        size=num_bytes,
    )


def all_reduce_reference(parts: list[Tensor]) -> Tensor:
    """What all_reduce means, in plain torch; parts: each rank's x."""
    stacked = torch.stack(parts)
    wide = stacked if stacked.dtype == torch.float64 else stacked.float()
    return wide.sum(0).to(stacked.dtype)


def all_reduce_norm_reference(
    parts: list[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """What all_reduce_norm means, in plain torch."""
    return add_rms_norm_reference(all_reduce_reference(parts), residual, weight, eps)


@triton.jit
def _meet(addresses_ptr, rank, program, meeting: tl.constexpr, call, N: tl.constexpr, LANES: tl.constexpr):
    """Tell the programs of this number on all ranks that all before is done, and wait until they say so."""
    ranks = tl.arange(0, LANES)
    first = _FLAGS + 8 * (meeting * _FLAGS_PER_MEETING + program * _RANKS)
    theirs = tl.load(addresses_ptr + ranks, ranks < N, other=0) + first + 8 * rank
    mine = tl.load(addresses_ptr + rank) + first + 8 * ranks
    mine = mine.to(tl.pointer_type(tl.int64))
    tl.debug_barrier()  # one thread speaks for all
    # Not a plain store: `RELEASED` must last.
    tl.atomic_max(theirs.to(tl.pointer_type(tl.int64)), call, ranks < N, sem="release", scope="sys")
    behind = 1
    while behind > 0:
        calls = tl.atomic_add(mine, 0, ranks < N, sem="acquire", scope="sys")
        behind = tl.sum(((ranks < N) & (calls < call)).to(tl.int32))
    tl.debug_barrier()


@triton.jit
def _buffer(addresses_ptr, rank, offset, pointer: tl.constexpr):
    """Where a buffer of a rank begins."""
    return tl.multiple_of((tl.load(addresses_ptr + rank) + offset).to(pointer), 16)


@triton.jit(do_not_specialize=["num_rows", "rank"])
def _all_reduce_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    addresses_ptr,
    num_rows,
    rank,
    width: tl.constexpr,
    eps: tl.constexpr,
    capacity: tl.constexpr,
    N: tl.constexpr,
    LANES: tl.constexpr,
    SHOTS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_PART: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_M)
    mask = columns < width
    pointer: tl.constexpr = x_ptr.dtype
    counters = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))
    call = tl.load(counters) + 1
    inputs = _BUFFERS + (call & 1) * capacity
    sums = _BUFFERS + 2 * capacity

    for row in range(program, num_rows, num_programs):
        at = row * width + columns
        tl.store(_buffer(addresses_ptr, rank, inputs, pointer) + at, tl.load(x_ptr + at, mask), mask)
    if NORM:
        weight = tl.load(weight_ptr + columns, mask, other=0.0).to(tl.float32)
    _meet(addresses_ptr, rank, program, 0, call, N, LANES)

    if SHOTS == 2:
        part: tl.constexpr = width // N
        part_columns = tl.arange(0, BLOCK_PART)
        part_mask = part_columns < part
        for row in range(program, num_rows, num_programs):
            at = row * width + rank * part + part_columns
            total = tl.zeros([BLOCK_PART], tl.float32)
            for other in tl.static_range(N):
                theirs = _buffer(addresses_ptr, other, inputs, pointer)
                total += tl.load(theirs + at, part_mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            total = total.to(x_ptr.dtype.element_ty)
            for other in tl.static_range(N):
                tl.store(_buffer(addresses_ptr, other, sums, pointer) + at, total, part_mask)
        _meet(addresses_ptr, rank, program, 1, call, N, LANES)

    for row in range(program, num_rows, num_programs):
        at = row * width + columns
        if SHOTS == 2:
            total = tl.load(
                _buffer(addresses_ptr, rank, sums, pointer) + at, mask, other=0.0, cache_modifier=".cg"
            )
            total = total.to(tl.float32)
        else:
            total = tl.zeros([BLOCK_M], tl.float32)
            for other in tl.static_range(N):
                theirs = _buffer(addresses_ptr, other, inputs, pointer)
                total += tl.load(theirs + at, mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        dtype = sum_ptr.dtype.element_ty
        if NORM:
            total = total.to(dtype).to(tl.float32)
            total += tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
            total = total.to(dtype)
            tl.store(sum_ptr + at, total, mask)
            total = total.to(tl.float32)
            normed = total * tl.rsqrt(tl.sum(total * total) / width + eps)
            y = normed.to(dtype).to(tl.float32) * weight
            tl.store(y_ptr + at, y.to(dtype), mask)
        else:
            tl.store(sum_ptr + at, total.to(dtype), mask)

    # The last program to end counts the call; all have read the count by then.
    ended = tl.atomic_add(counters + 1, 1, sem="relaxed")
    if ended == num_programs - 1:
        tl.store(counters + 1, 0)
        tl.store(counters, call)


def all_reduce(x: Tensor, regions: Regions, config: AllReduceConfig) -> None:
    """Put the sum of all ranks' x, contiguous [T, M], in its place; `config.shots` is 1 or 2."""
    _launch(x, x, x, x, x, 0.0, regions, config, norm=False)


def all_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, regions: Regions, config: AllReduceConfig
) -> tuple[Tensor, Tensor]:
    """RMSNorm of residual + the sum of all ranks' x, both contiguous [T, M], with weight [M]; returns
    (normed, residual + sum). `config.shots` is 1 or 2."""
    y, new_residual = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, y, new_residual, eps, regions, config, norm=True)
    return y, new_residual


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    y: Tensor,
    total: Tensor,
    eps: float,
    regions: Regions,
    config: AllReduceConfig,
    *,
    norm: bool,
) -> None:
    num_rows, width = x.shape
    num_ranks = regions.addresses.shape[0]
    assert x.is_contiguous()
    assert residual.is_contiguous()
    assert num_ranks <= MAX_RANKS
    assert x.numel() * x.element_size() <= regions.capacity
    if num_rows == 0:
        return
    _all_reduce_kernel[(min(num_rows, MAX_PROGRAMS),)](
        x,
        residual,
        weight,
        y,
        total,
        regions.addresses,
        num_rows,
        regions.rank,
        width,
        eps,
        regions.capacity,
        num_ranks,
        next_power_of_2(num_ranks),
        1 if width % num_ranks else config.shots,
        norm,
        next_power_of_2(width),
        next_power_of_2(-(-width // num_ranks)),
        num_warps=config.num_warps,
    )
