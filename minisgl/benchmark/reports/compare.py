"""`minisgl bench compare A.json B.json`: is B better or worse than A, and by more than chance?

Promise: every ratio has a bootstrap confidence interval, computed from the raw samples of both reports with a
fixed seed. A difference counts only if its interval excludes 1 and there are enough samples. Only a loss
above the threshold is a regression. The metric's name tells which direction is better.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from minisgl.benchmark.reports.report import Cell, Report, format_table, read_report
from minisgl.benchmark.settings import CompareSettings
from minisgl.errors import ConfigError

EXIT_OK = 0
EXIT_REGRESSION = 1

HIGHER_IS_BETTER = ("_per_s", "_rate", "goodput", "fraction")
"""Endings of metric names; checked before LOWER_IS_BETTER."""
LOWER_IS_BETTER = ("_ms", "_us", "_s", "_bytes")
STATISTICS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda values: values.mean(axis=-1),
    "max": lambda values: values.max(axis=-1),
    **{
        f"p{percent}": lambda values, percent=percent: np.percentile(values, percent, axis=-1)
        for percent in (50, 90, 95, 99)
    },
}
"""The statistics that a metric's name may contain; each reduces the last axis."""
RESAMPLED_AT_ONCE = 1 << 22
"""Resampled numbers in memory at a time."""
LEAST_BLOCKS = 4
"""The least number of blocks, which bounds their length."""


class Comparison(NamedTuple):
    """One metric of two reports."""

    name: str
    a: float
    b: float
    has_enough_samples: bool
    """Whether there are enough samples for any difference to be significant."""
    ratio: float
    low: float
    high: float
    higher_is_better: bool | None

    @property
    def loss(self) -> float:
        """How much worse B is, as a share of A; negative = B is better."""
        if self.higher_is_better is None:
            return 0.0
        return 1.0 - self.ratio if self.higher_is_better else self.ratio - 1.0

    @property
    def is_significant(self) -> bool:
        return self.low > 1.0 or self.high < 1.0  # False where they are NaN

    def verdict(self, threshold: float) -> str:
        if not self.has_enough_samples:
            return "too few samples"
        if not self.is_significant:
            return "no significant difference"
        if self.higher_is_better is None:
            return "different"
        if self.loss < 0:
            return "better"
        return "REGRESSION" if self.loss > threshold else "worse, within the threshold"


def run_compare(a: Path, b: Path, settings: CompareSettings, out: TextIO) -> int:
    """Print the comparison; returns 1 when a metric got significantly worse by more than the threshold.

    Raises:
        ConfigError: the reports can't be read or compared, or a setting is impossible.
    """
    threshold = parse_share(settings.threshold)
    if not 0.5 <= settings.confidence < 1:
        raise ConfigError(f"--confidence must be at least 0.5 and below 1, got {settings.confidence}")
    if settings.resamples < 100:
        raise ConfigError(f"--resamples must be at least 100, got {settings.resamples}")
    first, second = read_report(a), read_report(b)
    wanted = settings.metrics.split(",") if settings.metrics is not None else None
    found = compare(
        first,
        second,
        wanted=wanted,
        confidence=settings.confidence,
        resamples=settings.resamples,
        seed=settings.seed,
    )
    for line in environment_differences(first, second):
        print(line, file=out)
    rows: list[dict[str, Cell]] = [
        {
            "metric": one.name,
            "a": one.a,
            "b": one.b,
            "b/a": one.ratio,
            "low": one.low,
            "high": one.high,
            "better": {True: "higher", False: "lower", None: "-"}[one.higher_is_better],
            "verdict": one.verdict(threshold),
        }
        for one in found
    ]
    print(format_table(rows), file=out)
    regressions = [row["metric"] for row in rows if row["verdict"] == "REGRESSION"]
    if not regressions:
        print(f"no regression over {threshold:.1%}", file=out)
        return EXIT_OK
    print(f"regressions over {threshold:.1%}: {', '.join(map(str, regressions))}", file=out)
    return EXIT_REGRESSION


