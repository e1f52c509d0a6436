"""`minisgl bench kernel`: every kernel over its shapes, checked, timed, against ceilings and baselines.

Promise: a kernel that fails its check gets no time; another project's failure is a remark, not ours.
"""

import functools
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import triton

from minisgl.benchmark.attention_problems import (
    AttentionShape,
    decode_problem,
    decode_shape,
    prefill_problem,
)
from minisgl.benchmark.kernel_baselines import flashinfer_calls, has_flashinfer, inductor_calls
from minisgl.benchmark.kernel_timing import (
    MAX_ERROR,
    Ceilings,
    Problem,
    Timer,
    graph_microseconds,
    measure_ceilings,
    wall_microseconds,
)
from minisgl.benchmark.model_shapes import ModelShape, find_shapes
from minisgl.benchmark.plots import Group, check_chart_path, write_chart
from minisgl.benchmark.report import output_path, write_atomically
from minisgl.benchmark.settings import KernelBenchSettings
from minisgl.benchmark.token_problems import (
    SAMPLING,
    add_norm_gated_linear_problem,
    add_norm_linear_problem,
    add_rms_norm_problem,
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
from triton_kernels.linear import (
    add_norm_gated_linear_triton,
    add_norm_linear_triton,
    gated_linear_triton,
    linear_triton,
)
from triton_kernels.linear_many import gated_linear_many, linear_many
from triton_kernels.moe_route import route_triton
from triton_kernels.paged_decode import paged_decode_triton
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
    "add_norm_linear": add_norm_linear_triton,
    "add_norm_gated_linear": add_norm_gated_linear_triton,
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
    "moe_route": route_triton,
    "advance_rows": advance_rows_triton,
    "linear_many": linear_many,
    "gated_linear_many": gated_linear_many,
}
"""Kernels that nothing can be put in the place of."""
BASELINES = ("inductor", "flashinfer")


class BenchCase(NamedTuple):
    """A problem that has not been built yet; `attention` for flashinfer's planning."""

    op: str
    label: str
    build: Callable[[torch.device, torch.dtype], Problem]
    attention: AttentionShape | None = None
    dtype: torch.dtype | None = None  # instead of the run's


def run_kernel_bench(
    settings: KernelBenchSettings, names: tuple[str, ...], out: TextIO, timer: Timer | None = None
) -> int:
    """Measure, print a table, write JSON and plot; returns the exit code, 1 if a check failed.

    Args:
        names: ops, or parts of "op shape", to measure; none = all.
        timer: measures instead of CUDA graphs, for tests.

    Raises:
        ConfigError: an unknown name, model or baseline, a replacement that does not fit, no GPU, or a place
            that can't be written to.
    """
    on_gpu = settings.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError("minisgl bench kernel needs a CUDA GPU and torch sees none")
    plot = Path(settings.plot) if settings.plot else None
    if plot is not None:
        check_chart_path(plot)
    written = output_path("--out", settings.out)
    baselines = _wanted_baselines(settings.baselines)
    functions = _functions(settings.kernel, on_gpu)
    cases = list(_cases(settings.model, names, on_gpu))
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    timer = timer or (graph_microseconds if on_gpu else wall_microseconds)
    torch.manual_seed(time.time_ns())
    begin = time.perf_counter()
    results: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        **_environment(on_gpu),
        "model": settings.model,
        "replaced": list(settings.kernel),
    }
    with torch.inference_mode():
        ceilings = measure_ceilings(timer, device)
        report["ceilings"] = {name: round(value, 4) for name, value in ceilings._asdict().items()}
        report["results"] = results
        print(
            f"copies {ceilings.copy_tb_s:.2f} TB/s, multiplies {ceilings.matmul_tflop_s:.0f} TFLOP/s",
            file=out,
        )
        for case in cases:
            problem = case.build(device, case.dtype or dtype)
            result = _measure(problem, functions[case.op], ceilings, timer)
            if on_gpu:
                result |= _baselines(baselines, problem, case, timer)
            results.append(result)
            print(line(result), file=out, flush=True)
            if written is not None:  # each time, so that an interrupted run leaves what it has
                write_atomically(written, (json.dumps(report, indent=1) + "\n").encode())
            del problem
            if on_gpu:
                torch.cuda.empty_cache()
    failures = sum("failed" in result for result in results)
    print(f"{len(results)} results, {failures} failed, {time.perf_counter() - begin:.0f} s", file=out)
    if written is not None:
        print(written, file=out)
    if plot is not None:
        _plot(report, plot)
        print(plot, file=out)
    return 1 if failures else 0


