"""How fast are the kernels of quantized models, beside ours in bfloat16 and torch's, and are they right?

    python bench/quantized_kernels.py --out quantized.json --seconds 500      # a GPU; every part
    python bench/quantized_kernels.py --only fp8_linear --rows 1,64           # one part, some numbers of rows
    python bench/quantized_kernels.py --device cpu                            # tries it out, interpreted

Each kernel is checked against float64 on new random inputs, with NaN in the memory that it gets, before it is
timed: medians of replays of CUDA graphs, inputs not in L2. Several launch configurations are compiled in
parallel and tried; the fastest right one is shown. Share: of the floor, which is the larger of the bytes at
the rate of copies and the products at the measured rate (bfloat16's or FP8's). Ends with 1 if a case has no
right configuration. The time limit skips what does not fit, and says so.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_timing import (
    MAX_ERROR,
    Ceilings,
    Problem,
    Timer,
    graph_microseconds,
    measure_ceilings,
    quick_graph_microseconds,
    wall_microseconds,
)
from minisgl.benchmark.kernels.ops import fp8_ops, int4_ops
from minisgl.benchmark.kernels.ops.linear_ops import gated_linear_problem, linear_problem
from minisgl.benchmark.reports.report import make_report, write_report
from triton_kernels.fp8_linear_few import Fp8Config, fp8_gated_linear_few, fp8_linear_few
from triton_kernels.fp8_linear_many import fp8_gated_linear_many_with, fp8_linear_many_with
from triton_kernels.fp8_linear_torch import ROWS, fp8_linear_torch
from triton_kernels.gpu import gpu_of
from triton_kernels.int4_linear_few import Int4Config, int4_gated_linear_few, int4_linear_few
from triton_kernels.int4_linear_many import (
    DEQUANTIZED,
    Int4TiledConfig,
    int4_gated_linear_many_with,
    int4_linear_many_with,
)
from triton_kernels.linear_few import FEW_ROWS, gated_linear_triton, linear_triton
from triton_kernels.linear_many import gated_linear_many, linear_many
from triton_kernels.quantize_fp8 import GROUP, quantize_fp8_triton, silu_mul_fp8_triton
from triton_kernels.rms_norm import NormConfig, add_rms_norm_reference, add_rms_norm_triton
from triton_kernels.rms_norm_fp8 import add_rms_norm_fp8_triton
from triton_kernels.silu_mul import silu_mul, silu_mul_reference, silu_mul_triton

COMPILE_THREADS = 16
EPS = 1e-5
LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Llama-3.1-8B's, as (outputs, inputs)."""
CPU_LAYERS = {"o": (160, 256), "gate_up": (512, 256)}
GATED = "gate_up"
KEPT = 3
"""Of the configurations tried quickly, those that are timed again."""


class Work(NamedTuple):
    """One case: what to measure, by which configurations, beside what."""

    part: str
    name: str
    rows: int
    problem: Callable[[], Problem]
    candidates: list[tuple[str, Callable[..., Any]]]
    baselines: dict[str, Callable[[Problem], list[Callable[[], Any]]]]  # the calls, of the case's problem


class Run(NamedTuple):
    """The device and what it can do."""

    device: torch.device
    dtype: torch.dtype
    timer: Timer
    quick: Timer
    ceilings: Ceilings
    deadline: float


def linear_works(run: Run, rows_wanted: list[int], blocks: bool) -> Iterator[Work]:
    """The linear layers of FP8 weights."""
    gpu, on_gpu = gpu_of(run.device), run.device.type == "cuda"
    for rows in rows_wanted:
        for name, (outputs, width) in (LAYERS if on_gpu else CPU_LAYERS).items():
            gated = name == GATED
            results = outputs // 2 if gated else outputs
            kind = {"gated": gated, "blocks": blocks}
            found: list[fp8_ops.Fp8Candidate] = [
                *fp8_ops.few_rows_candidates(results, width, rows, gpu, **kind),
                *fp8_ops.many_rows_candidates(results, width, rows, gpu, **kind),
            ]
            if not on_gpu:
                found = [found[0], found[-1]]
            yield Work(
                "fp8_blocks" if blocks else "fp8_linear",
                name,
                rows,
                functools.partial(
                    fp8_ops.fp8_linear_problem, rows, width, outputs, run.device, run.dtype, **kind
                ),
                [(_short(config), _with(config, gated, run.dtype)) for config in found],
                {
                    "bf16": functools.partial(_bf16_calls, run, rows, width, outputs, gated),
                    "scaled_mm": functools.partial(_scaled_mm_calls, gated=gated),
                },
            )


