"""`minisgl bench simulate`: compares scheduler settings on a workload, in virtual time, without a GPU.

Promise: the scheduler and its page cache are the real ones; only the execution of a step is replaced by a
cost model. The command prints the cost model's error and, with --against, the difference from a real run.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from minisgl.benchmark.load.latency import evenly_spaced_quantiles, summary
from minisgl.benchmark.load.prompts import Draw, as_token_ids, codes_of, trace_draws
from minisgl.benchmark.load.traces import TraceRequest, read_trace, scale_trace
from minisgl.benchmark.reports.plots import check_output, write_outputs
from minisgl.benchmark.reports.report import (
    CdfChart,
    Cell,
    Chart,
    Report,
    format_table,
    make_report,
    read_report,
)
from minisgl.benchmark.settings import OfflineBenchSettings, OutputSettings, SimulateSettings
from minisgl.benchmark.steps.step_fit import Fit, fit_step_cost
from minisgl.benchmark.steps.workload import random_workload
from minisgl.config import auto_mixed_tokens
from minisgl.errors import ConfigError
from minisgl.kvcache.manager import KVCacheManager
from minisgl.progress import Progress, ShownProgress, lines_on
from minisgl.request import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulator import Arrival, Served, StepCost, simulate

VOCAB_SIZE = 1 << 16
OFFLINE_STREAM = 3
"""First number of the keys from which the prompts of an offline report are drawn."""


class Knobs(NamedTuple):
    """One combination of settings."""

    max_running_requests: int = 256
    max_step_tokens: int = 8192
    chunk_tokens: int = 8192
    mixed_step_tokens: int | None = None  # None = the engine's default
    output_reserve_tokens: int = 64
    num_pages: int = 32768
    page_size: int = 16
    prefix_cache: bool = True
    join_decodes: bool = True
    overlap: bool = True
    streamed: bool = False

    @property
    def mixed_tokens(self) -> int:
        """`mixed_step_tokens`, resolved."""
        wanted = self.mixed_step_tokens or auto_mixed_tokens(self.join_decodes)
        return min(wanted, self.max_step_tokens)


BOOLEAN = ("prefix_cache", "join_decodes", "overlap", "streamed")
ON, OFF = ("on", "1", "true", "yes"), ("off", "0", "false", "no")
"""The values that the engine's environment variables accept."""
LEAST = {"output_reserve_tokens": 0, "num_pages": 2}
"""Smallest values that differ from 1."""


class Result(NamedTuple):
    """The result of one combination."""

    knobs: Knobs
    metrics: dict[str, float | int | None]
    samples: dict[str, list[float]]


class InstantExecutor:
    """Executes steps without a model: tracks the rows' lengths and returns arbitrary tokens."""

    def __init__(self, max_rows: int) -> None:
        self._context_lens = [0] * max_rows
        self._next_token = 0

    @property
    def context_lens(self) -> Sequence[int]:
        """Tokens in the pool, by row."""
        return self._context_lens

    def execute(self, plan: StepPlan) -> list[int]:
        """Return different tokens, so that no two outputs share a prefix."""
        for row in plan.decode_rows:
            self._context_lens[row] += 1
        for chunk in plan.chunks:
            self._context_lens[chunk.row] = chunk.num_computed_tokens + chunk.num_new_tokens
        first = self._next_token
        self._next_token += len(plan.sampled_rows)
        return [token % VOCAB_SIZE for token in range(first, self._next_token)]


