"""Fits a cost model of steps to a report of `minisgl bench step`.

Promise: no cost is negative. The fit minimises relative errors, so a step of 5 ms counts as much as one of
500 ms. A decode step's time is linear in its rows and their tokens. A prefill step's time is linear too, but
never below a minimum.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np

from minisgl.benchmark.reports.report import Cell, Report
from minisgl.errors import ConfigError
from minisgl.scheduler.simulator import StepCost, attended_pairs

LEAST_POINTS = 3


class Fit(NamedTuple):
    """A cost model, and its prediction for each measured point."""

    cost: StepCost
    points: list[dict[str, Cell]]  # point, measured_ms, modelled_ms, ratio

    @property
    def mean_error(self) -> float:
        """Mean of |modelled / measured - 1|."""
        ratios = [float(point["ratio"] or 0.0) for point in self.points]
        return float(np.mean(np.abs(np.array(ratios) - 1.0)))


class _MeasuredTable(NamedTuple):
    """One table of a step report: M points, N features."""

    names: list[str]
    features: np.ndarray  # float [M, N]
    wall_ms: np.ndarray  # float [M]

    def described(self, modelled_ms: np.ndarray) -> list[dict[str, Cell]]:
        return [
            {
                "point": name,
                "measured_ms": float(real),
                "modelled_ms": float(made),
                "ratio": float(made / real),
            }
            for name, real, made in zip(self.names, self.wall_ms, modelled_ms, strict=True)
        ]


def fit_step_cost(report: Report) -> Fit:
    """Fit both halves of a `StepCost` to a step report's tables.

    Raises:
        ConfigError: the report has another kind, or one of its tables has too few points.
    """
    if report.kind != "step":
        raise ConfigError(
            f"--step-report needs a report of minisgl bench step, got one of bench {report.kind}"
        )
    decode = _read("decode", report, lambda row: (1.0, row["batch"], row["batch"] * row["context"]))
    prefill = _read(
        "prefill",
        report,
        lambda row: (1.0, row["new_tokens"], attended_pairs(int(row["new_tokens"]), int(row["prefix"]))),
    )
    decode_costs = _fit_linear(decode.features, decode.wall_ms)
    prefill_costs, least_ms = _fit_with_least(prefill.features, prefill.wall_ms)
    return Fit(
        StepCost(*[float(value) for value in (*decode_costs, *prefill_costs, least_ms)]),
        [
            *decode.described(decode.features @ decode_costs),
            *prefill.described(np.maximum(prefill.features @ prefill_costs, least_ms)),
        ],
    )


def non_negative_least_squares(features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The x >= 0, float [N], that minimises |features @ x - targets|.

    The result is exact. At the optimum, the columns with x > 0 solve their own unconstrained problem, so the
    function tries all subsets of the few columns and takes the best feasible solution.

    Args:
        features: float [M, N].
        targets: float [M].
    """
    num_columns = features.shape[1]
    best, best_residual = np.zeros(num_columns), float(np.linalg.norm(targets))
    subsets = chain.from_iterable(combinations(range(num_columns), size + 1) for size in range(num_columns))
    for subset in subsets:
        columns = list(subset)
        solution = np.linalg.lstsq(features[:, columns], targets, rcond=None)[0]
        residual = float(np.linalg.norm(features[:, columns] @ solution - targets))
        if (solution >= 0).all() and residual < best_residual:
            best, best_residual = np.zeros(num_columns), residual
            best[columns] = solution
    return best


def _fit_linear(features: np.ndarray, wall_ms: np.ndarray) -> np.ndarray:
    """Costs, float [N], that minimise the relative errors."""
    # Every point has the weight 1 / its own time. Scaled columns are better conditioned.
    scale = np.abs(features).max(axis=0)
    return non_negative_least_squares(features / scale / wall_ms[:, None], np.ones(len(wall_ms))) / scale


def _fit_with_least(features: np.ndarray, wall_ms: np.ndarray) -> tuple[np.ndarray, float]:
    """Costs and the minimum time: the best fit over all numbers of fastest points that may be flat."""
    fastest_first = np.argsort(wall_ms, kind="stable")
    candidates = []
    for num_flat in range(len(wall_ms) - LEAST_POINTS + 1):
        flat, others = fastest_first[:num_flat], fastest_first[num_flat:]
        weights = 1 / wall_ms[flat]
        least_ms = float(weights.sum() / (weights**2).sum()) if num_flat else 0.0
        costs = _fit_linear(features[others], wall_ms[others])
        errors = np.maximum(features @ costs, least_ms) / wall_ms - 1
        candidates.append((float(np.linalg.norm(errors)), costs, least_ms))
    # Of two equally good fits, take the one with fewer flat points.
    _, costs, least_ms = min(candidates, key=lambda one: round(one[0], 9))
    return costs, least_ms


def _read(
    table: str, report: Report, features_of: Callable[[Mapping[str, Any]], tuple[float, ...]]
) -> _MeasuredTable:
    rows: Sequence[Mapping[str, Cell]] = report.tables.get(table, [])
    try:
        measured = _MeasuredTable(
            [_name(table, row) for row in rows],
            np.array([features_of(row) for row in rows], dtype=np.float64),
            np.array([row["wall_ms"] for row in rows], dtype=np.float64),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the step report's table {table!r} is not as expected: {error}") from error
    if len(rows) < LEAST_POINTS:
        raise ConfigError(
            f"the step report has {len(rows)} {table} points, a fit needs at least {LEAST_POINTS}; run "
            "minisgl bench step with more --batches, --contexts, --prefills and --prefixes"
        )
    return measured


def _name(table: str, row: Mapping[str, Cell]) -> str:
    if table == "decode":
        return f"decode {row['batch']} x {row['context']}"
    return f"prefill {row['new_tokens']} on {row['prefix']}"
