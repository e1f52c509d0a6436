"""`minisgl bench kernel`: checks and times every kernel, and compares it with the roofline and baselines.

Promise: a kernel that fails its check is not timed. A failed baseline is noted and fails nothing.
"""

import dataclasses
import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch
from msgspec.structs import replace

from minisgl.benchmark.kernels.kernel_baselines import BASELINES, baseline_calls
from minisgl.benchmark.kernels.kernel_op import Case, KernelOp
from minisgl.benchmark.kernels.kernel_timing import (
    MAX_ERROR,
    Calls,
    Ceilings,
    Problem,
    graph_samples,
    measure_ceilings,
    wall_samples,
)
from minisgl.benchmark.kernels.model_shapes import read_model_shapes
from minisgl.benchmark.kernels.ops.all_ops import OPS
from minisgl.benchmark.reports.plots import check_output, write_outputs
from minisgl.benchmark.reports.report import BarsChart, Cell, Report, make_report
from minisgl.benchmark.settings import KernelBenchSettings, OutputSettings
from minisgl.errors import ConfigError
from minisgl.progress import ShownProgress, lines_on
from triton_kernels.registry import KERNELS, with_replacements

OURS = "ours"
COLUMNS = (
    "shape",
    *(f"{who}_{what}" for who in (OURS, *BASELINES) for what in ("us", "fraction")),
    *("floor_us", "rate", "unit", "cache", "error", "failed"),
    *(f"{name}_failed" for name in BASELINES),
)
"""Columns of an op's table; fractions are of the roofline, and `rate` is our kernel's."""

Sampler = Callable[[Calls], list[float]]
"""Measures the microseconds of one call several times."""
Row = dict[str, Cell]
"""The row of one kernel and shape in the report's table."""


def run_kernel_bench(
    settings: KernelBenchSettings, names: tuple[str, ...], output: OutputSettings, out: TextIO
) -> int:
    """Measure, print a line for each result, write the report and draw it.

    Returns the exit code, which is 1 if a check failed.

    Args:
        names: ops to measure, or parts of "op shape"; empty = all.

    Raises:
        ConfigError: an unknown name, model or baseline, a replacement that does not fit, no GPU, or a place
            that can't be written to.
    """
    on_gpu = settings.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError("minisgl bench kernel needs a CUDA GPU and torch sees none")
    check_output(output)
    baselines = _wanted_baselines(settings.baselines)
    functions = _functions(settings.kernel, on_gpu)
    cases = list(_cases(settings.model, names, on_gpu))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    sampler = graph_samples if on_gpu else wall_samples
    torch.manual_seed(time.time_ns())
    begin = time.perf_counter()
    results: list[tuple[str, Row]] = []
    samples: dict[str, list[float]] = {}
    with torch.inference_mode(), ShownProgress(lines_on()) as progress:
        ceilings = measure_ceilings(lambda calls: statistics.median(sampler(calls)), device)
        print(
            f"copies {ceilings.copy_tb_s:.2f} TB/s, multiplies {ceilings.matmul_tflop_s:.0f} TFLOP/s",
            file=out,
        )
        report = make_report(
            "kernel",
            arguments={"names": list(names), **dataclasses.asdict(settings), "kernel": list(settings.kernel)},
            metrics={"copy_tb_per_s": ceilings.copy_tb_s, "matmul_tflop_per_s": ceilings.matmul_tflop_s},
        )
        for index, (op, case) in enumerate(cases):
            progress("measuring", index, len(cases), "shapes")
            problem = case.build(device, case.dtype or dtype)
            row, times = _measure(case.label, problem, functions[op.name], ceilings, sampler)
            if on_gpu and times:
                _add_baselines(row, times, baselines, op, problem, case, ceilings, sampler)
            results.append((op.name, row))
            progress.clear()
            print(line(op.name, row), file=out, flush=True)
            samples |= {f"{op.name} {case.label} {who}_us": found for who, found in times.items()}
            report = with_results(report, results, samples)
            # Written after each result, so that an interrupted run leaves a report.
            write_outputs(report, dataclasses.replace(output, plot=None), io.StringIO())
            del problem
            if on_gpu:
                torch.cuda.empty_cache()
        progress("measuring", len(cases), len(cases), "shapes")
    failures = sum("failed" in row for _, row in results)
    print(f"{len(results)} results, {failures} failed, {time.perf_counter() - begin:.0f} s", file=out)
    write_outputs(report, output, out)
    return 1 if failures else 0


