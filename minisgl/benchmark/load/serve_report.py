"""The metrics of `minisgl bench serve`, as text for the terminal and as a report.

Promise: failed requests are counted by kind and enter no latency. Torch-free.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.load.latency import (
    LATENCIES,
    PERCENTILES,
    Timing,
    evenly_spaced_quantiles,
    interval_samples,
    meets,
    summary,
    time_answer,
    timeline,
)
from minisgl.benchmark.load.load_client import ERROR_KINDS
from minisgl.benchmark.load.load_run import LoadRun, SentRequest
from minisgl.benchmark.load.serve_plan import Plan, Point
from minisgl.benchmark.reports.report import (
    CdfChart,
    Cell,
    Chart,
    LinesChart,
    Report,
    format_metrics,
    format_table,
    make_report,
    own_command,
)
from minisgl.benchmark.settings import ServeBenchSettings

LATE_SEND_MS = 50.0
"""A delay of sending that warns the user, if 1 of 100 requests exceeds it."""
ROUNDED_TO = 4
"""Decimal places of raw samples, which are in milliseconds and seconds."""


class PointReport(NamedTuple):
    """The metrics of one point."""

    point: Point
    metrics: dict[str, float | int | None]
    samples: dict[str, list[float]]
    errors: list[dict[str, Cell]]
    timeline: list[dict[str, float]]
    warnings: list[str]

    @property
    def row(self) -> dict[str, Cell]:
        """The point's row in the table of all points."""
        return {self.point.knob: self.point.cell, **self.metrics}

    def text(self) -> str:
        """The point as text for the terminal."""
        columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
        rows: list[dict[str, Cell]] = [
            {"ms": name.upper(), **{column: self.metrics[f"{name}_{column}_ms"] for column in columns}}
            for name in LATENCIES
            if f"{name}_mean_ms" in self.metrics
        ]
        others = {
            name: value
            for name, value in self.metrics.items()
            if not any(name.startswith(f"{latency}_") for latency in LATENCIES)
        }
        parts = [f"== {self.point.name}"]
        parts += [format_table(rows)] if rows else []
        parts += [format_metrics(others)]
        parts += [format_table(self.errors)] if self.errors else []
        parts += [f"WARNING: {warning}" for warning in self.warnings]
        return "\n\n".join(parts) + "\n"


def report_point(point: Point, run: LoadRun, slo: Mapping[str, float]) -> PointReport:
    """Metrics, raw samples and warnings of one run."""
    complete = [one for one in run.sent if one.answer.error is None]
    timings = [time_answer(one.answer) for one in complete]
    start_at = min((one.answer.sent_at for one in run.sent), default=0.0)
    end_at = max((one.answer.stream.ended_at or start_at for one in complete), default=start_at)
    duration_s = end_at - start_at
    usages = [one.answer.usage for one in complete]
    cached = [usage.num_cached_tokens for usage in usages]
    told = [count for count in cached if count is not None]
    num_prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    num_output_tokens = sum(usage.completion_tokens for usage in usages)
    num_events = sum(sum(one.answer.stream.counts) for one in complete)
    lags_ms = [1000 * (one.answer.sent_at - one.due_at) for one in run.sent if one.due_at is not None]
    num_good = sum(meets(timing, slo) for timing in timings)

    def per_s(count: float) -> float | None:
        return count / duration_s if duration_s > 0 else None

    samples = _samples(complete, timings, start_at)
    metrics: dict[str, float | int | None] = {
        "num_requests": len(run.sent),
        "num_complete": len(complete),
        "num_errors": len(run.sent) - len(complete),
        "num_skipped_turns": run.num_skipped,
        "duration_s": duration_s,
        "requests_per_s": per_s(len(complete)),
        "output_tokens_per_s": per_s(num_output_tokens),
        "total_tokens_per_s": per_s(num_prompt_tokens + num_output_tokens),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "num_cached_tokens": sum(told) if told else None,
        "prefix_hit_rate": sum(told) / num_prompt_tokens if told else None,
        "tokens_per_event": num_output_tokens / num_events if num_events else None,
        "peak_open_requests": run.max_open,
    }
    if slo:
        metrics |= {
            "goodput_requests_per_s": per_s(num_good),
            "slo_attainment": num_good / len(run.sent) if run.sent else None,
        }
    for name in ("ttft", "tpot", "e2e", "stall"):
        metrics |= summary(name, samples[f"{name}_ms"])
    intervals, weights = interval_samples(timings)
    metrics |= summary("itl", intervals, weights)
    samples["itl_ms"] = evenly_spaced_quantiles(intervals, weights)
    metrics |= {
        "send_lag_p99_ms": float(np.percentile(lags_ms, 99)) if lags_ms else None,
        "send_lag_max_ms": max(lags_ms, default=None),
        "client_cpu_share": run.watch.cpu_share,
        "client_peak_cpu_share": run.watch.peak_cpu_share,
        "client_loop_lag_p99_ms": run.watch.loop_lag_p99_ms,
    }
    return PointReport(
        point=point,
        metrics=metrics,
        samples={name: [round(value, ROUNDED_TO) for value in values] for name, values in samples.items()},
        errors=_errors(run.sent),
        timeline=timeline([one.answer for one in complete], start_at, end_at) if complete else [],
        warnings=_warnings(run, complete, metrics["send_lag_p99_ms"]),
    )


