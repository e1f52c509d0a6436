"""The sum over ranks, alone or followed by the residual add and RMSNorm, in one launch.

    all_reduce(x)                 s = round(sum over ranks of x)
    all_reduce_norm(x, r, w)      s = round(round(sum over ranks of x) + r)
                                  y = round(w * s / sqrt(mean(s^2) + eps));  returns (y, s)

N ranks with a GPU each; T rows, M width. Ranks are added in order, in float32, so all ranks get the same
bits. All ranks must call with the same T, which may be 0.

`addresses` names a memory region of each rank, `region_bytes` long, which all GPUs can write; `clear_region`
prepares it before the first call. A configuration chooses the algorithm:

    one shot   each rank writes its x into all other ranks' regions, and adds up what arrives in its own
    two shots  each rank writes to every rank its share of the columns; each rank adds up its own share,
               writes the sums to all ranks, and reads all sums

Cost per rank and row: one shot sends (N - 1) * M elements over the link, two shots 2 * M * (N - 1) / N; the
norm moves 4 * M elements of local memory. A small sum takes two trips to memory and one over the link.

Promise: deterministic, recordable in a CUDA graph, on one stream per region. If a rank never calls, the
others wait; `release_flag` ends that.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import between_kernels, can_start_early
from triton_kernels.launch import next_power_of_2
from triton_kernels.rms_norm import add_rms_norm_reference
from triton_kernels.tuning import tuned

MAX_RANKS = 16
MAX_PROGRAMS = 128
"""All programs must run at once: an H200 has 132 multiprocessors; smaller GPUs hold several on one."""

# Layout of a region: MAX_PROGRAMS call counters, the release flag, two buffers. There are no flags and no
# fences (NVIDIA calls this protocol "Lamport": TensorRT-LLM, customAllReduceKernels). A receiver polls the
# data itself: an element that has not arrived holds _ABSENT, a NaN that no rank sends, and the receiver puts
# _ABSENT back when it has read the element. Calls alternate between the two buffers. When a rank writes into
# a buffer, every other rank has finished the call before the last one: it sent its data of the last call from
# a later kernel than the one that restored _ABSENT.
_RELEASED = tl.constexpr(MAX_PROGRAMS)
_BUFFERS = tl.constexpr(8 * (MAX_PROGRAMS + 16))
_COUNTS = tl.constexpr(MAX_PROGRAMS)
# The bits of _ABSENT are a NaN in every dtype. A rank that has this very NaN sends the other one.
_ABSENT = tl.constexpr(-1)
_OTHER_NAN = tl.constexpr(-2)


class AllReduceConfig(NamedTuple):
    """The algorithm for sums of a given size."""

    shots: int
    """1 or 2; 0 = use the collectives' library."""
    num_warps: int


class Regions(NamedTuple):
    """The memory regions of all ranks, which this rank's GPU can read and write."""

    addresses: Tensor
    """int64 [N]: where each rank's region begins, in this rank's address space."""
    rank: int
    """The rank of this process."""
    capacity: int
    """Most bytes of x, a multiple of 16."""


def region_bytes(capacity: int, num_ranks: int) -> int:
    """The size of a region for up to `capacity` bytes of x."""
    return _BUFFERS.value + 2 * num_ranks * capacity


def clear_region(region: Tensor) -> None:
    """Prepare a region (uint8) for the first call. All ranks must do so before any rank calls."""
    region[: _BUFFERS.value].zero_()
    region[_BUFFERS.value :].fill_(255)


def release_flag(region: Tensor) -> Tensor:
    """The release flag of a region, int64 [1].

    A value other than 0 ends all waiting of this rank's calls, whose results are then meaningless. Write it
    on a stream on which nothing waits.
    """
    return region[: _BUFFERS.value].view(torch.int64)[_RELEASED.value : _RELEASED.value + 1]


