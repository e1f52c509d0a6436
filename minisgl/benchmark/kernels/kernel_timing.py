"""How a kernel is checked and timed: the one way, for `minisgl tune` and `minisgl bench kernel`.

Promise: what is timed has been checked on the same inputs; outputs and memory that must not be read held NaN
before. A sample is one replay of a CUDA graph of many calls, which rotate through input sets that together
exceed L2 four times over ("cold"), or as nearly as MAX_SETS allows ("warm"); a time is the samples' median.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

COLD_BYTES = 240 << 20
"""Four times the L2 of an H200."""
MAX_SETS = 64
MAX_ERROR = 5e-3
"""Relative error by norm that an answer in bfloat16 may have."""

Calls = list[Callable[[], Any]]
Timer = Callable[[Calls], float]
"""Median microseconds of one of the calls."""


class Problem(NamedTuple):
    """One op on one shape: inputs to call it with, and what is known about the answer and the cost."""

    op: str
    label: str
    size: int  # tokens or rows
    num_bytes: float  # that a call must move
    flop: float  # that a call must compute
    arguments: list[tuple[Any, ...]]  # for the op's function, one per input set
    set_bytes: int  # memory one call touches
    check: Callable[[Callable[..., Any]], float]  # relative error; ValueError if wrong in another way

    def calls(self, function: Callable[..., Any]) -> list[Callable[[], Any]]:
        """`function` on each input set."""
        return [lambda arguments=arguments: function(*arguments) for arguments in self.arguments]

    @property
    def is_cold(self) -> bool:
        """Whether no call finds its inputs in L2."""
        return len(self.arguments) * self.set_bytes >= COLD_BYTES / 2


class Ceilings(NamedTuple):
    """What the device reaches at best, measured."""

    copy_tb_s: float  # bytes read and written
    matmul_tflop_s: float

    def floor_us(self, problem: Problem) -> float:
        """Microseconds that no kernel for the problem can beat."""
        return max(problem.num_bytes / self.copy_tb_s, problem.flop / self.matmul_tflop_s) * 1e-6

    def limit(self, problem: Problem) -> str:
        """The unit in which the problem's speed is measured, by which of the two bounds it."""
        by_bytes = problem.num_bytes / self.copy_tb_s
        return "TB/s" if by_bytes >= problem.flop / self.matmul_tflop_s else "TFLOP/s"

    def rate(self, problem: Problem, microseconds: float) -> float:
        """In the unit that `limit` names."""
        work = problem.num_bytes if self.limit(problem) == "TB/s" else problem.flop
        return work / microseconds * 1e-6


def measure_ceilings(timer: Timer, device: torch.device) -> Ceilings:
    """Copy bandwidth and matrix rate (bfloat16 on a GPU) of the device."""
    on_gpu = device.type == "cuda"
    source = torch.randn(1 << 28 if on_gpu else 1 << 20, device=device)
    target = torch.empty_like(source)
    # The driver's copy is not always the fastest.
    copy_us = min(timer([lambda: target.copy_(source)]), timer([lambda: torch.neg(source, out=target)]))
    width = 8192 if on_gpu else 256
    a = torch.randn((width, width), device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    matmul_us = timer([lambda: a @ a])
    return Ceilings(2 * source.nbytes / copy_us * 1e-6, 2 * width**3 / matmul_us * 1e-6)


def graph_microseconds(calls: Calls) -> float:
    """Median time of one call, by graph_samples."""
    return statistics.median(graph_samples(calls))


def quick_graph_microseconds(calls: Calls) -> float:
    """As graph_microseconds, in a quarter of the time: to compare many configurations."""
    return statistics.median(graph_samples(calls, graph_s=1.5e-3, replays=5, spend_ms=10.0))


def graph_samples(
    calls: Calls, graph_s: float = 4e-3, replays: int = 7, spend_ms: float = 60.0
) -> list[float]:
    """Microseconds of one call in each replay of a CUDA graph that goes through `calls` at least once.

    A graph takes about `graph_s`; it is replayed at least `replays` times, up to thrice that in `spend_ms`.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    estimate_s = time.perf_counter() - begin
    # Enough calls that the two events do not count, by an estimate that includes launching.
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
    """Median time of one call by the clock, by wall_samples."""
    return statistics.median(wall_samples(calls))


def wall_samples(calls: Calls) -> list[float]:
    """Microseconds of calls by the clock: for what can't be captured, and for the CPU."""
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
    """By norm, in float64.

    Raises:
        ValueError: there is NaN or infinity in `got`.
    """
    if not got.isfinite().all():
        raise ValueError("not finite")
    expected = expected.double()
    return ((got.double() - expected).norm() / expected.norm()).item()


def poison(num_bytes: int, device: torch.device) -> None:
    """Leave NaN in the memory that the allocator will hand out next."""
    if device.type == "cuda":
        pieces = [torch.full((max(1, num_bytes // 4),), float("nan"), device=device) for _ in range(4)]
        del pieces


def num_sets(set_bytes: int, device: torch.device) -> int:
    """Input sets to rotate through, so that a call finds nothing of its own in L2."""
    if device.type != "cuda":
        return 1
    at_least = 1 if set_bytes >= 1 << 30 else 2
    return max(at_least, min(MAX_SETS, math.ceil(COLD_BYTES / set_bytes)))
