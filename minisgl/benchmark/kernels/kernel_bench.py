"""`minisgl bench kernel`: every kernel over its shapes, checked, timed, against ceilings and baselines.

Promise: a kernel that fails its check gets no time; another project's failure is a remark, not ours.
"""

import dataclasses
import functools
import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import torch
from msgspec.structs import replace

from minisgl.benchmark.attention_problems import (
    AttentionShape,
    decode_problem,
    decode_shape,
    prefill_problem,
    rope_decode_problem,
)
from minisgl.benchmark.kernel_baselines import flashinfer_calls, has_flashinfer, inductor_calls
from minisgl.benchmark.kernel_timing import (
    MAX_ERROR,
    Calls,
    Ceilings,
    Problem,
    graph_samples,
    measure_ceilings,
    wall_samples,
)
from minisgl.benchmark.model_shapes import ModelShape, find_shapes
from minisgl.benchmark.plots import check_output, deliver
from minisgl.benchmark.report import BarsChart, Cell, Report, make_report
from minisgl.benchmark.settings import KernelBenchSettings, OutputSettings
from minisgl.benchmark.token_problems import (
    SAMPLING,
    add_rms_norm_problem,
    add_rms_norm_router_problem,
    advance_rows_problem,
    fused_moe_problem,
    gated_linear_many_problem,
    gated_linear_problem,
    gelu_tanh_mul_problem,
    linear_many_problem,
    linear_problem,
    moe_route_problem,
    rms_norm_problem,
    rope_store_problem,
    sample_problem,
    silu_mul_problem,
)
from minisgl.errors import ConfigError
from triton_kernels.advance_rows import advance_rows_triton
from triton_kernels.fused_moe import fused_moe_triton
from triton_kernels.linear_few import gated_linear_triton, linear_triton
from triton_kernels.linear_many import gated_linear_many, linear_many
from triton_kernels.moe_route import route_triton
from triton_kernels.norm_router import add_rms_norm_router_triton
from triton_kernels.paged_decode import paged_decode_triton, rope_paged_decode
from triton_kernels.paged_prefill import paged_prefill_triton
from triton_kernels.registry import KERNELS, with_replacements
from triton_kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from triton_kernels.rope_store import rope_store_triton
from triton_kernels.sample import sample_triton
from triton_kernels.silu_mul import gelu_tanh_mul_triton, silu_mul_triton

LAUNCHERS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm_triton,
    "add_rms_norm": add_rms_norm_triton,
    "linear": linear_triton,
    "gated_linear": gated_linear_triton,
    "silu_mul": silu_mul_triton,
    "rope_store": rope_store_triton,
    "fused_moe": fused_moe_triton,
    "sample": sample_triton,
    "paged_decode": paged_decode_triton,
    "paged_prefill": paged_prefill_triton,
}
"""Kernels that run in the interpreter, where an engine would run the reference."""
OTHERS: dict[str, Callable[..., Any]] = {
    "gelu_tanh_mul": gelu_tanh_mul_triton,
    "add_rms_norm_router": add_rms_norm_router_triton,
    "rope_paged_decode": rope_paged_decode,
    "moe_route": route_triton,
    "advance_rows": advance_rows_triton,
    "linear_many": linear_many,
    "gated_linear_many": gated_linear_many,
}
"""Kernels that nothing can be put in the place of."""
BASELINES = ("inductor", "flashinfer")
OURS = "ours"
COLUMNS = (
    "shape",
    *(f"{who}_{what}" for who in (OURS, *BASELINES) for what in ("us", "fraction")),
    *("floor_us", "rate", "unit", "cache", "error", "failed"),
    *(f"{name}_failed" for name in BASELINES),
)
"""Of an op's table; fractions are of the roofline, rates ours."""

Sampler = Callable[[Calls], list[float]]
"""Microseconds of one of the calls, several times."""
Row = dict[str, Cell]
"""What the report's table says of one kernel on one shape."""


class BenchCase(NamedTuple):
    """A problem that has not been built yet; `attention` for flashinfer's planning."""

    op: str
    label: str
    build: Callable[[torch.device, torch.dtype], Problem]
    attention: AttentionShape | None = None
    dtype: torch.dtype | None = None  # instead of the run's