def run_simulation(settings: SimulateSettings, output: OutputSettings, out: TextIO) -> int:
    """Simulate, print, write and draw; returns the exit code.

    Raises:
        ConfigError: a file or setting can't be used.
    """
    check_output(output)
    real = read_report(Path(settings.against).expanduser()) if settings.against is not None else None
    fit = None
    if settings.step_report is not None:
        fit = fit_step_cost(read_report(Path(settings.step_report).expanduser()))
    measured = real.metrics if real is not None else {}
    if real is not None and real.kind == "serve":
        settings, measured = as_served(settings, real)
    combinations = combine(settings, _base(settings, real))
    arrivals = make_arrivals(settings, real)
    with ShownProgress(lines_on()) as progress:
        results = [
            run_once(
                arrivals, knobs, fit.cost if fit is not None else StepCost(), progress, f"setting {number}"
            )
            for number, knobs in enumerate(combinations, 1)
        ]
    report = _report(settings, results, fit, measured)
    if fit is not None:
        print(f"cost of a step, fitted:\n{format_table(report.tables['fit'])}", file=out)
        print(f"mean error {fit.mean_error:.1%}\n", file=out)
    else:
        print("costs are made up (no --step-report): compare the settings with each other only\n", file=out)
    print(format_table(report.tables["settings"]), file=out)
    if real is not None:
        print(f"\nfirst setting against the real run:\n{format_table(report.tables['against'])}", file=out)
    write_outputs(report, output, out)
    return 0


def combine(settings: SimulateSettings, base: Knobs) -> list[Knobs]:
    """All combinations of the settings' lists; settings without a list come from `base`.

    Raises:
        ConfigError: a list can't be read.
    """
    lists = {name: _values(name, getattr(settings, name)) for name in Knobs._fields}
    given = {name: values for name, values in lists.items() if values is not None}
    found = [
        base._replace(**dict(zip(given, values, strict=True)))
        for values in itertools.product(*given.values())
    ]
    return [
        knobs._replace(
            # A chunk is never longer than a step.
            chunk_tokens=min(knobs.chunk_tokens, knobs.max_step_tokens),
            mixed_step_tokens=knobs.mixed_tokens,
        )
        for knobs in found
    ]


def as_served(
    settings: SimulateSettings, real: Report
) -> tuple[SimulateSettings, Mapping[str, float | int | str | None]]:
    """The settings with the trace that a serve report replayed, and the report's metrics at their time scale.

    Raises:
        ConfigError: the report replayed no trace, or not at this time scale.
    """
    points = real.tables.get("points", [])
    scales = [row.get("time_scale") for row in points]
    if not scales or None in scales:
        raise ConfigError(
            "only a trace that was replayed can be simulated; this report's requests came otherwise"
        )
    if settings.time_scale not in scales:
        raise ConfigError(
            f"--time-scale must be one that was measured ({', '.join(map(str, scales))}), "
            f"got {settings.time_scale:g}"
        )
    served = replace(
        settings,
        trace=settings.trace or str(real.arguments.get("dataset")),
        num_requests=real.arguments.get("num_requests"),
        length_scale=str(real.arguments.get("length_scale", "1")),
    )
    return served, points[scales.index(settings.time_scale)]


def make_arrivals(settings: SimulateSettings, real: Report | None) -> list[Arrival]:
    """The requests of the trace, of the real run, or of the offline benchmark.

    Raises:
        ConfigError: the trace can't be read, or the real run needs one.
    """
    if settings.trace is not None:
        try:
            scale = Fraction(settings.length_scale)
        except (ValueError, ZeroDivisionError):
            raise ConfigError(
                f"--length-scale must be a fraction as 1/8, got {settings.length_scale!r}"
            ) from None
        trace = read_trace(Path(settings.trace).expanduser(), settings.trace_format, settings.num_requests)
        trace = scale_trace(trace, length_scale=scale, time_scale=settings.time_scale)
        return [_arrival(request, index) for index, request in enumerate(trace)]
    if real is None:
        items = random_workload(OfflineBenchSettings())
        lengths = [(len(item.prompt_ids), item.max_tokens) for item in items]
    else:
        rows = real.tables.get("requests", [])
        if real.kind != "offline" or not rows:
            raise ConfigError(
                f"--against needs a report of bench offline or serve, got one of bench {real.kind}"
            )
        lengths = [(_whole(row, "num_prompt_tokens"), _whole(row, "num_output_tokens")) for row in rows]
    return [
        Arrival(0.0, _ids([Draw((OFFLINE_STREAM, index), num_prompt)]), _params(num_output))
        for index, (num_prompt, num_output) in enumerate(lengths)
    ]


