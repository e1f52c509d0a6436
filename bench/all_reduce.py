"""Which all-reduce is fastest for N ranks and M bytes? Checks and times every variant.

    python bench/all_reduce.py --tp 2                     # a table of microseconds for each way
    python bench/all_reduce.py --tp 2 --write             # ... into the tuning table of this GPU

A call does what a decode step does: it sums x [T, M] over ranks, adds the residual and applies RMSNorm.
"nccl" is NCCL's sum and then our norm. "1 shot" and "2 shots" are our kernel (triton_kernels/all_reduce.py);
the number after the "/" is its warps. Torch's operations on symmetric memory and NCCL's sum are timed without
a norm. Every time is the median of replays of a CUDA graph of many calls, on the slowest rank. Every variant
must give all ranks the same bits, within 2e-2 of float64, with NaN in the output memory before. Else the exit
code is 1.
"""

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from minisgl.benchmark.kernels.kernel_timing import poison, relative_error
from minisgl.parallel.mesh import Ranks, join, open_store
from minisgl.parallel.regions import CAPACITY
from triton_kernels import tuning
from triton_kernels.all_reduce import (
    AllReduceConfig,
    all_reduce_config,
    all_reduce_norm,
    all_reduce_norm_reference,
)
from triton_kernels.gpu import gpu_of
from triton_kernels.rms_norm import add_rms_norm

EPS = 1e-5
CALLS = 20
"""In a graph, each with data of its own."""
REPLAYS = 15
DECODE_ROWS = 64
"""Steps of up to so many rows choose the number of warps: one for all sizes, as it changes the last bits."""
LEAST_GAIN = 1.01
"""More warps have to win this much."""
LINK_BYTES_PER_US = 450e3
"""NVLink 4, each way."""
MAX_ERROR = 2e-2
FILES = ("all_reduce.py",)

Call = Callable[[Tensor], Any]
"""One way, on one rank's x."""


