"""Checks and times kernels, for `minisgl tune` and `minisgl bench kernel`.

Promise: a kernel is checked on the inputs with which it is timed. Before the check, outputs and memory that
the kernel must not read hold NaN. A sample is one replay of a CUDA graph of many calls; a time is the median
of samples. The calls rotate through input sets, together four times as large as L2 ("cold"), or as large as
MAX_SETS allows ("warm").
"""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triton_kernels.gpu import gpu_of

COLD_BYTES = 240 << 20
"""Four times the L2 of an H200."""
MAX_SETS = 64
MAX_ERROR = 5e-3
"""The largest relative error (by norm) of a bfloat16 result."""

Calls = list[Callable[[], Any]]
Timer = Callable[[Calls], float]
"""Measures the median microseconds of one call."""


class Problem(NamedTuple):
    """One op on one shape: its inputs, its cost, and a check of its result."""

    num_bytes: float  # that a call must read and write
    flop: float  # that a call must compute
    arguments: list[tuple[Any, ...]]  # for the op's function, one per input set
    set_bytes: int  # memory that one call touches
    check: Callable[[Callable[..., Any]], float]  # gives the relative error; ValueError for other faults
    in_fp8: bool = False  # multiplies numbers of e4m3, at their rate

    def calls(self, function: Callable[..., Any]) -> list[Callable[[], Any]]:
        """`function` on each input set."""
        return [lambda arguments=arguments: function(*arguments) for arguments in self.arguments]

    @property
    def is_cold(self) -> bool:
        """Whether the input sets are too large for a call to find its inputs in L2."""
        return len(self.arguments) * self.set_bytes >= COLD_BYTES / 2


class Ceilings(NamedTuple):
    """The measured peak rates of the device."""

    copy_tb_s: float  # bytes read and written
    matmul_tflop_s: float
    fp8_tflop_s: float = 0.0  # 0 = not measured: products of FP8 numbers count as others do

    def floor_us(self, problem: Problem) -> float:
        """The least microseconds of any kernel for the problem."""
        return max(problem.num_bytes / self.copy_tb_s, problem.flop / self._tflop_s(problem)) * 1e-6

    def limit(self, problem: Problem) -> str:
        """The unit of the rate that limits the problem: "TB/s" or "TFLOP/s"."""
        by_bytes = problem.num_bytes / self.copy_tb_s
        return "TB/s" if by_bytes >= problem.flop / self._tflop_s(problem) else "TFLOP/s"

    def _tflop_s(self, problem: Problem) -> float:
        return self.fp8_tflop_s if problem.in_fp8 and self.fp8_tflop_s else self.matmul_tflop_s

    def rate(self, problem: Problem, microseconds: float) -> float:
        """The rate of a call of this time, in the unit of `limit`."""
        work = problem.num_bytes if self.limit(problem) == "TB/s" else problem.flop
        return work / microseconds * 1e-6


def measure_ceilings(timer: Timer, device: torch.device) -> Ceilings:
    """Copy bandwidth and matrix rates (bfloat16 and FP8 on a GPU) of the device."""
    on_gpu = device.type == "cuda"
    source = torch.randn(1 << 28 if on_gpu else 1 << 20, device=device)
    target = torch.empty_like(source)
    # The driver's copy is not always the fastest one.
    copy_us = min(timer([lambda: target.copy_(source)]), timer([lambda: torch.neg(source, out=target)]))
    width = 8192 if on_gpu else 256
    a = torch.randn((width, width), device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    matmul_us = timer([lambda: a @ a])
    fp8_us = math.inf
    if on_gpu and gpu_of(device).has_fp8:
        one, rounded = torch.ones((), device=device), a.to(torch.float8_e4m3fn)
        product = torch.ops.aten._scaled_mm
        with suppress(RuntimeError):  # torch's product may be for other GPUs
            fp8_us = timer([lambda: product(rounded, rounded.t(), one, one, out_dtype=a.dtype)])
    flop = 2e-6 * width**3
    return Ceilings(2 * source.nbytes / copy_us * 1e-6, flop / matmul_us, flop / fp8_us)


def graph_microseconds(calls: Calls) -> float:
    """Median time of one call, by graph_samples."""
    return statistics.median(graph_samples(calls))


def quick_graph_microseconds(calls: Calls) -> float:
    """As graph_microseconds, in a quarter of the time, to compare many configurations."""
    return statistics.median(graph_samples(calls, graph_s=1.5e-3, replays=5, spend_ms=10.0))


def graph_samples(
    calls: Calls, graph_s: float = 4e-3, replays: int = 7, spend_ms: float = 60.0
) -> list[float]:
    """Microseconds of one call, for each replay of a CUDA graph that contains every call at least once.

    A replay takes about `graph_s`. There are `replays`, or within `spend_ms` up to three times as many.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    estimate_s = time.perf_counter() - begin
    # Enough calls to make the two events negligible. The estimate includes the launch.
    rounds = math.ceil(graph_s / (estimate_s * len(calls)))
    if estimate_s < 2e-4:
        rounds = max(rounds, math.ceil(graph_s * 5e4 / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times: list[float] = []
    while len(times) < replays or (sum(times) < spend_ms and len(times) < 3 * replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return [1e3 * ms / (rounds * len(calls)) for ms in times]


def wall_microseconds(calls: Calls) -> float:
    """Median wall time of one call, by wall_samples."""
    return statistics.median(wall_samples(calls))


def wall_samples(calls: Calls) -> list[float]:
    """Wall microseconds of calls, for the CPU and for calls that no CUDA graph can record."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    times = []
    for call in [calls[0], *calls[:5]]:
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - begin))
    return times[1:]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The relative error by norm, in float64.

    Raises:
        ValueError: `got` contains NaN or infinity.
    """
    if not got.isfinite().all():
        raise ValueError("not finite")
    expected = expected.double()
    return ((got.double() - expected).norm() / expected.norm()).item()


def poison(num_bytes: int, device: torch.device) -> None:
    """Fill the memory that the allocator will hand out next with NaN."""
    if device.type == "cuda":
        pieces = [torch.full((max(1, num_bytes // 4),), float("nan"), device=device) for _ in range(4)]
        del pieces


def num_sets(set_bytes: int, device: torch.device) -> int:
    """The number of input sets after which L2 contains nothing of the first set."""
    if device.type != "cuda":
        return 1
    at_least = 1 if set_bytes >= 1 << 30 else 2
    return max(at_least, min(MAX_SETS, math.ceil(COLD_BYTES / set_bytes)))