def with_results(
    report: Report, results: Sequence[tuple[str, Row]], samples: Mapping[str, list[float]]
) -> Report:
    """The report with a table and a chart for each op, and the medians of all samples as metrics.

    Args:
        results: the op and the row of each result.
        samples: microseconds by name, for example "rms_norm 64x4096 ours_us".
    """
    tables: dict[str, list[Row]] = {}
    for op, row in results:
        tables.setdefault(op, []).append({name: row.get(name) for name in COLUMNS})
    medians = {
        f"{name.removesuffix('_us')}_p50_us": statistics.median(values) for name, values in samples.items()
    }
    charts = []
    for op, rows in tables.items():
        shown = [who for who in (*BASELINES, OURS) if any(row[f"{who}_us"] is not None for row in rows)]
        if shown:
            charts.append(
                BarsChart(
                    title=f"{op}: share of the roofline, and microseconds",
                    table=op,
                    label="shape",
                    values=tuple(f"{who}_fraction" for who in shown),
                    notes=tuple(f"{who}_us" for who in shown),
                    x_label="floor / time",
                    as_percent=True,
                )
            )
    return replace(
        report, tables=tables, metrics=report.metrics | medians, samples=dict(samples), charts=tuple(charts)
    )


def line(op: str, row: Row) -> str:
    """One result as a line for the terminal."""
    head = f"{op:<23}{row['shape']:<36}"
    if "failed" in row:
        return f"{head} FAILED: {row['failed']}"
    text = (
        f"{head}{row['ours_us']:>10.2f} us{row['rate']:>9.3f} {row['unit']:<8}"
        f"{row['ours_fraction']:>7.1%} {row['cache']}  err {row['error']:.0e}"
    )
    ours = row["ours_us"]
    for name in BASELINES:
        theirs = row.get(f"{name}_us")
        if isinstance(theirs, float) and isinstance(ours, float):
            text += f"  {name} {theirs / ours:.2f}x"
    return text


def _wanted_baselines(names: str) -> list[str]:
    """The baselines in a comma-separated list.

    Raises:
        ConfigError: the list contains an unknown name.
    """
    wanted = [] if names == "none" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in BASELINES:
            raise ConfigError(f"--baselines: there are {' and '.join(BASELINES)}, and none; got {name!r}")
    return wanted


def _functions(specs: tuple[str, ...], on_gpu: bool) -> dict[str, Callable[..., Any]]:
    """The function to time for each op: the engine's, or its replacement by --kernel."""
    try:
        kernels = with_replacements(specs)
    except ValueError as error:
        raise ConfigError(f"--kernel: {error}") from error
    functions = kernels._asdict()
    if not on_gpu:  # on a CPU the engine would run the reference, so take only replacements
        functions = {op: one for op, one in functions.items() if one is not getattr(KERNELS, op)}
    return {name: op.launcher for name, op in OPS.items()} | functions


def _cases(model: str, names: tuple[str, ...], on_gpu: bool) -> Iterator[tuple[KernelOp, Case]]:
    """The wanted cases: a name is an op, or a part of "op shape".

    Raises:
        ConfigError: a name matches nothing.
    """
    shapes = read_model_shapes(model)
    every = {
        f"{op.name} {case.label}": (op, case)
        for shape in shapes
        for op in OPS.values()
        for case in op.bench_cases(shape, on_gpu)
    }
    for name in names:
        if not any(name in title for title in every):
            ops = ", ".join(dict.fromkeys(op.name for op, _ in every.values()))
            raise ConfigError(f"no kernel and no shape is called {name!r}; the kernels: {ops}")
    for title, case in every.items():
        if not names or any(name in title for name in names):
            yield case


def _measure(
    label: str, problem: Problem, function: Callable[..., Any], ceilings: Ceilings, sampler: Sampler
) -> tuple[Row, dict[str, list[float]]]:
    """Check, then time. Returns the row and the samples; after a failed check, the row has `failed`."""
    row: Row = {"shape": label}
    try:
        error = problem.check(function)
        if not error < MAX_ERROR:
            return {**row, "failed": f"relative error {error:.1e}"}, {}
    except Exception as error:  # a user's own kernel may raise anything
        return {**row, "failed": f"{type(error).__name__}: {error}"[:200]}, {}
    samples = _rounded(sampler(problem.calls(function)))
    us = statistics.median(samples)
    row |= {
        "error": error,
        "floor_us": round(ceilings.floor_us(problem), 3),
        "rate": round(ceilings.rate(problem, us), 4),
        "unit": ceilings.limit(problem),
        "cache": "cold" if problem.is_cold else "warm",
        "ours_us": us,
        "ours_fraction": round(ceilings.floor_us(problem) / us, 4),
    }
    return row, {OURS: samples}


def _add_baselines(
    row: Row,
    samples: dict[str, list[float]],
    names: list[str],
    op: KernelOp,
    problem: Problem,
    case: Case,
    ceilings: Ceilings,
    sampler: Sampler,
) -> None:
    """Time the baselines of the problem, and add their results to `row` and `samples`."""
    floor_us = ceilings.floor_us(problem)
    for name in names:
        torch.cuda.empty_cache()
        try:
            calls = baseline_calls(name, op, problem, case)
            if calls is None:
                continue
            found = _rounded(sampler(calls))
        except Exception as error:  # a failure of another project is a result
            row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:120]
            continue
        us = statistics.median(found)
        samples[name] = found
        row |= {f"{name}_us": us, f"{name}_fraction": round(floor_us / us, 4)}


def _rounded(samples: list[float]) -> list[float]:
    return [round(us, 3) for us in samples]
