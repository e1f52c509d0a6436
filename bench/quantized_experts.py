"""How fast are quantized experts beside ours in bfloat16, and are they right? One short call on a GPU.

    python bench/quantized_experts.py --seconds 420                          # Qwen3-30B-A3B at 16 and 64 rows
    python bench/quantized_experts.py --rows 1,4,256,8192 --only fp8,mxfp4
    python bench/quantized_experts.py --device cpu                           # tries it out, interpreted

Each is a whole layer of experts: routing, rounding of activations (FP8), both products, the sum. Each kind is
checked against plain torch, which sums in float32, on new random inputs with NaN in the memory that it gets,
and timed as bench/quantized_kernels.py does it: several launch configurations are tried, the fastest right
one is shown. Bar: FP8 experts at least 1.35 times as fast as bfloat16 at 16 and 64 rows. Ends with 1 if a
kind has no right configuration, or misses the bar.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from quantized_kernels import HEADER, Run, Work, line, measure, write_results

from minisgl.benchmark.kernels.kernel_timing import (
    Problem,
    graph_microseconds,
    measure_ceilings,
    quick_graph_microseconds,
    wall_microseconds,
)
from minisgl.benchmark.kernels.model_shapes import ModelShape, read_model_shape
from minisgl.benchmark.kernels.ops import quantized_moe_ops
from minisgl.benchmark.kernels.ops.moe_ops import fused_moe_problem
from triton_kernels.fused_moe import fused_moe_triton
from triton_kernels.gpu import gpu_of

BAR = 1.35
BAR_ROWS = (16, 64)


def works(run: Run, kinds: list[str], rows_wanted: list[int], shape: ModelShape) -> Iterator[Work]:
    """Every kind at every number of rows; the few-row kinds' larger tiles are left to more rows."""
    gpu, on_gpu = gpu_of(run.device), run.device.type == "cuda"
    for rows in rows_wanted:
        most = max(16, 4 * rows * shape.experts_per_token // shape.experts)
        for kind in kinds:
            found = quantized_moe_ops.candidates_of(kind, gpu)
            suited = [config for config in found if config.gate_up.block_m <= most] or found[:1]
            launcher = quantized_moe_ops.launcher_of(kind)
            yield Work(
                kind,
                f"{shape.experts}x{shape.expert_width} top {shape.experts_per_token}",
                rows,
                functools.partial(
                    quantized_moe_ops.quantized_moe_problem, kind, rows, shape, run.device, run.dtype
                ),
                [
                    (_short(config), functools.partial(launcher, config=config))
                    for config in (suited if on_gpu else suited[:1])
                ],
                {"bf16": functools.partial(_bf16_calls, run, rows, shape)},
            )


def _short(config: Any) -> str:
    """Both products' configurations, as numbers."""
    return " / ".join(",".join(str(int(value)) for value in product) for product in config)


def _bf16_calls(run: Run, rows: int, shape: ModelShape, problem: Problem) -> list[Callable[[], Any]]:
    """Our experts of 16-bit weights."""
    return fused_moe_problem(rows, shape, run.device, run.dtype).calls(fused_moe_triton)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(quantized_moe_ops.KINDS), help="kinds of weights")
    parser.add_argument("--rows", default="", help="default: 16,64; on a CPU 3")
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--seconds", type=float, default=540.0, help="start no case after this time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write a report here, after every case")
    args = parser.parse_args()
    kinds = args.only.split(",")
    if set(kinds) - set(quantized_moe_ops.KINDS):
        parser.error(f"--only: there are {', '.join(quantized_moe_ops.KINDS)}")
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu tries the script out")
    begin = time.perf_counter()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    shape = read_model_shape(args.model)
    if not on_gpu:
        shape = shape._replace(hidden=128, expert_width=128, experts=4, experts_per_token=2)
    rows_wanted = [int(n) for n in (args.rows or ("16,64" if on_gpu else "3")).split(",")]
    timer = graph_microseconds if on_gpu else wall_microseconds
    quick = quick_graph_microseconds if on_gpu else wall_microseconds
    results: list[dict[str, Any]] = []
    skipped = 0
    with torch.inference_mode():
        ceilings = measure_ceilings(timer, device)
        dtype = torch.bfloat16 if on_gpu else torch.float32
        run = Run(device, dtype, timer, quick, ceilings, begin + args.seconds)
        name = torch.cuda.get_device_name(device) if on_gpu else "CPU, interpreted"
        print(f"{name}, {args.model}, copies {ceilings.copy_tb_s:.3f} TB/s\n{HEADER}", flush=True)
        for work in works(run, kinds, rows_wanted, shape):
            if time.perf_counter() > run.deadline:
                skipped += 1
                continue
            results.append(measure(work, run))
            print(line(results[-1]), flush=True)
            for column in ("tried", "refused", "bf16_failed"):
                if results[-1].get(column):
                    print(f"    {column}: {results[-1][column]}", flush=True)
            write_results(args.out, "quantized_experts", results, ceilings)
            if on_gpu:
                torch.cuda.empty_cache()
    failed = [row for row in results if "us" not in row]
    slow = [row for row in results if on_gpu and _misses_the_bar(row)]
    for row in slow:
        print(
            f"MISSED: {row['part']} at {row['rows']} rows is {row['bf16_us'] / row['us']:.2f} times bfloat16"
        )
    print(f"{len(results)} results, {len(failed)} failed, {len(slow)} below the bar of {BAR}, ", end="")
    print(f"{skipped} skipped, {time.perf_counter() - begin:.0f} s")
    return 1 if failed or slow else 0


def _misses_the_bar(row: dict[str, Any]) -> bool:
    counts = row["part"].startswith("fp8") and row["rows"] in BAR_ROWS and "us" in row and "bf16_us" in row
    return counts and row["bf16_us"] / row["us"] < BAR


if __name__ == "__main__":
    sys.exit(main())