def default_all_reduce_config(num_bytes: int, width: int, num_ranks: int) -> AllReduceConfig:
    """The configuration if none is given or tuned."""
    num_warps = min(16, max(4, next_power_of_2(width) // 256))
    # Between two ranks both algorithms send the same amount, and one shot waits only once. Between more ranks
    # one shot sends more, and a program reads one row per rank for each of its own rows.
    few = num_bytes * (num_ranks - 1) <= 512 << 10 and num_ranks * width <= 24 << 10
    return AllReduceConfig(1 if num_ranks == 2 or few else 2, num_warps)


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
    """The same as all_reduce, in plain torch; parts: each rank's x."""
    stacked = torch.stack(parts)
    wide = stacked if stacked.dtype == torch.float64 else stacked.float()
    return wide.sum(0).to(stacked.dtype)


def all_reduce_norm_reference(
    parts: list[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The same as all_reduce_norm, in plain torch."""
    return add_rms_norm_reference(all_reduce_reference(parts), residual, weight, eps)


@triton.jit
def _as_bits(values, BITS: tl.constexpr):
    """The bits of values, with _ABSENT replaced."""
    bits = values.to(BITS, bitcast=True)
    return tl.where(bits == _ABSENT, _OTHER_NAN, bits).to(BITS)


@triton.jit
def _place(addresses_ptr, rank, offset, BITS: tl.constexpr):
    """The address at `offset` in the region of a rank."""
    pointer = tl.pointer_type(BITS)  # pyright: ignore[reportArgumentType] (a constexpr, not a dtype, to it)
    return tl.multiple_of((tl.load(addresses_ptr + rank) + offset).to(pointer), 16)


@triton.jit
def _receive(ptrs, stride, own, mask, rank, released_ptr, dtype: tl.constexpr, N: tl.constexpr):
    """Wait for the data of N ranks at `ptrs` (`stride` elements apart), and put _ABSENT back.

    Returns their float32 sum in the order of the ranks. The part of `rank` is `own` (float32), not sent.
    """
    waiting = 1
    total = own
    while waiting > 0:
        total = tl.zeros_like(own)
        absent = tl.zeros(own.shape, tl.int32)
        for other in tl.static_range(N):
            bits = tl.load(ptrs + other * stride, mask & (other != rank), other=0, volatile=True)
            absent |= (bits == _ABSENT).to(tl.int32)
            total += tl.where(other == rank, own, bits.to(dtype, bitcast=True).to(tl.float32))
        released = tl.load(released_ptr, volatile=True)
        waiting = tl.where(released == 0, tl.max(absent), 0)
    # `waiting` is 0 here. Triton 3.6 fails to compile a loop from which only a tensor is used.
    mask &= waiting == 0
    for other in tl.static_range(N):
        tl.store(ptrs + other * stride, _ABSENT, mask & (other != rank))
    return total


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
    SHOTS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_PART: tl.constexpr,
    BITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_M)
    mask = columns < width
    dtype = x_ptr.dtype.element_ty
    if NORM:
        weight = tl.load(weight_ptr + columns, mask, other=0.0).to(tl.float32)
    counts = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))

    nothing = between_kernels(0, EARLY)
    x_ptr = tl.multiple_of(x_ptr + nothing, 16)
    residual_ptr = tl.multiple_of(residual_ptr + nothing, 16)
    counts += nothing
    call = tl.load(counts + program)
    buffer = _BUFFERS + (call & 1) * (N * capacity)
    sums = buffer + capacity
    part: tl.constexpr = width // N
    part_columns = tl.arange(0, BLOCK_PART)
    part_mask = part_columns < part

    for row in range(program, num_rows, num_programs):
        if SHOTS == 2:
            for other in tl.static_range(N):
                x = tl.load(x_ptr + row * width + other * part + part_columns, part_mask)
                to = _place(addresses_ptr, other, buffer, BITS) + (row * N + rank) * part + part_columns
                tl.store(to, _as_bits(x, BITS), part_mask & (other != rank))
        else:
            bits = _as_bits(tl.load(x_ptr + row * width + columns, mask), BITS)
            for other in tl.static_range(N):
                to = _place(addresses_ptr, other, buffer, BITS) + (row * N + rank) * width + columns
                tl.store(to, bits, mask & (other != rank))

    if SHOTS == 2:
        for row in range(program, num_rows, num_programs):
            own = tl.load(x_ptr + row * width + rank * part + part_columns, part_mask, other=0.0)
            parts = _place(addresses_ptr, rank, buffer, BITS) + row * N * part + part_columns
            total = _receive(parts, part, own.to(tl.float32), part_mask, rank, counts + _RELEASED, dtype, N)
            bits = _as_bits(total.to(dtype), BITS)
            for other in tl.static_range(N):
                to = _place(addresses_ptr, other, sums, BITS) + row * width + rank * part + part_columns
                tl.store(to, bits, part_mask)

    for row in range(program, num_rows, num_programs):
        at = row * width + columns
        if NORM:
            residual = tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
        if SHOTS == 2:
            none = tl.zeros([BLOCK_M], tl.float32)
            come = _place(addresses_ptr, rank, sums, BITS) + at
            total = _receive(come, 0, none, mask, -1, counts + _RELEASED, dtype, 1)
        else:
            own = tl.load(x_ptr + at, mask, other=0.0).to(tl.float32)
            come = _place(addresses_ptr, rank, buffer, BITS) + row * N * width + columns
            total = _receive(come, width, own, mask, rank, counts + _RELEASED, dtype, N)
        total = total.to(dtype)
        if NORM:
            total = (total.to(tl.float32) + residual).to(dtype)
            tl.store(sum_ptr + at, total, mask)
            total = total.to(tl.float32)
            mean_square = tl.sum(total * total) / width
            y = total * tl.rsqrt(mean_square + eps) * weight
            tl.store(y_ptr + at, y.to(dtype), mask)
        else:
            tl.store(sum_ptr + at, total, mask)

    # Program p waits only for the programs p of the other ranks, as all of them process the same rows.
    # A program reads one count, and no other program writes that count.
    programs = tl.arange(0, _COUNTS)
    tl.debug_barrier()  # wait until all threads have read it
    tl.store(counts + programs, call + 1, programs % num_programs == program)


def all_reduce(x: Tensor, regions: Regions, config: AllReduceConfig) -> None:
    """Replace x (contiguous [T, M], 16-byte aligned) by the sum of all ranks' x; `config.shots` is 1 or 2."""
    _launch(x, x, x, x, x, 0.0, regions, config, norm=False)


def all_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, regions: Regions, config: AllReduceConfig
) -> tuple[Tensor, Tensor]:
    """RMSNorm with weight [M] of residual + the sum of all ranks' x; returns (normed, residual + sum).

    x and residual are contiguous [T, M] and 16-byte aligned; `config.shots` is 1 or 2.
    """
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
    assert x.data_ptr() % 16 == residual.data_ptr() % 16 == 0
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
        1 if width % num_ranks else config.shots,
        norm,
        next_power_of_2(width),
        next_power_of_2(-(-width // num_ranks)),
        tl.int16 if x.element_size() == 2 else tl.int32,
        can_start_early(x.device),
        num_warps=config.num_warps,
    )