def run_kernel_bench(
    settings: KernelBenchSettings, names: tuple[str, ...], output: OutputSettings, out: TextIO
) -> int:
    """Measure, print a line for each result, write the report and draw it; returns the exit code, 1 if a
    check failed.

    Args:
        names: ops, or parts of "op shape", to measure; none = all.

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
    with torch.inference_mode():
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
        for case in cases:
            problem = case.build(device, case.dtype or dtype)
            row, times = _measure(problem, functions[case.op], ceilings, sampler)
            if on_gpu and times:
                _add_baselines(row, times, baselines, problem, case, ceilings, sampler)
            results.append((problem.op, row))
            print(line(problem.op, row), file=out, flush=True)
            samples |= {f"{problem.op} {problem.label} {who}_us": found for who, found in times.items()}
            report = with_results(report, results, samples)
            # Each time, so that an interrupted run leaves what it has.
            deliver(report, dataclasses.replace(output, plot=None), io.StringIO())
            del problem
            if on_gpu:
                torch.cuda.empty_cache()
    failures = sum("failed" in row for _, row in results)
    print(f"{len(results)} results, {failures} failed, {time.perf_counter() - begin:.0f} s", file=out)
    deliver(report, output, out)
    return 1 if failures else 0


def with_results(
    report: Report, results: Sequence[tuple[str, Row]], samples: Mapping[str, list[float]]
) -> Report:
    """The report with a table and a chart for each op, and with metrics: the medians of all samples.

    Args:
        results: op and row of each result.
        samples: by names as "rms_norm 64x4096 ours_us".
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
    """One result for the terminal."""
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
    """Those of BASELINES that `names` lists.

    Raises:
        ConfigError: it lists something else.
    """
    wanted = [] if names == "none" else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in BASELINES:
            raise ConfigError(f"--baselines: there are {' and '.join(BASELINES)}, and none; got {name!r}")
    return wanted


def _functions(specs: tuple[str, ...], on_gpu: bool) -> dict[str, Callable[..., Any]]:
    """What to time for each op: what the engine calls, or what was put in its place."""
    try:
        kernels = with_replacements(specs)
    except ValueError as error:
        raise ConfigError(f"--kernel: {error}") from error
    if on_gpu:
        return kernels._asdict() | OTHERS
    replaced = {op: one for op, one in kernels._asdict().items() if one is not getattr(KERNELS, op)}
    return LAUNCHERS | OTHERS | replaced


def _cases(model: str, names: tuple[str, ...], on_gpu: bool) -> Iterator[BenchCase]:
    """The wanted cases: a name is an op, or a part of "op shape".

    Raises:
        ConfigError: a name matches nothing.
    """
    every = [case for shape in find_shapes(model) for case in _cases_of(shape, on_gpu)]
    for name in names:
        if not any(name in f"{case.op} {case.label}" for case in every):
            ops = ", ".join(dict.fromkeys(case.op for case in every))
            raise ConfigError(f"no kernel and no shape is called {name!r}; the kernels: {ops}")
    seen = set()
    for case in every:
        title = f"{case.op} {case.label}"
        if title not in seen and (not names or any(name in title for name in names)):
            seen.add(title)
            yield case


def _cases_of(shape: ModelShape, on_gpu: bool) -> Iterator[BenchCase]:
    def case(op: str, label: str, build: Callable[..., Problem], *numbers: Any) -> BenchCase:
        return BenchCase(op, label, functools.partial(build, *numbers))

    width, mlp, vocab = shape.hidden, shape.intermediate, shape.vocab
    heads = f"{shape.heads}/{shape.kv_heads}/{shape.head_dim}" + (" normed" if shape.qk_norm else "")
    for tokens in (1, 64, 256, 4096, 16384) if on_gpu else (1, 5):
        yield case("rms_norm", f"{tokens}x{width}", rms_norm_problem, tokens, width)
        yield case("add_rms_norm", f"{tokens}x{width}", add_rms_norm_problem, tokens, width)
        yield case("silu_mul", f"{tokens}x{mlp}", silu_mul_problem, tokens, mlp)
        yield case("gelu_tanh_mul", f"{tokens}x{mlp}", gelu_tanh_mul_problem, tokens, mlp)
        yield case("rope_store", f"{tokens}x{heads}", rope_store_problem, tokens, shape)
    rows = 256 if on_gpu else 2
    yield case("advance_rows", f"{rows}", advance_rows_problem, rows)
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if not on_gpu:  # the interpreter is slow
        mlp, qkv = min(mlp, 192), min(qkv, 192)
    for count in (1, 8, 16) if on_gpu else (2,):
        from_attention, from_mlp = (count, width, width), (count, mlp, width)
        to_attention, to_mlp = (count, width, qkv), (count, width, 2 * mlp)
        yield case("linear", _product(to_attention), linear_problem, *to_attention)
        yield case("linear", _product(from_attention), linear_problem, *from_attention)
        yield case("linear", _product(from_mlp), linear_problem, *from_mlp)
        yield case("gated_linear", _product(to_mlp), gated_linear_problem, *to_mlp)
    for count in (32, 64, 256) if on_gpu else (20,):
        for numbers in ((count, width, qkv), (count, width, width), (count, mlp, width)):
            yield case("linear_many", _product(numbers), linear_many_problem, *numbers)
        numbers = (count, width, 2 * mlp)
        yield case("gated_linear_many", _product(numbers), gated_linear_many_problem, *numbers)
    if shape.experts:
        routed = f"x{shape.experts} top {shape.experts_per_token}"
        experts = f"x{width} {shape.experts}x{shape.expert_width} top {shape.experts_per_token}"
        for tokens in (1, 2, 16) if on_gpu else (2,):
            label = f"{tokens}x{width} {shape.experts}"
            yield case("add_rms_norm_router", label, add_rms_norm_router_problem, tokens, shape)
        for tokens in (1, 64, 8192) if on_gpu else (2,):
            yield case("moe_route", f"{tokens}{routed}", moe_route_problem, tokens, shape)
        for tokens in (1, 2, 4, 8, 16, 32, 64, 256, 1024, 8192) if on_gpu else (2,):
            yield case("fused_moe", f"{tokens}{experts}", fused_moe_problem, tokens, shape)
    for count in sorted({1, rows}) if on_gpu else (rows,):
        for kind in SAMPLING:
            yield case("sample", f"{count}x{vocab} {kind}", sample_problem, count, vocab, kind)
    if on_gpu:
        for kind in ("top_p", "top_p flat"):
            in_float32 = case("sample", f"{rows}x{vocab} {kind} float32", sample_problem, rows, vocab, kind)
            yield in_float32._replace(dtype=torch.float32)
    for attention in _decode_shapes(shape, on_gpu):
        yield BenchCase(
            "paged_decode", attention.label, functools.partial(decode_problem, attention), attention
        )
        build = functools.partial(rope_decode_problem, attention, shape.qk_norm)
        yield BenchCase("rope_paged_decode", attention.label, build)
    for attention in _prefill_shapes(shape, on_gpu):
        yield BenchCase(
            "paged_prefill", attention.label, functools.partial(prefill_problem, attention), attention
        )