def make_serve_report(
    settings: ServeBenchSettings, plan: Plan, model: str, points: Sequence[PointReport]
) -> Report:
    """The report of the points so far. If the plan has several points, the names of metrics and samples begin
    with the point's name."""
    is_single = len(plan.points) == 1

    def named(point: PointReport, name: str) -> str:
        return name if is_single else f"{point.point.name}/{name}"

    knob = points[0].point.knob
    tables: dict[str, list[dict[str, Cell]]] = {
        "points": [point.row for point in points],
        "errors": [{"point": point.point.name, **error} for point in points for error in point.errors],
        "timeline": [{knob: point.point.cell, **row} for point in points for row in point.timeline],
        "warnings": [
            {"point": point.point.name, "warning": warning} for point in points for warning in point.warnings
        ],
    }
    finite = [point.row for point in points if math.isfinite(point.point.value)]
    table = "points" if len(finite) == len(points) else "finite_points"
    tables[table] = finite
    return make_report(
        "serve",
        arguments={
            **asdict(settings),
            "api_key": None,
            "served_model_name": model,
            "prompt_seed": plan.prompt_seed,
        },
        metrics={named(point, name): value for point in points for name, value in point.metrics.items()},
        tables=tables,
        samples={named(point, name): values for point in points for name, values in point.samples.items()},
        charts=_charts(knob, table, points, named),
        command=_without_key(own_command(), settings.api_key),
    )


def _charts(
    knob: str, table: str, points: Sequence[PointReport], named: Callable[[PointReport, str], str]
) -> list[Chart]:
    charts: list[Chart] = []
    if sum(math.isfinite(point.point.value) for point in points) > 1:
        label = {
            "request_rate": "requests per second sent",
            "time_scale": "time scale (smaller: more requests per second)",
            "concurrency": "requests at a time",
        }[knob]
        lines = [
            ("Throughput", ("output_tokens_per_s",), "output tokens/s", False),
            ("Time to first token", ("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"), "milliseconds", True),
            ("Time per output token", ("tpot_p50_ms", "tpot_p90_ms", "tpot_p99_ms"), "milliseconds", False),
        ]
        if "goodput_requests_per_s" in points[0].metrics:
            names = ("requests_per_s", "goodput_requests_per_s")
            lines.insert(1, ("Requests answered, and those within the SLO", names, "requests/s", False))
        charts += [
            LinesChart(title=title, table=table, x=knob, y=y, x_label=label, y_label=y_label, log_y=log_y)
            for title, y, y_label, log_y in lines
            if all(set(y) <= point.metrics.keys() for point in points)
        ]
    for name, title in (
        ("ttft", "Time to first token"),
        ("itl", "Time between tokens"),
        ("e2e", "Time to the whole answer"),
    ):
        kept = tuple(named(point, f"{name}_ms") for point in points if point.samples[f"{name}_ms"])
        if kept:
            charts.append(
                CdfChart(title=f"{title}: distribution", samples=kept, x_label="milliseconds", log_x=True)
            )
    for column, title, label in (
        ("output_tokens_per_s", "Output tokens per second", "tokens/s"),
        ("open_requests", "Requests in the server", "requests"),
    ):
        if any(point.timeline for point in points):
            charts.append(
                LinesChart(
                    title=title,
                    table="timeline",
                    x="time_s",
                    y=(column,),
                    by=knob if len(points) > 1 else None,
                    x_label="seconds since the first request",
                    y_label=label,
                )
            )
    return charts


def _samples(
    complete: Sequence[SentRequest], timings: Sequence[Timing], start_at: float
) -> dict[str, list[float]]:
    """One value per complete request, in the same order; tpot and stall leave out answers of one token."""
    usages = [one.answer.usage for one in complete]
    return {
        "ttft_ms": [timing.ttft_ms for timing in timings],
        "tpot_ms": [timing.tpot_ms for timing in timings if timing.tpot_ms is not None],
        "e2e_ms": [timing.e2e_ms for timing in timings],
        "stall_ms": [timing.stall_ms for timing in timings if timing.stall_ms is not None],
        "sent_s": [one.answer.sent_at - start_at for one in complete],
        "prompt_tokens": [usage.prompt_tokens for usage in usages],
        "cached_tokens": [usage.num_cached_tokens or 0 for usage in usages],
        "output_tokens": [usage.completion_tokens for usage in usages],
    }


def _errors(sent: Sequence[SentRequest]) -> list[dict[str, Cell]]:
    kinds = Counter(one.answer.error for one in sent if one.answer.error is not None)
    examples = {one.answer.error: one.answer.error_message for one in reversed(sent)}
    return [
        {
            "error": kind,
            "count": count,
            "meaning": ERROR_KINDS["http" if kind.startswith("http_") else kind],
            "first": examples[kind][:200],
        }
        for kind, count in kinds.most_common()
    ]


def _warnings(run: LoadRun, complete: Sequence[SentRequest], send_lag_ms: float | None) -> list[str]:
    found = []
    if run.watch.warning is not None:
        found.append(run.watch.warning)
    if send_lag_ms is not None and send_lag_ms >= LATE_SEND_MS:
        found.append(
            f"requests were sent late (p99 {send_lag_ms:.0f} ms behind their time): the load was lighter "
            "than asked for; TTFT counts from when they were sent"
        )
    num_assumed = sum(one.answer.has_assumed_usage for one in complete)
    if num_assumed:
        found.append(
            f"the server sent no usage for {num_assumed} answers: they count as the tokens asked for"
        )
    other_length = sum(one.answer.usage.completion_tokens != one.turn.num_output_tokens for one in complete)
    if other_length:
        found.append(f"{other_length} of {len(complete)} answers are not as long as asked for")
    return found


def _without_key(command: str, key: str | None) -> str:
    return command if not key else command.replace(key, "***")
