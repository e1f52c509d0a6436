"""Computes latencies from the times of answers: TTFT, TPOT, ITL, E2E, stalls.

Promise: token counts are the server's. Torch-free, no clock. For an answer with n tokens:

- TTFT: from sending the request to the read with its first token; E2E: to the answer's last event
- TPOT: (last token - first token) / (n - 1)
- ITL: the n - 1 intervals between tokens (`time_answer` divides the gaps between reads among them)
- stall: the longest gap between reads
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from minisgl.benchmark.load.load_client import Answer
from minisgl.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
MAX_ITL_SAMPLES = 2001
"""A report keeps this many quantiles instead of all intervals."""
LATENCIES = ("ttft", "tpot", "itl", "e2e", "stall")


class Timing(NamedTuple):
    """One complete answer, in milliseconds."""

    ttft_ms: float
    e2e_ms: float
    tpot_ms: float | None  # None: one token
    stall_ms: float | None  # None: one token
    intervals_ms: np.ndarray  # float [G]: length of the intervals in each gap
    weights: np.ndarray  # float [G]: number of intervals in each gap; the sum is n - 1


def time_answer(answer: Answer) -> Timing:
    """The latencies of a complete answer.

    An event may contain several tokens, and a read several events, so the client does not see when each token
    was made. The n - 1 intervals are therefore assigned to the gaps between reads, in proportion to the
    events at each gap's end; intervals within one gap are equal. Their mean is always the TPOT.
    """
    stream = answer.stream
    counts = np.array(stream.counts, np.float64)
    times = np.array(stream.times, np.float64)[counts > 0]
    counts = counts[counts > 0]
    ended_at = stream.ended_at if stream.ended_at is not None else times[-1]
    num_intervals = answer.usage.completion_tokens - 1
    gaps_ms = 1000 * np.diff(times)
    if num_intervals == 0:
        gaps_ms = weights = np.zeros(0)
    elif len(gaps_ms) == 0:  # all tokens came at once
        gaps_ms, weights = np.zeros(1), np.full(1, float(num_intervals))
    else:
        weights = counts[1:] * (num_intervals / counts[1:].sum())
    return Timing(
        ttft_ms=1000 * float(times[0] - answer.sent_at),
        e2e_ms=1000 * float(ended_at - answer.sent_at),
        tpot_ms=1000 * float(times[-1] - times[0]) / num_intervals if num_intervals else None,
        stall_ms=float(gaps_ms.max()) if num_intervals else None,
        intervals_ms=gaps_ms / weights if num_intervals else gaps_ms,
        weights=weights,
    )


def summary(name: str, values: ArrayLike, weights: ArrayLike | None = None) -> dict[str, float]:
    """The metrics name_mean_ms, name_p50_ms ... name_max_ms; empty without values.

    Without weights, percentiles are interpolated between the nearest values. With weights, a percentile is
    the smallest value such that at least that share of the weight lies at or below it.
    """
    array = np.asarray(values, np.float64)
    if not len(array):
        return {}
    mass = np.ones(len(array)) if weights is None else np.asarray(weights, np.float64)
    if weights is None:
        marks = np.percentile(array, PERCENTILES)
    else:
        marks = weighted_quantiles(array, mass, [percent / 100 for percent in PERCENTILES])
    found = {"mean": np.average(array, weights=mass)}
    found |= {f"p{percent}": mark for percent, mark in zip(PERCENTILES, marks, strict=True)}
    found |= {"max": array.max()}
    return {f"{name}_{which}_ms": float(value) for which, value in found.items()}


def weighted_quantiles(values: np.ndarray, weights: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """For each of `shares` (0..1), the smallest value with at least that share of the weight up to it."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    # The factor tolerates rounding in the sum.
    places = np.searchsorted(reached, np.asarray(shares) * reached[-1] * (1 - 1e-12))
    return values[order][np.minimum(places, len(values) - 1)]


def interval_samples(timings: Iterable[Timing]) -> tuple[np.ndarray, np.ndarray]:
    """All intervals between tokens, and their weights."""
    kept = list(timings)
    if not kept:
        return np.zeros(0), np.zeros(0)
    return np.concatenate([one.intervals_ms for one in kept]), np.concatenate([one.weights for one in kept])


def evenly_spaced_quantiles(values: np.ndarray, weights: np.ndarray) -> list[float]:
    """At most `MAX_ITL_SAMPLES` quantiles at equal steps, which represent the distribution."""
    if not len(values):
        return []
    num = int(min(MAX_ITL_SAMPLES, max(1, round(weights.sum()))))
    return weighted_quantiles(values, weights, [(place + 0.5) / num for place in range(num)]).tolist()


def parse_slo(text: str) -> dict[str, float]:
    """Parse limits such as "ttft:500,tpot:50", in milliseconds.

    Raises:
        ConfigError: `text` is anything else.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in ("ttft", "tpot", "e2e", "stall") or not limit > 0 or name in limits:
            raise ConfigError(
                f'--slo must name limits in milliseconds, as "ttft:500,tpot:50" (ttft, tpot, e2e, stall), '
                f"got {text!r}"
            )
        limits[name] = limit
    return limits


def meets(timing: Timing, limits: Mapping[str, float]) -> bool:
    """Whether an answer stays within every limit. An answer of one token has neither TPOT nor stall."""
    values = {name: getattr(timing, f"{name}_ms") for name in limits}
    return all(values[name] is None or values[name] <= limit for name, limit in limits.items())


def timeline(answers: Sequence[Answer], start_at: float, end_at: float) -> list[dict[str, float]]:
    """Output tokens per second and the mean number of open requests, by time.

    `answers` must be complete. The run is divided into bins of about a second, at least 20 and at most 200;
    `time_s` is a bin's middle.
    """
    if end_at <= start_at:
        return []
    edges = np.linspace(0.0, end_at - start_at, 1 + int(np.clip(end_at - start_at, 20, 200)))
    tokens = np.zeros(len(edges) - 1)
    open_s = np.zeros(len(edges) - 1)
    for answer in answers:
        counts = np.array(answer.stream.counts, np.float64)
        times = np.array(answer.stream.times, np.float64) - start_at
        share = answer.usage.completion_tokens / counts.sum()
        tokens += np.histogram(times, edges, weights=counts * share)[0]
        ended_at = (answer.stream.ended_at or end_at) - start_at
        inside = np.minimum(edges[1:], ended_at) - np.maximum(edges[:-1], answer.sent_at - start_at)
        open_s += np.maximum(inside, 0.0)
    widths = np.diff(edges)
    return [
        {"time_s": float(at), "output_tokens_per_s": float(rate), "open_requests": float(num)}
        for at, rate, num in zip(edges[:-1] + widths / 2, tokens / widths, open_s / widths, strict=True)
    ]