def _product(numbers: tuple[int, int, int]) -> str:
    rows, width, outputs = numbers
    return f"{rows}x{width} to {outputs}"


def _decode_shapes(shape: ModelShape, on_gpu: bool) -> list[AttentionShape]:
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    of = f" {shape.heads}/{shape.kv_heads}/{shape.head_dim}"
    if not on_gpu:
        return [decode_shape(f"3x70{of}", [70, 1, 33], **heads)]
    batches = {
        "64x4096": [4096] * 64,
        "1x131072": [131072],
        "256x1024": [1024] * 256,
        "8x8192": [8192] * 8,
        "1x1024": [1024],
        "1x100000+255x100": [100_000] + [100] * 255,
        "ragged 64x~2000": [37 + 61 * i for i in range(64)],
    }
    pages = {f"64x4096{of} page {size}": size for size in (1, 256)}
    return [
        *(decode_shape(label + of, contexts, **heads) for label, contexts in batches.items()),
        *(decode_shape(label, [4096] * 64, **heads, page_size=size) for label, size in pages.items()),
    ]


def _prefill_shapes(shape: ModelShape, on_gpu: bool) -> list[AttentionShape]:
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    of = f" {shape.heads}/{shape.kv_heads}/{shape.head_dim}"
    batches = {
        "1x8192": ([8192], [8192]),
        "8x2048": ([2048] * 8, [2048] * 8),
        "1x32768": ([32768], [32768]),
        "512 on 32k": ([32768 + 512], [512]),
        "2048 on 32k": ([32768 + 2048], [2048]),
        "64 decode 2k + 448 on 4k": ([2048] * 64 + [4096 + 448], [1] * 64 + [448]),
    }
    if not on_gpu:
        batches = {"5 on 20": ([25], [5])}
    return [AttentionShape(label + of, contexts, new, **heads) for label, (contexts, new) in batches.items()]


def _measure(
    problem: Problem, function: Callable[..., Any], ceilings: Ceilings, sampler: Sampler
) -> tuple[Row, dict[str, list[float]]]:
    """Checked, then timed: the row, with `failed` for a time where the check fails, and the samples."""
    row: Row = {"shape": problem.label}
    try:
        error = problem.check(function)
        if not error < MAX_ERROR:
            return {**row, "failed": f"relative error {error:.1e}"}, {}
    except Exception as error:  # whatever a kernel of somebody's own raises
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
    problem: Problem,
    case: BenchCase,
    ceilings: Ceilings,
    sampler: Sampler,
) -> None:
    """Time what others have for the problem, into `row` and `samples`."""
    makers = {"inductor": inductor_calls, "flashinfer": flashinfer_calls}
    floor_us = ceilings.floor_us(problem)
    for name in names:
        if name == "flashinfer" and not has_flashinfer():
            continue
        torch.cuda.empty_cache()
        try:
            calls = makers[name](problem, case.attention)
            if calls is None:
                continue
            found = _rounded(sampler(calls))
        except Exception as error:  # another project's limits are a result, not ours to raise
            row[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:120]
            continue
        us = statistics.median(found)
        samples[name] = found
        row |= {f"{name}_us": us, f"{name}_fraction": round(floor_us / us, 4)}


def _rounded(samples: list[float]) -> list[float]:
    return [round(us, 3) for us in samples]