def compare(
    a: Report,
    b: Report,
    *,
    wanted: Sequence[str] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> list[Comparison]:
    """Compare every metric with raw samples in both reports, or only the `wanted` ones.

    Raises:
        ConfigError: the reports are of different kinds, or nothing can be compared.
    """
    if a.kind != b.kind:
        raise ConfigError(f"a report of bench {a.kind} can't be compared with one of bench {b.kind}")
    sources = {name: source_of(name, a) for name in a.metrics if name in b.metrics}
    usable = {
        name: source
        for name, source in sources.items()
        if source is not None and a.samples[source[0]] and b.samples.get(source[0])
    }
    for name in wanted or ():
        if name not in usable:
            raise ConfigError(
                f"both reports need raw samples of {name!r}; there are: {', '.join(usable) or 'none'}"
            )
    if not usable:
        raise ConfigError("the two reports have no metric with raw samples in common")
    compared = []
    for name, (samples, statistic) in usable.items():
        if wanted is not None and name not in wanted:
            continue
        first, second = np.asarray(a.samples[samples]), np.asarray(b.samples[samples])
        # Every metric uses the same seed, so its interval does not depend on the other metrics.
        low, high = ratio_interval(first, second, STATISTICS[statistic], confidence, resamples, seed)
        value_a, value_b = (float(STATISTICS[statistic](values)) for values in (first, second))
        ratio = value_b / value_a if value_a else float("nan")
        enough = has_enough_samples(first, second, confidence)
        compared.append(Comparison(name, value_a, value_b, enough, ratio, low, high, is_higher_better(name)))
    return compared


def has_enough_samples(a: np.ndarray, b: np.ndarray, confidence: float) -> bool:
    """Whether there are enough samples, or blocks of them, for a significant difference.

    If n and m samples have the same distribution, one group lies entirely above the other with probability
    2 / (n + m choose n). With fewer than 4 and 4 samples, no difference is therefore significant at 95%.
    """
    num_a, num_b = (len(values) // block_length(values) for values in (a, b))
    return 2 / math.comb(num_a + num_b, num_a) <= 1 - confidence


def block_length(values: np.ndarray) -> int:
    """The length of blocks to resample: 1 for independent samples.

    Otherwise twice the integrated autocorrelation time. Its sum ends at the first pair of lags whose sum is
    not positive (Geyer, Practical Markov Chain Monte Carlo, 1992, section 3.3).
    """
    centred = values - values.mean()
    spread = float(centred @ centred)
    longest = len(values) // LEAST_BLOCKS
    if longest < 2 or spread == 0.0:
        return 1
    time = -1.0
    for lag in range(0, len(values) - 1, 2):
        pair = centred[: len(values) - lag] @ centred[lag:] + centred[: -lag - 1] @ centred[lag + 1 :]
        if pair <= 0 or time > longest:
            break
        time += 2 * float(pair) / spread
    # The estimated time of white noise is 1, within some tens of percent.
    return 1 if time < 1.5 else min(longest, math.ceil(2 * time))


def ratio_interval(
    a: np.ndarray,
    b: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    confidence: float,
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    """Percentile bootstrap interval of statistic(b) / statistic(a) (Efron and Tibshirani, An Introduction to
    the Bootstrap, chapter 13); (nan, nan) if the statistic of a resample of `a` is 0.

    Consecutive samples may be correlated, so blocks of them are drawn (Politis and Romano 1992, A circular
    block-resampling procedure for stationary data).

    Args:
        a, b: float [n] and [m], each in the order of measuring.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for values in (a, b):
        length = block_length(values)
        num_blocks = -(-len(values) // length)
        at_once = max(1, RESAMPLED_AT_ONCE // len(values))
        parts = []
        for begin in range(0, resamples, at_once):
            shape = (min(at_once, resamples - begin), num_blocks, 1)
            places = rng.integers(len(values), size=shape) + np.arange(length)
            places = places.reshape(shape[0], -1)[:, : len(values)] % len(values)
            parts.append(statistic(values[places]))
        drawn.append(np.concatenate(parts))
    if not drawn[0].all():
        return float("nan"), float("nan")
    low, high = np.quantile(drawn[1] / drawn[0], [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def source_of(metric: str, report: Report) -> tuple[str, str] | None:
    """The name of a metric's samples and its statistic; None if the report has no such samples.

    "ttft_p99_ms" is the p99 of "ttft_ms". A metric with the name of its samples is their mean.
    """
    if metric in report.samples:
        return metric, "mean"
    parts = metric.split("_")
    for place, part in enumerate(parts):
        samples = "_".join(parts[:place] + parts[place + 1 :])
        if part in STATISTICS and samples in report.samples:
            return samples, part
    return None


def is_higher_better(metric: str) -> bool | None:
    """Whether a higher value is better, by the ending of the metric's name; None = unknown."""
    if metric.endswith(HIGHER_IS_BETTER):
        return True
    return False if metric.endswith(LOWER_IS_BETTER) else None


def parse_share(text: str) -> float:
    """Parse a share such as "5%" or "0.05".

    Raises:
        ConfigError: `text` is anything else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    if found is None:
        raise ConfigError(f'--threshold must be a share as "5%" or "0.05", got {text!r}')
    return float(found.group(1)) / (100 if found.group(2) else 1)


def environment_differences(a: Report, b: Report) -> list[str]:
    """One line for each difference of hardware, software or workload, which may explain other differences."""
    facts = ("gpu", "driver", "cpu", "num_cpus", "torch", "triton", "python", "git_commit")
    work = ("num_requests", "num_prompt_tokens", "num_output_tokens", "num_errors")
    pairs = [(name, getattr(a.environment, name), getattr(b.environment, name)) for name in facts]
    pairs += [(name, a.metrics.get(name), b.metrics.get(name)) for name in work]
    return [f"{name} differs: {first} and {second}" for name, first, second in pairs if first != second]
