"""`minisgl bench step`: the time of decode and prefill steps against what the hardware allows.

Promise: a step is timed as a server runs it, with the next one always queued behind it, so host work that
hides behind the device does not count and host work that does not hide does. The floor is the larger of two
times: bytes of weights and K/V that the step has to read over the copy bandwidth, and its products over the
matrix rate (`step_floor`), both measured in the same run. Of several ranks (--tp), rank 0's share counts.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from minisgl.benchmark.kernel_timing import Ceilings, graph_microseconds, measure_ceilings
from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.plots import check_output, deliver
from minisgl.benchmark.report import (
    Cell,
    Chart,
    HeatMapChart,
    LinesChart,
    Report,
    engine_arguments,
    format_metrics,
    format_table,
    live_progress,
    make_report,
)
from minisgl.benchmark.settings import OutputSettings, StepBenchSettings
from minisgl.benchmark.step_measure import StepMeasurements
from minisgl.config import EngineConfig
from minisgl.engine.build import build_engine
from minisgl.engine.device import find_device_facts, peak_host_bytes
from minisgl.engine.engine import Engine
from minisgl.engine.follower_link import Started
from minisgl.engine.garbage import collect_once
from minisgl.engine.stages import load_ms
from minisgl.errors import ConfigError
from minisgl.hf_config import read_model_config
from minisgl.model_config import ModelConfig
from minisgl.weights.progress import Progress

CPU_COPY_BYTES = 128 << 20
"""Beyond the caches."""
CPU_MATRIX_WIDTH = 1024


class Points(NamedTuple):
    """What to measure, with every "auto" decided."""

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
    progress = live_progress()
    # On a GPU before the engine, which leaves no memory for it.
    ceilings = _gpu_ceilings() if on_gpu else None
    with model_folder(engine_config, cache_dir=cache_dir, progress=progress) as folder:
        model_config = read_model_config(folder)
        stages: dict[str, float] = {}

        def on_stage(stage: str, duration_ms: float) -> None:
            stages[stage] = duration_ms
            progress(stage, 1, 1)

        with collect_once():
            engine = build_engine(engine_config, folder, on_stage)
    peak_bytes = peak_host_bytes()
    try:
        ceilings = ceilings or _cpu_ceilings(engine.runner.model.lm_head.weight.dtype)
        engine.record_graphs()
        report = measure_steps(engine, model_config, points, ceilings, progress)
        if engine.config.tp > 1:
            own = Started(0, engine.weights_bytes, load_ms(stages), peak_bytes)
            report.tables["ranks"] = _ranks([own, *engine.other_ranks()])
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
    deliver(report, output, out)
    return 0


def read_points(settings: StepBenchSettings, device: str) -> Points:
    """The settings' lists as numbers.

    Raises:
        ConfigError: one is no list of numbers, or a number is out of range.
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
        ConfigError: none does.
    """
    engine.fill_pool()
    measured = StepMeasurements(engine, model_config, points.steps, ceilings)
    measurements: list[tuple[Callable[..., None], tuple[int, ...]]] = [
        *[(measured.decode, point) for point in product(points.batches, points.contexts)],
        *[(measured.prefill, point) for point in product(points.prefills, points.prefixes)],
        *[(measured.mixed, point) for point in product(points.batches, points.contexts, points.mixed)],
    ]
    for index, (measure, point) in enumerate(measurements):
        progress("steps", index, len(measurements))
        measure(*point)
    progress("steps", len(measurements), len(measurements))
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
        "num_recompiles": status.num_recompiles - measured.num_aside,
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
    """With so many rows, unless the user said how many."""
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
    """The best of several runs: a busy machine makes them slower, nothing makes them faster."""
    source = torch.randn(CPU_COPY_BYTES // 4)  # a page of zeros would be read from one place
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