def run_once(
    arrivals: Sequence[Arrival], knobs: Knobs, cost: StepCost, progress: Progress, name: str
) -> Result:
    """Simulate one combination.

    Raises:
        ConfigError: a request does not fit the pool.
    """
    cache = KVCacheManager(
        num_pages=knobs.num_pages, page_size=knobs.page_size, prefix_cache=knobs.prefix_cache
    )
    max_context_tokens = cache.num_usable_pages * knobs.page_size
    longest = max(len(arrival.prompt) + (arrival.params.max_tokens or 0) for arrival in arrivals)
    if longest > max_context_tokens:
        raise ConfigError(
            f"the longest request has {longest} tokens and the pool {max_context_tokens}; see --num-pages"
        )
    config = SchedulerConfig(
        max_rows=knobs.max_running_requests,
        max_step_tokens=max(knobs.max_step_tokens, knobs.max_running_requests),
        chunk_tokens=knobs.chunk_tokens,
        mixed_step_tokens=knobs.mixed_tokens,
        max_context_tokens=max_context_tokens,
        vocab_size=VOCAB_SIZE,
        output_reserve_tokens=knobs.output_reserve_tokens,
    )
    scheduler = Scheduler(config, cache)
    served = simulate(
        scheduler,
        InstantExecutor(knobs.max_running_requests),
        arrivals,
        cost=cost,
        overlap=knobs.overlap,
        streamed=knobs.streamed,
        join_decodes=knobs.join_decodes,
        on_served=lambda num: progress(name, num, len(arrivals), "requests"),
    )
    stats = scheduler.stats
    samples = _latencies(served)
    elapsed_s = (max(one.finished_ms for one in served) - min(one.arrived_ms for one in served)) / 1e3
    metrics: dict[str, float | int | None] = {
        "elapsed_s": elapsed_s,
        "requests_per_s": len(served) / elapsed_s,
        "output_tokens_per_s": stats.num_output_tokens / elapsed_s,
        "total_tokens_per_s": (stats.num_prompt_tokens + stats.num_output_tokens) / elapsed_s,
        "num_steps": stats.num_steps,
        "num_preemptions": stats.num_preemptions,
        "prefix_hit_rate": stats.num_cached_tokens / stats.num_prompt_tokens,
    }
    for latency, values in samples.items():
        metrics |= summary(latency.removesuffix("_ms"), values)
    samples["itl_ms"] = evenly_spaced_quantiles(np.array(samples["itl_ms"]), np.ones(len(samples["itl_ms"])))
    return Result(knobs, metrics, samples)


def _latencies(served: Sequence[Served]) -> dict[str, list[float]]:
    """TTFT, TPOT and E2E by request, ITL by token."""
    return {
        "ttft_ms": [one.token_ms[0] - one.arrived_ms for one in served],
        "tpot_ms": [
            (one.token_ms[-1] - one.token_ms[0]) / (len(one.token_ms) - 1)
            for one in served
            if len(one.token_ms) > 1
        ],
        "itl_ms": [float(gap) for one in served for gap in np.diff(one.token_ms)],
        "e2e_ms": [one.finished_ms - one.arrived_ms for one in served],
    }


SHOWN = (
    "elapsed_s",
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "e2e_p50_ms",
    "num_steps",
    "num_preemptions",
    "prefix_hit_rate",
)
"""Columns of the table of settings."""


