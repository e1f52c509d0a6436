"""`minisgl bench step`: measures decode and prefill steps and compares them with the hardware's limits.

Promise: a step is timed as a server runs it, with the next step always queued behind it. Host work that
overlaps with the device therefore costs nothing, and other host work does. The floor is the larger of two
times (`step_floor`): the bytes to read over the copy bandwidth, and the FLOPs over the matrix rate. The same
run measures both rates. With several ranks (--tp), times and floor are rank 0's.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from minisgl.benchmark.kernels.kernel_timing import Ceilings, graph_microseconds, measure_ceilings
from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.reports.plots import check_output, write_outputs
from minisgl.benchmark.reports.report import (
    Cell,
    Chart,
    HeatMapChart,
    LinesChart,
    Report,
    engine_arguments,
    format_metrics,
    format_table,
    make_report,
)
from minisgl.benchmark.settings import OutputSettings, StepBenchSettings
from minisgl.benchmark.steps.compile_mode import without_fallback
from minisgl.benchmark.steps.step_measure import StepMeasurements
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.ranks.follower_link import Started
from minisgl.engine.start.build import build_engine
from minisgl.engine.start.device import find_device_facts, peak_host_bytes
from minisgl.engine.start.gc_freeze import pause_then_freeze_gc
from minisgl.engine.start.startup_stages import load_ms
from minisgl.errors import ConfigError
from minisgl.model_config.config import ModelConfig
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.progress import Progress, ShownProgress, lines_on

CPU_COPY_BYTES = 128 << 20
"""Larger than the caches."""
CPU_MATRIX_WIDTH = 1024


class Points(NamedTuple):
    """The steps to measure, with every "auto" resolved."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    prefixes: tuple[int, ...]
    steps: int
    mixed: tuple[int, ...] = ()


AUTO = {
    "cuda": Points((1, 8, 64, 256), (128, 1024, 4096), (16, 256, 1024, 4096), (0, 4096), 60),
    "cpu": Points((1, 4), (32, 256), (16, 128), (0, 256), 9),
}


def run_step_bench(
    settings: StepBenchSettings,
    engine_config: EngineConfig,
    output: OutputSettings,
    out: TextIO,
    *,
    cache_dir: Path | None = None,
) -> int:
    """Measure, print, write and draw; returns the exit code.

    Raises:
        ConfigError: a setting is impossible.
        ModelError: the model can't be loaded.
    """
    check_output(output)
    on_gpu = engine_config.device != "cpu" and find_device_facts().has_cuda
    points = read_points(settings, "cuda" if on_gpu else "cpu")
    engine_config = _with_rows(engine_config, max(points.batches) + bool(points.mixed))
    # Measured before the engine starts, because the engine takes all memory of a GPU.
    ceilings = _gpu_ceilings() if on_gpu else None
    with ShownProgress(lines_on()) as progress:
        with model_folder(engine_config, cache_dir=cache_dir, progress=progress) as folder:
            engine_config = without_fallback(engine_config, folder)
            model_config = read_model_config(folder, engine_config.quantization, engine_config.kv_dtype)
            stages: dict[str, float] = {}

            def on_stage(stage: str, duration_ms: float) -> None:
                stages[stage] = duration_ms
                progress(stage, 1, 1)

            with pause_then_freeze_gc():
                engine = build_engine(engine_config, folder, on_stage)
        peak_bytes = peak_host_bytes()
        try:
            ceilings = ceilings or _cpu_ceilings(engine.runner.model.embed_tokens.weight.dtype)
            engine.record_graphs()
            report = measure_steps(engine, model_config, points, ceilings, progress)
            if engine.config.tp > 1:
                own = Started(0, engine.weights_bytes, load_ms(stages), peak_bytes)
                report.tables["ranks"] = _ranks([own, *engine.wait_for_other_ranks()])
        finally:
            engine.close()
    for name in ("decode", "prefill", "mixed", "ranks"):
        if report.tables.get(name):
            print(f"{name}\n{format_table(report.tables[name])}\n", file=out)
    if report.tables["left_out"]:
        left_out = ", ".join(str(row["point"]) for row in report.tables["left_out"])
        print(f"left out, because they don't fit the engine's context, pool or chunk: {left_out}\n", file=out)
    shown = {name: value for name, value in report.metrics.items() if not name.endswith("_p50_ms")}
    print(format_metrics(shown), file=out)
    write_outputs(report, output, out)
    return 0


def read_points(settings: StepBenchSettings, device: str) -> Points:
    """The settings' lists as numbers.

    Raises:
        ConfigError: a list has something else than numbers, or a number is out of range.
    """
    auto = AUTO[device]
    steps = auto.steps if settings.steps is None else settings.steps
    if steps < 3:
        raise ConfigError(f"--steps must be at least 3, got {steps}")
    return Points(
        _numbers("--batches", settings.batches, auto.batches, 1),
        _numbers("--contexts", settings.contexts, auto.contexts, 2),
        _numbers("--prefills", settings.prefills, auto.prefills, 1),
        _numbers("--prefixes", settings.prefixes, auto.prefixes, 0),
        steps,
        _numbers("--mixed", settings.mixed, auto.mixed, 1),
    )