def line(result: dict[str, Any]) -> str:
    """One result as a line of the table."""
    head = f"{result['op']:<23}{result['shape']:<36}"
    if "failed" in result:
        return f"{head} FAILED: {result['failed']}"
    text = (
        f"{head}{result['us']:>10.2f} us{result['rate']:>9.3f} {result['unit']:<8}"
        f"{result['fraction']:>7.1%} {result['cache']}  err {result['error']:.0e}"
    )
    for name in BASELINES:
        if f"{name}_us" in result:
            text += f"  {name} {result[f'{name}_us'] / result['us']:.2f}x"
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
        yield case("linear", _product(from_attention), linear_problem, *from_attention)
        yield case("linear", _product(from_mlp), linear_problem, *from_mlp)
        yield case("gated_linear", _product(to_mlp), gated_linear_problem, *to_mlp)
        yield case("add_norm_linear", _product(to_attention), add_norm_linear_problem, *to_attention)
        yield case("add_norm_gated_linear", _product(to_mlp), add_norm_gated_linear_problem, *to_mlp)
    for count in (32, 64, 256) if on_gpu else (20,):
        for numbers in ((count, width, qkv), (count, width, width), (count, mlp, width)):
            yield case("linear_many", _product(numbers), linear_many_problem, *numbers)
        numbers = (count, width, 2 * mlp)
        yield case("gated_linear_many", _product(numbers), gated_linear_many_problem, *numbers)
    if shape.experts:
        routed = f"x{shape.experts} top {shape.experts_per_token}"
        experts = f"x{width} {shape.experts}x{shape.expert_width} top {shape.experts_per_token}"
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
    problem: Problem, function: Callable[..., Any], ceilings: Ceilings, timer: Timer
) -> dict[str, Any]:
    """Checked, then timed; `failed` instead of a time where the check fails."""
    result: dict[str, Any] = {"op": problem.op, "shape": problem.label}
    try:
        error = problem.check(function)
        if not error < MAX_ERROR:
            return {**result, "failed": f"relative error {error:.1e}"}
    except Exception as error:  # whatever a kernel of somebody's own raises
        return {**result, "failed": f"{type(error).__name__}: {error}"[:200]}
    us = timer(problem.calls(function))
    return {
        **result,
        "error": error,
        "us": round(us, 2),
        "rate": round(ceilings.rate(problem, us), 4),
        "unit": ceilings.limit(problem),
        "fraction": round(ceilings.floor_us(problem) / us, 4),
        "cache": "cold" if problem.is_cold else "warm",
    }


def _baselines(names: list[str], problem: Problem, case: BenchCase, timer: Timer) -> dict[str, Any]:
    makers = {"inductor": inductor_calls, "flashinfer": flashinfer_calls}
    found: dict[str, Any] = {}
    for name in names:
        if name == "flashinfer" and not has_flashinfer():
            continue
        torch.cuda.empty_cache()
        try:
            calls = makers[name](problem, case.attention)
            if calls is not None:
                found[f"{name}_us"] = round(timer(calls), 2)
        except Exception as error:  # another project's limits are a result, not ours to raise
            found[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:120]
    return found


def _environment(on_gpu: bool) -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else "CPU interpreter",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _plot(report: dict[str, Any], path: Path) -> None:
    def fraction(result: dict[str, Any], name: str) -> float | None:
        us = result.get(f"{name}_us" if name else "us")
        return None if us is None else result["fraction"] * result["us"] / us

    def note(result: dict[str, Any], name: str) -> str:
        us = result.get(f"{name}_us" if name else "us")
        return "" if us is None else f"{us:.1f} us"

    results = [result for result in report["results"] if "failed" not in result]
    others = [name for name in BASELINES if any(f"{name}_us" in r for r in results)]
    groups = [
        Group(
            f"{result['op']} {result['shape']}",
            tuple(fraction(result, name) for name in (*others, "")),
            tuple(note(result, name) for name in (*others, "")),
        )
        for result in results
    ]
    title = f"{report['gpu']}, {report['model']}: fraction of the roofline"
    write_chart(path, title, (*others, "ours"), groups, 1.0)