def int4_works(run: Run, rows_wanted: list[int]) -> Iterator[Work]:
    """The linear layers of 4-bit weights; at 8 rows also with zero points, and with groups of 32."""
    gpu, on_gpu = gpu_of(run.device), run.device.type == "cuda"
    kinds = [(rows, 128, False) for rows in rows_wanted]
    kinds += [(8, 128, True), (8, 32, False)] if 8 in rows_wanted else []
    for rows, group, zero_points in kinds:
        for name, (outputs, width) in (LAYERS if on_gpu else CPU_LAYERS).items():
            gated = name == GATED
            results = outputs // 2 if gated else outputs
            found: list[Int4Config | Int4TiledConfig] = [
                *int4_ops.few_rows_candidates(results, width, rows, gpu, gated=gated),
                *int4_ops.many_rows_candidates(results, width, rows, gpu, gated=gated, group=group),
            ]
            if not on_gpu:
                found = [found[0], found[-1]]
            build = functools.partial(
                int4_ops.int4_linear_problem, rows, width, outputs, run.device, run.dtype, gated=gated,
                group=group, zero_points=zero_points,
            )  # fmt: skip
            part = "w4a16" + (" zeros" if zero_points else "") + (f" by {group}" if group != 128 else "")
            if rows > FEW_ROWS:
                found.append(DEQUANTIZED)
            candidates = [(_short(config), _with_int4(config, gated)) for config in found]
            bf16 = functools.partial(_bf16_calls, run, rows, width, outputs, gated)
            yield Work(part, name, rows, build, candidates, {"bf16": bf16})


def _with_int4(config: Int4Config | Int4TiledConfig, gated: bool) -> Callable[..., Any]:
    if isinstance(config, Int4Config):
        function = int4_gated_linear_few if gated else int4_linear_few
    else:
        function = int4_gated_linear_many_with if gated else int4_linear_many_with
    return functools.partial(function, config=config)


def quantizing_works(run: Run, rows_wanted: list[int]) -> Iterator[Work]:
    """Rounding rows to FP8, alone and behind the norm and SiLU."""
    width, wide = (4096, 14336) if run.device.type == "cuda" else (256, 384)
    size = run.dtype.itemsize

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device=run.device, dtype=run.dtype)

    def norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return add_rms_norm_reference(x, residual, weight, EPS)[0]

    for rows in rows_wanted:
        for group in (None, GROUP):
            name = "" if group is None else f" by {group}"
            build = functools.partial(fp8_ops.quantizing_problem, group=group, device=run.device)
            warps = (4, 8, 16, 32) if group is None else (2, 4, 8)
            norm_warps = (4, 8, 16)
            if run.device.type == "cpu":
                warps = norm_warps = (4,)
            yield Work(
                "quantize",
                f"add_norm{name}",
                rows,
                functools.partial(
                    build,
                    norm,
                    lambda rows=rows: (new(rows, width), new(rows, width), new(width)),
                    rows * width * (3 * size + 1),
                ),
                [
                    (f"warps {n}", functools.partial(_add_norm, group=group, config=NormConfig(1, n)))
                    for n in norm_warps
                ],
                {"bf16": lambda problem: problem.calls(_plain_add_norm)},
            )
            yield Work(
                "quantize",
                f"silu_mul{name}",
                rows,
                functools.partial(
                    build,
                    silu_mul_reference,
                    lambda rows=rows: (new(rows, 2 * wide),),
                    rows * wide * (2 * size + 1),
                ),
                [
                    (f"warps {n}", functools.partial(silu_mul_fp8_triton, group=group, num_warps=n))
                    for n in warps
                ],
                {"bf16": lambda problem: problem.calls(silu_mul_triton)},
            )
            yield Work(
                "quantize",
                f"alone{name}",
                rows,
                functools.partial(
                    build,
                    lambda x: x,
                    lambda rows=rows: (new(rows, wide),),
                    rows * wide * (size + 1),
                ),
                [
                    (f"warps {n}", functools.partial(quantize_fp8_triton, group=group, num_warps=n))
                    for n in warps
                ],
                {},
            )


def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, group: int | None, config: NormConfig) -> Any:
    return add_rms_norm_fp8_triton(x, residual, weight, EPS, group, config)


def _plain_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return add_rms_norm_triton(x, residual, weight, EPS)


def _short(config: NamedTuple) -> str:
    """A configuration as numbers, with the flags that are set."""
    numbers = [str(value) for value in config if type(value) is int]
    flags = [name for name, value in config._asdict().items() if value is True]
    return " ".join([",".join(numbers), *flags])