def measure_steps(
    engine: Engine, model_config: ModelConfig, points: Points, ceilings: Ceilings, progress: Progress
) -> Report:
    """Time every point that fits the engine.

    Raises:
        ConfigError: no point fits.
    """
    engine.fill_pool()
    measured = StepMeasurements(engine, model_config, points.steps, ceilings)
    measurements: list[tuple[Callable[..., None], tuple[int, ...]]] = [
        *[(measured.decode, point) for point in product(points.batches, points.contexts)],
        *[(measured.prefill, point) for point in product(points.prefills, points.prefixes)],
        *[(measured.mixed, point) for point in product(points.batches, points.contexts, points.mixed)],
    ]
    for index, (measure, point) in enumerate(measurements):
        progress("steps", index, len(measurements), "points")
        measure(*point)
    progress("steps", len(measurements), len(measurements), "points")
    if not measured.samples:
        raise ConfigError(
            f"no point fits this engine (context {engine.max_context_tokens} tokens, pool of "
            f"{engine.num_pages} pages, chunks of {engine.config.chunk_tokens} tokens); choose smaller ones"
        )
    return _report(engine, points, ceilings, measured)


def _report(
    engine: Engine,
    points: Points,
    ceilings: Ceilings,
    measured: StepMeasurements,
) -> Report:
    status, tables, samples = engine.status(0), measured.tables, measured.samples
    metrics: dict[str, Any] = {
        f"{name.removesuffix('_ms')}_p50_ms": statistics.median(values) for name, values in samples.items()
    }
    metrics |= {
        "copy_tb_per_s": ceilings.copy_tb_s,
        "matmul_tflop_per_s": ceilings.matmul_tflop_s,
        "num_graph_misses": status.num_graph_misses,
        "num_recompiles": status.num_recompiles - measured.num_unmeasured_compilations,
    }
    charts: list[Chart] = []
    for name, row, column, x in (
        ("decode", "batch", "context", "batch"),
        ("prefill", "new_tokens", "prefix", "new_tokens"),
    ):
        if not tables[name]:
            continue
        title = f"{engine.config.model}: {name} step"
        charts += [
            HeatMapChart(
                title=f"{title}, floor / wall time",
                table=name,
                row=row,
                column=column,
                value="fraction",
                label="share of the roofline",
                as_percent=True,
            ),
            LinesChart(
                title=f"{title}, wall time and floor",
                table=name,
                x=x,
                y=("wall_ms", "floor_ms"),
                by=column,
                x_label=x,
                y_label="milliseconds",
                log_x=True,
                log_y=True,
            ),
        ]
    return make_report(
        "step",
        arguments={"points": points._asdict(), "engine": engine_arguments(engine.config)},
        metrics=metrics,
        tables=tables,
        samples=samples,
        charts=charts,
    )


def _numbers(flag: str, text: str | None, auto: tuple[int, ...], least: int) -> tuple[int, ...]:
    if text is None:
        return auto
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} must be whole numbers separated by commas, got {text!r}") from None
    if min(numbers) < least:
        raise ConfigError(f"{flag} must be at least {least} each, got {text!r}")
    return tuple(dict.fromkeys(numbers))


def _with_rows(config: EngineConfig, num_rows: int) -> EngineConfig:
    """The settings with room for `num_rows` rows, unless the user has set the number."""
    if config.max_running_requests is None:
        return replace(config, max_running_requests=num_rows)
    if config.max_running_requests < num_rows:
        raise ConfigError(
            f"the largest step has {num_rows} rows, which --max-running-requests "
            f"{config.max_running_requests} excludes"
        )
    return config


def _gpu_ceilings() -> Ceilings:
    with torch.inference_mode():
        ceilings = measure_ceilings(graph_microseconds, torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.empty_cache()
    return ceilings


def _cpu_ceilings(dtype: torch.dtype) -> Ceilings:
    """The fastest of several runs, because other processes can only make a run slower."""
    source = torch.randn(CPU_COPY_BYTES // 4)  # random: pages of zeros may share one physical page
    target = torch.empty_like(source)
    factors = torch.randn((2, CPU_MATRIX_WIDTH, CPU_MATRIX_WIDTH)).to(dtype)

    def best_s(run: Callable[[], object]) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return min(times)

    with torch.inference_mode():
        copy_s = best_s(lambda: target.copy_(source))
        matmul_s = best_s(lambda: factors[0] @ factors[1])
    return Ceilings(2e-12 * source.nbytes / copy_s, 2e-12 * CPU_MATRIX_WIDTH**3 / matmul_s)


def _ranks(starts: list[Started]) -> list[dict[str, Cell]]:
    return [
        {
            "rank": start.rank,
            "weights_gb": start.weights_bytes / 1e9,
            "load_s": start.load_ms / 1e3,
            "peak_host_gb": start.peak_host_bytes / 1e9,
        }
        for start in starts
    ]