def _report(
    settings: SimulateSettings,
    results: Sequence[Result],
    fit: Fit | None,
    measured: Mapping[str, Any],
) -> Report:
    varied = [name for name in Knobs._fields if len({getattr(one.knobs, name) for one in results}) > 1]
    labels = [
        ", ".join(f"{name} {_shown(getattr(one.knobs, name))}" for name in varied) or "simulated"
        for one in results
    ]
    tables: dict[str, list[dict[str, Cell]]] = {
        "settings": [
            {
                **{name: getattr(one.knobs, name) for name in varied},
                **{name: one.metrics[name] for name in SHOWN if name in one.metrics},
            }
            for one in results
        ]
    }
    first = results[0]
    metrics = dict(first.metrics)
    if fit is not None:
        tables["fit"] = fit.points
        metrics["fit_mean_error"] = fit.mean_error
    if measured:
        tables["against"] = _against(first.metrics, measured)
    samples: dict[str, list[float]] = dict(first.samples)
    charts: list[Chart] = []
    for latency, title in (("ttft_ms", "Time to first token"), ("itl_ms", "Time between tokens")):
        names = [f"{label}: {latency}" if len(results) > 1 else latency for label in labels]
        samples |= {name: one.samples[latency] for name, one in zip(names, results, strict=True)}
        charts.append(CdfChart(title=f"{title}, simulated", samples=tuple(names), x_label="milliseconds"))
    return make_report(
        "simulate",
        arguments={
            "settings": asdict(settings),
            "simulated": [one.knobs._asdict() for one in results],
            "cost": (fit.cost if fit is not None else StepCost())._asdict(),
        },
        metrics=metrics,
        tables=tables,
        samples=samples,
        charts=charts,
    )


def _against(
    simulated: Mapping[str, float | int | None], measured: Mapping[str, Any]
) -> list[dict[str, Cell]]:
    """Compares the metrics that both have."""
    rows: list[dict[str, Cell]] = []
    for name, value in simulated.items():
        real = measured.get(name)
        if value is not None and real is not None:
            rows.append(
                {"metric": name, "simulated": value, "real": real, "ratio": value / real if real else None}
            )
    return rows


def _base(settings: SimulateSettings, real: Report | None) -> Knobs:
    """The settings of a real offline run, else the defaults."""
    base = Knobs(streamed=settings.trace is not None)
    engine = real.arguments.get("engine") if real is not None else None
    if real is None or not isinstance(engine, dict):
        return base
    known = {name: engine[name] for name in Knobs._fields if engine.get(name) is not None}
    known.setdefault("join_decodes", False)  # reports without it are older than the setting
    num_pages = real.metrics.get("num_pages")
    if num_pages is not None:
        known["num_pages"] = int(num_pages) + 1  # plus the scratch page, which requests can't use
    workload = real.arguments.get("workload")
    if settings.trace is None and isinstance(workload, dict):
        known["streamed"] = workload.get("streamed", True)  # reports without it are older than the setting
    return base._replace(**known)


def _values(name: str, text: str | None) -> list[Any] | None:
    if text is None:
        return None
    flag = "--" + name.replace("_", "-")
    parts = [part.strip() for part in text.split(",")]
    if name in BOOLEAN:
        if not set(parts) <= {*ON, *OFF}:
            raise ConfigError(f'{flag} must be on, off, or "on,off", got {text!r}')
        return [part in ON for part in parts]
    least = LEAST.get(name, 1)
    try:
        values = [int(part) for part in parts]
    except ValueError:
        raise ConfigError(f"{flag} must be whole numbers separated by commas, got {text!r}") from None
    if min(values) < least:
        raise ConfigError(f"{flag} must be at least {least}, got {text!r}")
    return values


def _arrival(request: TraceRequest, index: int) -> Arrival:
    prompt = _ids(trace_draws(request, index))
    return Arrival(1e3 * request.arrival_s, prompt, _params(request.num_output_tokens))


def _ids(draws: Sequence[Draw]) -> np.ndarray:
    return as_token_ids(codes_of(draws, (0,)), VOCAB_SIZE).astype(np.int32)


def _params(num_output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)


def _whole(row: Mapping[str, Cell], name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"the report's table of requests needs a positive {name}, got {value!r}")
    return value


def _shown(value: int | bool) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