def _with(config: fp8_ops.Fp8Candidate, gated: bool, dtype: torch.dtype) -> Callable[..., Any]:
    if isinstance(config, Fp8Config):
        function = fp8_gated_linear_few if gated else fp8_linear_few
    else:
        function = fp8_gated_linear_many_with if gated else fp8_linear_many_with
    return functools.partial(function, dtype=dtype, config=config)


def _bf16_calls(
    run: Run, rows: int, width: int, outputs: int, gated: bool, problem: Problem
) -> list[Callable[[], Any]]:
    """Our layer of 16-bit weights, as a decode step or a prompt has it."""
    build = gated_linear_problem if gated else linear_problem
    if rows <= FEW_ROWS:
        function = gated_linear_triton if gated else linear_triton
    else:
        function = gated_linear_many if gated else linear_many
    return build(rows, width, outputs, run.device, run.dtype).calls(function)


def _scaled_mm_calls(problem: Problem, *, gated: bool) -> list[Callable[[], Any]]:
    """torch's own product of FP8 numbers, over rows that are padded beforehand."""
    calls = []
    for x, x_scale, weight, weight_scale in problem.arguments:
        missing = -x.shape[0] % ROWS
        padded = torch.nn.functional.pad(x.float(), (0, 0, 0, missing)).to(x.dtype)
        scales = torch.nn.functional.pad(x_scale, (0, missing))
        calls.append(functools.partial(_torchs, padded, scales, weight, weight_scale, gated=gated))
    return calls


def _torchs(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, gated: bool) -> Tensor:
    y = fp8_linear_torch(x, x_scale, weight, weight_scale)
    return silu_mul(y) if gated else y


def compile_all(candidates: list[Callable[..., Any]], problem: Problem) -> None:
    """Run every candidate once, in several threads, because compiling takes most of the time."""
    if problem.arguments[0][0].device.type != "cuda":
        return

    def run(function: Callable[..., Any]) -> None:
        torch.cuda.set_device(problem.arguments[0][0].device)
        with torch.inference_mode():
            try:
                function(*problem.arguments[0])
            except Exception:  # the measurement reports it
                return

    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(run, candidates))
    torch.cuda.synchronize()


def measure(work: Work, run: Run) -> dict[str, Any]:
    """Check and time every candidate, then the best ones again, then the baselines; the row of the table."""
    problem = work.problem()
    row: dict[str, Any] = {"part": work.part, "name": work.name, "rows": work.rows}
    begin = time.perf_counter()
    compile_all([function for _, function in work.candidates], problem)
    row["compile_s"] = round(time.perf_counter() - begin, 1)
    tried: list[tuple[float, float, str, Callable[..., Any]]] = []
    refused: dict[str, str] = {}
    for name, function in work.candidates:
        us, error, why = _try(function, problem, run.quick)
        if why:
            refused[name] = why
        else:
            tried.append((us, error, name, function))
    tried.sort(key=lambda one: one[0])
    row["tried"] = "; ".join(f"{name} = {us:.2f}" for us, _, name, _ in tried)
    row["refused"] = "; ".join(f"{name}: {why}" for name, why in refused.items())
    if not tried:
        return row
    again = [(run.timer(problem.calls(function)), *rest, function) for _, *rest, function in tried[:KEPT]]
    us, error, name, _ = min(again, key=lambda one: one[0])
    floor = run.ceilings.floor_us(problem)
    row |= {"us": round(us, 2), "floor_us": round(floor, 2), "share": round(floor / us, 3)}
    row |= {"config": name, "error": error}
    for baseline, calls in work.baselines.items():
        row |= _baseline(baseline, calls, problem, run.timer)
    return row


def _try(function: Callable[..., Any], problem: Problem, timer: Timer) -> tuple[float, float, str]:
    """Check and time one configuration: (microseconds, relative error, why it is refused)."""
    try:
        error = problem.check(function)
        if not error < MAX_ERROR:
            return 0.0, error, f"relative error {error:.1e}"
        return timer(problem.calls(function)), error, ""
    except Exception as problem_of_it:  # a configuration that does not fit the GPU is a result
        return 0.0, 0.0, f"{type(problem_of_it).__name__}: {problem_of_it}"[:160]


def _baseline(
    name: str, calls: Callable[[Problem], list[Callable[[], Any]]], problem: Problem, timer: Timer
) -> dict[str, Any]:
    """A baseline's time, or why it has none: a failure of another project is a result."""
    try:
        return {f"{name}_us": round(timer(calls(problem)), 2)}
    except Exception as error:
        return {f"{name}_failed": f"{type(error).__name__}: {error}"[:160]}


