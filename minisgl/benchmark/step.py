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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
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
from minisgl.benchmark.step_floor import Work, costs_of, experts_hit
from minisgl.config import EngineConfig
from minisgl.engine.build import build_engine
from minisgl.engine.device import find_device_facts, peak_host_bytes
from minisgl.engine.engine import Engine
from minisgl.engine.follower_link import Started
from minisgl.engine.garbage import collect_once
from minisgl.engine.inputs import build_prefill
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.stages import load_ms
from minisgl.engine.steps import DecodeStep, prefill_step
from minisgl.errors import ConfigError
from minisgl.hf_config import read_model_config
from minisgl.model_config import ModelConfig
from minisgl.parallel.sizes import rank_sizes
from minisgl.scheduler.plan import Chunk, PageUpdate, RowInit, StepPlan
from minisgl.weights.progress import Progress

WARM_UP_STEPS = 3
ROUTED_STEPS = 3
"""Decode steps in which the experts that are hit are counted."""
PROFILED_STEPS = 20
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


class Times(NamedTuple):
    """One point's steps."""

    wall_ms: list[float]
    device_ms: list[float] | None  # between CUDA events


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
    costs = costs_of(engine.runner, rank_sizes(model_config, engine.config.tp))
    engine.fill_pool()
    num_aside = 0  # compilations that no measured step needed
    samples: dict[str, list[float]] = {}
    tables: dict[str, list[dict[str, Cell]]] = {"decode": [], "prefill": [], "mixed": [], "left_out": []}
    decode_points = [(b, c) for b in points.batches for c in points.contexts]
    prefill_points = [(n, p) for n in points.prefills for p in points.prefixes]
    mixed_points = [(b, c, n) for b, c in decode_points for n in points.mixed]
    num_points = len(decode_points) + len(prefill_points) + len(mixed_points)
    profiled_steps = PROFILED_STEPS if engine.config.tp > 1 and engine.config.device == "cuda" else 0
    for index, (batch, context) in enumerate(decode_points):
        progress("steps", index, num_points)
        start = max(2, context - points.steps // 2)
        num_tokens = start + points.steps + WARM_UP_STEPS + ROUTED_STEPS + profiled_steps + 1
        if not _fits(engine, batch, num_tokens):
            tables["left_out"].append({"point": f"decode {batch} x {context}"})
            continue
        _place_rows(engine, batch, start, num_tokens)
        rows = tuple(range(batch))
        plan = StepPlan(0, (), (), rows, (), rows)
        times = _time(engine, plan, points.steps)
        hit, num_compiled = _experts_hit(
            engine, model_config, batch, partial(_decode_uncompiled, engine.runner, rows)
        )
        num_aside += num_compiled
        # Rows grow by a token per step: around `context`, or above it where that is too short.
        work = costs.decode(batch, start + WARM_UP_STEPS + points.steps / 2, hit)
        row = {"batch": batch, "context": context, **_row(times, work, ceilings, hit)}
        row["output_tokens_per_s"] = 1e3 * batch / statistics.median(times.wall_ms)
        if profiled_steps:
            row["collectives"] = _share_of_collectives(engine, plan, profiled_steps)
        tables["decode"].append(row)
        samples[f"decode_{batch}x{context}_ms"] = times.wall_ms
    rng = np.random.default_rng(0)
    longest = engine.config.chunk_tokens
    for index, (num_tokens, prefix) in enumerate(prefill_points, len(decode_points)):
        progress("steps", index, num_points)
        if num_tokens > longest or not _fits(engine, 1, prefix + num_tokens):
            tables["left_out"].append({"point": f"prefill {num_tokens} on {prefix}"})
            continue
        _place_rows(engine, 1, prefix + 1, prefix + num_tokens)
        token_ids = rng.integers(0, model_config.vocab_size, num_tokens).astype("<i4")
        plan = StepPlan(0, (), (), (), (Chunk(0, prefix, token_ids.tobytes(), True),), (0,))
        times = _time(engine, plan, max(3, points.steps // 3))
        hit, num_compiled = _experts_hit(
            engine, model_config, num_tokens, partial(_prefill_uncompiled, engine.runner, plan.chunks)
        )
        num_aside += num_compiled
        row = {"new_tokens": num_tokens, "prefix": prefix}
        row |= _row(times, costs.prefill(num_tokens, prefix, hit), ceilings, hit)
        row["prompt_tokens_per_s"] = 1e3 * num_tokens / statistics.median(times.wall_ms)
        tables["prefill"].append(row)
        samples[f"prefill_{num_tokens}on{prefix}_ms"] = times.wall_ms
    for index, (batch, context, num_tokens) in enumerate(mixed_points, num_points - len(mixed_points)):
        progress("steps", index, num_points)
        num_steps = max(3, points.steps // 3)
        room = max(context + num_steps + WARM_UP_STEPS + 2, num_tokens)
        too_many = num_tokens > longest or batch + num_tokens > engine.config.max_step_tokens
        if too_many or not _fits(engine, batch + 1, room):
            tables["left_out"].append({"point": f"mixed {batch} x {context} + {num_tokens}"})
            continue
        _place_rows(engine, batch + 1, context, room)
        token_ids = rng.integers(0, model_config.vocab_size, num_tokens).astype("<i4")
        chunks = (Chunk(batch, 0, token_ids.tobytes(), True),)
        rows = tuple(range(batch))
        plan = StepPlan(0, (), (), rows, chunks, (*rows, batch), decode_lengths=(context + 1,) * batch)
        times = _time(engine, plan, num_steps)
        engine.collect(last := engine.launch(plan))
        row = {"batch": batch, "context": context, "new_tokens": num_tokens, "joined": last.graphs.joined}
        row |= {"graph_tokens": last.graphs.prefill_tokens, "wall_ms": statistics.median(times.wall_ms)}
        row["device_ms"] = statistics.median(times.device_ms) if times.device_ms else None
        tables["mixed"].append(row)
        samples[f"mixed_{batch}x{context}+{num_tokens}_ms"] = times.wall_ms
    progress("steps", num_points, num_points)
    if not samples:
        raise ConfigError(
            f"no point fits this engine (context {engine.max_context_tokens} tokens, pool of "
            f"{engine.num_pages} pages, chunks of {longest} tokens); choose smaller ones"
        )
    return _report(engine, points, ceilings, tables, samples, num_aside)


def _report(
    engine: Engine,
    points: Points,
    ceilings: Ceilings,
    tables: dict[str, list[dict[str, Cell]]],
    samples: dict[str, list[float]],
    num_aside: int,
) -> Report:
    status = engine.status(0)
    metrics: dict[str, Any] = {
        f"{name.removesuffix('_ms')}_p50_ms": statistics.median(values) for name, values in samples.items()
    }
    metrics |= {
        "copy_tb_per_s": ceilings.copy_tb_s,
        "matmul_tflop_per_s": ceilings.matmul_tflop_s,
        "num_graph_misses": status.num_graph_misses,
        "num_recompiles": status.num_recompiles - num_aside,
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


def _row(times: Times, work: Work, ceilings: Ceilings, hit: float) -> dict[str, Cell]:
    wall_ms, floor_ms = statistics.median(times.wall_ms), work.floor_ms(ceilings)
    return {
        **({"experts_hit": hit} if hit else {}),
        "wall_ms": wall_ms,
        "device_ms": statistics.median(times.device_ms) if times.device_ms else None,
        "floor_ms": floor_ms,
        "fraction": floor_ms / wall_ms,
        "limit": work.limit(ceilings),
    }


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


def _experts_hit(
    engine: Engine, config: ModelConfig, num_tokens: int, run: Callable[[], None]
) -> tuple[float, int]:
    """Experts of a layer that get a token in an uncompiled step, and how many kernels it compiled.

    With several ranks, which take no part in such a step, what even routing would hit.
    """
    if engine.config.tp > 1:
        experts = config.experts
        if experts is None:
            return 0.0, 0
        missed = (1 - experts.experts_per_token / experts.num_experts) ** num_tokens
        return experts.num_experts * (1 - missed), 0
    before = engine.status(0).num_recompiles
    hit = experts_hit(engine.runner, run)
    return hit, engine.status(0).num_recompiles - before


@torch.inference_mode()
def _decode_uncompiled(runner: ModelRunner, rows: tuple[int, ...]) -> None:
    row_ids = torch.tensor(rows, dtype=torch.int32, device=runner.rows.page_table.device)
    step = DecodeStep(runner.model, runner.rows)
    for _ in range(ROUTED_STEPS):
        runner.plans.decode(rows, len(rows))
        step(row_ids)


@torch.inference_mode()
def _prefill_uncompiled(runner: ModelRunner, chunks: tuple[Chunk, ...]) -> None:
    runner.plans.prefill(chunks)
    prefill_step(runner.model, runner.rows, build_prefill(chunks, runner.pages, runner.stager))


def _pages_per_row(engine: Engine, num_tokens: int) -> int:
    return -(-num_tokens // engine.config.page_size)


def _fits(engine: Engine, num_rows: int, num_tokens: int) -> bool:
    """Whether rows of so many tokens have room in the context and, all together, in the pool."""
    pages = num_rows * _pages_per_row(engine, num_tokens)
    return num_tokens <= engine.max_context_tokens and pages <= engine.num_pages


def _place_rows(engine: Engine, num_rows: int, num_present: int, num_tokens: int) -> None:
    """Give rows 0..num_rows-1 pages of their own for `num_tokens` tokens each, `num_present` of them there:
    the last one is computed, the others are what lies in the pool."""
    per_row = _pages_per_row(engine, num_tokens)
    max_chunks = engine.config.max_step_tokens
    for begin in range(0, num_rows, max_chunks):
        rows = range(begin, min(begin + max_chunks, num_rows))
        chunks = [
            Chunk(row, num_present - 1, np.array([row + 1], dtype="<i4").tobytes(), True) for row in rows
        ]
        plan = StepPlan(
            step_id=0,
            row_inits=tuple(RowInit(row, 0.0, 0, 1.0, 0.0, row) for row in rows),
            page_updates=tuple(
                PageUpdate(row, 0, tuple(range(1 + row * per_row, 1 + (row + 1) * per_row))) for row in rows
            ),
            decode_rows=(),
            chunks=tuple(chunks),
            sampled_rows=tuple(rows),
        )
        engine.collect(engine.launch(plan))


def _time(engine: Engine, plan: StepPlan, steps: int) -> Times:
    """Launch the plan again and again, one step always queued behind the running one."""
    on_gpu = engine.runner.rows.page_table.device.type == "cuda"
    for _ in range(WARM_UP_STEPS):
        engine.collect(engine.launch(plan))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)] if on_gpu else []
    wall_ms = []
    if not on_gpu:  # nothing runs behind the caller's back: a launch is the step
        for _ in range(steps):
            begin = time.perf_counter()
            engine.collect(engine.launch(plan))
            wall_ms.append(1e3 * (time.perf_counter() - begin))
        return Times(wall_ms, None)
    pending = engine.launch(plan)
    events[0].record()
    last = time.perf_counter()
    for step in range(steps):
        launched = engine.launch(plan)
        events[step + 1].record()
        engine.collect(pending)
        pending = launched
        now = time.perf_counter()
        wall_ms.append(1e3 * (now - last))
        last = now
    engine.collect(pending)
    torch.cuda.synchronize()
    return Times(wall_ms, [events[i].elapsed_time(events[i + 1]) for i in range(steps)])


def _share_of_collectives(engine: Engine, plan: StepPlan, steps: int) -> float:
    """Of rank 0's time in kernels, by torch's profiler: that of sums over ranks (with the norm where one
    kernel does both) and of gathers, waiting for the other ranks included."""
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profile:
        for _ in range(steps):
            engine.collect(engine.launch(plan))
        torch.cuda.synchronize()
    times = [
        (event.key.lower(), event.self_device_time_total)
        for event in profile.key_averages()
        if event.device_type.name == "CUDA"
    ]
    collectives = sum(us for name, us in times if "nccl" in name or "all_reduce" in name)
    return collectives / max(1.0, sum(us for _, us in times))


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