class Way(NamedTuple):
    """How to add up."""

    name: str
    call: Call
    config: AllReduceConfig | None
    """None: only for comparison."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=2, help="ranks, each with a GPU")
    parser.add_argument("--widths", type=int, nargs="+", default=[4096, 5120, 8192])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--warps", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--write", action="store_true", help="record the fastest in the tuning table")
    parser.add_argument("--out", type=Path, help="all times, as JSON")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return run_rank(arguments)
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, __file__, *sys.argv[1:], "--store", f"{folder}/store"]
        ranks = [subprocess.Popen([*own, "--rank", str(rank)]) for rank in range(arguments.tp)]
        failed = False
        try:
            while not failed and any(process.returncode is None for process in ranks):
                pid, status = os.wait()
                (ended,) = (process for process in ranks if process.pid == pid)
                ended.returncode = os.waitstatus_to_exitcode(status)
                failed = ended.returncode != 0
        finally:
            for process in ranks:
                process.kill()  # who waits for a rank that failed would wait for ever
    return int(failed)


def run_rank(arguments: argparse.Namespace) -> int:
    device = torch.device("cuda", arguments.rank)
    torch.cuda.set_device(device)
    ranks = join(arguments.rank, arguments.tp, open_store(str(arguments.store), arguments.tp), device)
    lines, wrong = [], 0
    buffer = None
    if ranks.regions is not None:
        buffer = symmetric_memory.empty(CAPACITY // 2, dtype=torch.bfloat16, device=device)
        symmetric_memory.rendezvous(buffer, ranks.mesh.get_group())
    try:
        with torch.inference_mode():
            for width in arguments.widths:
                for num_rows in arguments.rows:
                    found = measure(ranks, num_rows, width, arguments.warps, buffer)
                    lines.append(found)
                    wrong += len(found["wrong"])
                    if arguments.rank == 0:
                        print_line(found)
    finally:
        ranks.leave()
    gpu = torch.cuda.get_device_name(device)
    if arguments.rank == 0:
        if arguments.out is not None:
            head = {"date": time.strftime("%Y-%m-%d"), "gpu": gpu, "tp": arguments.tp}
            arguments.out.write_text(json.dumps({**head, "lines": lines}, indent=1))
        if arguments.write and not wrong:
            write_entries(gpu, arguments.tp, lines)
    return 1 if wrong else 0


def ways_of(
    ranks: Ranks, num_bytes: int, residual: Tensor, weight: Tensor, warps: list[int], buffer: Tensor | None
) -> list[Way]:
    """Every way for so many bytes, and the ways to compare with, for which `buffer` is symmetric memory."""
    group = ranks.mesh.get_group()

    def by_nccl(x: Tensor) -> tuple[Tensor, Tensor]:
        dist.all_reduce(x, group=group)
        return add_rms_norm(x, residual, weight, EPS)

    ways = [
        Way("nccl", by_nccl, AllReduceConfig(0, 4)),
        Way("nccl, no norm", lambda x: dist.all_reduce(x, group=group), None),
    ]
    regions = ranks.regions
    if regions is None or buffer is None or num_bytes > CAPACITY:
        return ways
    for shots in (1, 2):
        for num_warps in warps:
            config = AllReduceConfig(shots, num_warps)
            call = functools.partial(
                all_reduce_norm, residual=residual, weight=weight, eps=EPS, regions=regions, config=config
            )
            ways.append(Way(name_of(config), call, config))
    buffer = buffer[: num_bytes // 2]
    operations = torch.ops.symm_mem
    ways.append(
        Way(
            "torch 1 shot, no norm",
            lambda x: operations.one_shot_all_reduce_copy(buffer, x.view(-1), "sum", ranks.group),
            None,
        )
    )
    ways.append(
        Way(
            "torch 2 shots, no norm",
            lambda x: operations.two_shot_all_reduce_(buffer, "sum", ranks.group),
            None,
        )
    )
    return ways


def measure(
    ranks: Ranks, num_rows: int, width: int, warps: list[int], buffer: Tensor | None
) -> dict[str, Any]:
    """Microseconds of each way, and what is wrong with it."""
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": ranks.device}
    generator = torch.Generator(device=ranks.device).manual_seed(num_rows * width)
    shape = (ranks.size, CALLS, num_rows, width)
    # The same on all ranks; a rank's part is its own only.
    parts = torch.randn(shape, generator=generator, **kind) / ranks.size
    residual = torch.randn((num_rows, width), generator=generator, **kind)
    weight = torch.randn(width, generator=generator, **kind)
    parts_of_first = list(parts[:, 0].double())
    expected = all_reduce_norm_reference(parts_of_first, residual.double(), weight.double(), EPS)
    source = parts[ranks.rank].clone()
    del parts
    num_bytes = num_rows * width * source.element_size()
    us, wrong = {}, {}
    for way in ways_of(ranks, num_bytes, residual, weight, warps, buffer):
        x = source.clone()
        if way.config is not None:
            problem = check(ranks, way.call, x[0], expected)
            if problem:
                wrong[way.name] = problem
        us[way.name] = microseconds(ranks, way.call, x, source)
    return {
        "rows": num_rows,
        "width": width,
        "bytes": num_bytes,
        "chosen_now": name_of(all_reduce_config(source[0], ranks.size)),
        "us": us,
        "wrong": wrong,
    }


def check(ranks: Ranks, call: Call, x: Tensor, expected: tuple[Tensor, Tensor]) -> str:
    """What is wrong with what a way gives, on any rank."""
    poison(4 * x.nbytes, x.device)
    results = call(x)
    problem = ""
    for result, wanted in zip(results, expected, strict=True):
        try:
            error = relative_error(result, wanted)
            if error > MAX_ERROR:
                problem = f"relative error {error:.1e}"
        except ValueError as not_finite:
            problem = str(not_finite)
        everybodys = [torch.empty_like(result) for _ in range(ranks.size)]
        dist.all_gather(everybodys, result.contiguous())
        if not all(torch.equal(one, result) for one in everybodys):
            problem = problem or "ranks differ"
    all_ranks_succeeded = ranks.minimum(not problem)
    return problem or ("" if all_ranks_succeeded else "wrong on another rank")


def microseconds(ranks: Ranks, call: Call, x: Tensor, source: Tensor) -> float:
    """The median time of a call in graphs that all ranks replay together, of the slowest rank."""
    for each in x:
        call(each)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for each in x:
            call(each)
    times = []
    for _ in range(REPLAYS):
        x.copy_(source)  # sums in place grow
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # brings the ranks together
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(x))
    graph.reset()
    slowest = torch.tensor([statistics.median(times)], device=x.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(slowest.item(), 2)


def print_line(found: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {us:.1f}" for name, us in found["us"].items())
    print(f"{found['rows']:>4} x {found['width']}: {times}  (now: {found['chosen_now']})", flush=True)
    for name, problem in found["wrong"].items():
        print(f"     WRONG {name}: {problem}", flush=True)


def best_warps(lines: list[dict[str, Any]]) -> int:
    """The number of warps with which one shot is fastest on (geometric) average."""
    decodes = [line["us"] for line in lines if line["rows"] <= DECODE_ROWS] or [line["us"] for line in lines]
    one_shot = {config_named(name).num_warps for name in decodes[0] if name.startswith("1 shot")}
    best, best_us = 4, math.inf
    for num_warps in sorted(one_shot):
        name = name_of(AllReduceConfig(1, num_warps))
        mean_us = statistics.geometric_mean(us[name] for us in decodes)
        if mean_us * LEAST_GAIN < best_us:
            best, best_us = num_warps, mean_us
    return best


def fastest(us: dict[str, float], num_warps: int) -> str:
    """The way to take, of those with so many warps and NCCL."""
    ways = [name_of(AllReduceConfig(shots, num_warps)) for shots in (0, 1, 2)]
    return min((name for name in ways if name in us), key=us.__getitem__)


def name_of(config: AllReduceConfig) -> str:
    """For example "1 shot/8"."""
    return (
        "nccl" if config.shots == 0 else f"{config.shots} shot{'s' * (config.shots - 1)}/{config.num_warps}"
    )


def config_named(name: str) -> AllReduceConfig:
    """What `name_of` calls so."""
    if name == "nccl":
        return AllReduceConfig(0, 4)
    shots, _, num_warps = name.replace("/", " ").split()
    return AllReduceConfig(int(shots), int(num_warps))


def entry_of(num_ranks: int, width: int, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The tuning table's entry for a width; "default" is what NCCL takes."""
    sizes = []
    num_warps = best_warps(lines)
    for line in lines:
        best = fastest(line["us"], num_warps)
        floor_us = 2 * (num_ranks - 1) / num_ranks * line["bytes"] / LINK_BYTES_PER_US
        sizes.append(
            {
                "size": line["bytes"],
                "label": f"{line['rows']}x{width}",
                "config": config_named(best)._asdict(),
                "default_us": line["us"]["nccl"],
                "us": line["us"][best],
                "fraction": round(floor_us / line["us"][best], 4),
                "limit": "TB/s",
            }
        )
    return {
        "op": "all_reduce",
        "dtype": "bfloat16",
        "exact": {"ranks": num_ranks},
        "near": {"M": width},
        "models": [],
        "config": sizes[0]["config"],
        "candidates": max(len(line["us"]) for line in lines),
        "failed": {},
        "sizes": sizes,
    }


def write_entries(gpu: str, num_ranks: int, lines: list[dict[str, Any]]) -> None:
    """Put an entry for each width into the GPU's tuning table, in the place of former ones."""
    path = tuning.table_path(gpu)
    capability = gpu_of(torch.device("cuda")).capability
    table = tuning.read_table(path) if path.is_file() else tuning.new_table(gpu, capability)
    for width in dict.fromkeys(line["width"] for line in lines):
        entry = entry_of(num_ranks, width, [line for line in lines if line["width"] == width])
        key = ("op", "dtype", "exact", "near")
        others = [one for one in table["entries"] if any(one[name] != entry[name] for name in key)]
        table["entries"] = [*others, entry]
    table["kernels"]["all_reduce"] = {"files": list(FILES), "hash": tuning.kernel_hash(FILES)}
    table["date"] = time.strftime("%Y-%m-%d")
    tuning.write_table(path, table)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
