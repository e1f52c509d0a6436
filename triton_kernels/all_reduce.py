"""The sum over ranks of what each has, alone or with the residual add and RMSNorm behind it, in one launch.

    all_reduce(x)                 s = round(sum over ranks of x)
    all_reduce_norm(x, r, w)      s = round(round(sum over ranks of x) + r)
                                  y = round(w * s / sqrt(mean(s^2) + eps));  returns (y, s)

N ranks, each with a GPU of its own; T rows, M width. Sums are float32 in the order of the ranks, so all of
them get the same bits. T may be 0; then, as everywhere, all ranks must call with the same T.

The ranks' GPUs reach each other's memory: `addresses` names a region of each, `region_bytes` long, cleared
by `clear_region` before the first call (`minisgl/parallel/regions.py` has them made). Two ways, which a
configuration chooses:

    one shot   each rank writes its x into the regions of all others, and adds up what comes into its own
    two shots  ... writes to each rank a share of the columns, adds up what comes of its own share, writes the
               sums to all, and reads all sums

There are no flags, and nothing is fenced: who waits for data reads the data until they are there. An element
that has not come yet holds ABSENT, a NaN that no rank sends (it sends another NaN instead), and each is put
back as soon as it is read. A region has two buffers, which calls take turns with: a rank writes into the one
of a call when all others are done with the call before the last, because it has their data of the last,
which they sent in a later kernel than the one that put ABSENT back. (NVIDIA's TensorRT-LLM calls this kind
"Lamport": https://github.com/NVIDIA/TensorRT-LLM, customAllReduceKernels.)

Program p of a rank waits for the programs p of the others alone, as all do the same rows; no more programs
are launched than run at once.

Cost per rank and row: one shot sends (N - 1) * M elements over the link, two shots 2 * M * (N - 1) / N, which
pays off when N or T grows; with the norm, 4 * M elements of local memory. What is small takes what two
trips to memory and one over the link take: a few microseconds.

Promise: deterministic, recordable in a CUDA graph, on one stream per region. A rank that never calls leaves
the others waiting; `release_flag` ends that.
"""

# Launching a kernel looks like calling it, but takes options that it does not declare; range yields no int in
# a kernel.
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
"""So few that all run at once: an H200 has 132 multiprocessors, smaller GPUs' hold several programs each."""

# Places in a region: MAX_PROGRAMS counts of calls, whether this rank is released, the two buffers.
_RELEASED = tl.constexpr(MAX_PROGRAMS)
_BUFFERS = tl.constexpr(8 * (MAX_PROGRAMS + 16))
_COUNTS = tl.constexpr(MAX_PROGRAMS)
# A NaN in every type of elements, and another one that stands in for it.
_ABSENT = tl.constexpr(-1)
_OTHER_NAN = tl.constexpr(-2)


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


def region_bytes(capacity: int, num_ranks: int) -> int:
    """How long a region for up to `capacity` bytes of x is."""
    return _BUFFERS.value + 2 * num_ranks * capacity


def clear_region(region: Tensor) -> None:
    """Make a region, uint8, ready for the first call; all ranks must have done so before any calls."""
    region[: _BUFFERS.value].zero_()
    region[_BUFFERS.value :].fill_(255)


def release_flag(region: Tensor) -> Tensor:
    """A place in a region, int64 [1].

    Anything but 0 in it, put there on a stream on which nothing waits, lets no call of this rank wait any
    more; what calls return then means nothing.
    """
    return region[: _BUFFERS.value].view(torch.int64)[_RELEASED.value : _RELEASED.value + 1]


def default_all_reduce_config(num_bytes: int, width: int, num_ranks: int) -> AllReduceConfig:
    """The configuration used where no other is given or tuned."""
    num_warps = min(16, max(4, next_power_of_2(width) // 256))
    # Between two ranks both ways send as much, and one shot waits once. Between more it sends more, and a
    # program reads a row of every rank for each of its own.
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
def _as_bits(values, BITS: tl.constexpr):
    """What is sent for values: their bits, but never _ABSENT."""
    bits = values.to(BITS, bitcast=True)
    return tl.where(bits == _ABSENT, _OTHER_NAN, bits).to(BITS)


@triton.jit
def _place(addresses_ptr, rank, offset, BITS: tl.constexpr):
    """An address in the region of a rank."""
    pointer = tl.pointer_type(BITS)  # pyright: ignore[reportArgumentType] (a constexpr, not a dtype, to it)
    return tl.multiple_of((tl.load(addresses_ptr + rank) + offset).to(pointer), 16)


@triton.jit
def _receive(ptrs, stride, own, mask, rank, released_ptr, dtype: tl.constexpr, N: tl.constexpr):
    """Wait for what N ranks send to `ptrs`, `stride` elements further for each, and put _ABSENT in its place.

    Returns its sum, float32 in the order of the ranks; that of `rank` is `own`, float32, and is not sent.
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
    # It is 0, but Triton 3.6 fails to compile a loop of which only a tensor is used.
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

    # A program reads one count, and no other program writes that one.
    programs = tl.arange(0, _COUNTS)
    tl.debug_barrier()  # all threads have read it
    tl.store(counts + programs, call + 1, programs % num_programs == program)


def all_reduce(x: Tensor, regions: Regions, config: AllReduceConfig) -> None:
    """Put the sum of all ranks' x, contiguous [T, M], at a multiple of 16 bytes, in its place; `config.shots`
    is 1 or 2."""
    _launch(x, x, x, x, x, 0.0, regions, config, norm=False)


def all_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, regions: Regions, config: AllReduceConfig
) -> tuple[Tensor, Tensor]:
    """RMSNorm of residual + the sum of all ranks' x, both contiguous [T, M], at multiples of 16 bytes, with
    weight [M]; returns (normed, residual + sum). `config.shots` is 1 or 2."""
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