HEADER = (
    f"{'part':<12}{'what':<18}{'rows':>5}{'us':>10}{'floor':>9}{'share':>7}{'bf16':>10}{'x':>6}{'torch':>10}"
    "  error    configuration"
)


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    head = f"{row['part']:<12}{row['name']:<18}{row['rows']:>5}"
    if "us" not in row:
        return f"{head}  FAILED: {row['refused'][:300]}"
    us, bf16, torchs = row["us"], row.get("bf16_us"), row.get("scaled_mm_us")
    text = f"{head}{us:>10.2f}{row['floor_us']:>9.2f}{row['share']:>7.2f}"
    text += f"{bf16:>10.2f}{bf16 / us:>6.2f}" if bf16 else " " * 16
    text += f"{torchs:>10.2f}" if torchs else " " * 10
    return f"{text}  {row['error']:.1e}  {row['config']}"


def sums(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each part and number of rows with all layers, their sum: a block of the model."""
    for part, count in dict.fromkeys((row["part"], row["rows"]) for row in rows):
        own = [row for row in rows if (row["part"], row["rows"]) == (part, count) and row["name"] in LAYERS]
        if len(own) < len(LAYERS) or not all("us" in row for row in own):
            continue
        total = {"part": part, "name": "all layers", "rows": count}
        for column in ("us", "floor_us", "bf16_us", "scaled_mm_us"):
            if all(column in row for row in own):
                total[column] = round(sum(row[column] for row in own), 2)
        total["share"] = round(total["floor_us"] / total["us"], 3)
        yield total | {"error": max(row["error"] for row in own), "config": ""}


PARTS: dict[str, Callable[[Run, list[int]], Iterator[Work]]] = {
    "fp8_linear": functools.partial(linear_works, blocks=False),
    "fp8_blocks": functools.partial(linear_works, blocks=True),
    "quantize": quantizing_works,
    "w4a16": int4_works,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rows", default="", help="default: 1,8,64,256,8192; on a CPU 1,5")
    parser.add_argument("--seconds", type=float, default=540.0, help="start no case after this time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write a report here, after every case")
    parser.add_argument("--verbose", action="store_true", help="also show every configuration tried")
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; there are {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu tries the script out")
    begin = time.perf_counter()
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    rows_wanted = [int(n) for n in (args.rows or ("1,8,64,256,8192" if on_gpu else "1,5")).split(",")]
    timer = graph_microseconds if on_gpu else wall_microseconds
    results: list[dict[str, Any]] = []
    skipped = 0
    with torch.inference_mode():
        ceilings = measure_ceilings(timer, device)
        run = Run(
            device,
            torch.bfloat16 if on_gpu else torch.float32,
            timer,
            quick_graph_microseconds if on_gpu else wall_microseconds,
            ceilings,
            begin + args.seconds,
        )
        print(
            f"copies {ceilings.copy_tb_s:.3f} TB/s, products {ceilings.matmul_tflop_s:.0f} TFLOP/s "
            f"in bfloat16, {ceilings.fp8_tflop_s:.0f} in FP8"
        )
        print(HEADER, flush=True)
        for part in args.only.split(","):
            for work in PARTS[part](run, rows_wanted):
                if time.perf_counter() > run.deadline:
                    skipped += 1
                    continue
                results.append(measure(work, run))
                print(line(results[-1]), flush=True)
                if args.verbose:
                    for column in ("tried", "refused", "bf16_failed", "scaled_mm_failed"):
                        print(f"    {column}: {results[-1].get(column, '')}", flush=True)
                write_results(args.out, "quantized_kernels", results, ceilings)
                if on_gpu:
                    torch.cuda.empty_cache()
    for total in sums(results):
        print(line(total))
        results.append(total)
    write_results(args.out, "quantized_kernels", results, ceilings)
    failed = sum("us" not in row for row in results)
    print(f"{len(results)} results, {failed} failed, {skipped} skipped, {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


def write_results(path: Path | None, kind: str, results: list[dict[str, Any]], ceilings: Ceilings) -> None:
    """Write a report of this kind, if there is a path."""
    if path is None:
        return
    metrics = {f"{name}": value for name, value in ceilings._asdict().items()}
    columns = dict.fromkeys(name for row in results for name in row)
    table = [{name: row.get(name) for name in columns} for row in results]
    report = make_report(kind, arguments={}, metrics=metrics, tables={"kernels": table})
    write_report(path, report)


if __name__ == "__main__":
    sys.exit(main())
