"""The cost of a step as a linear model, fitted to what `minisgl bench step` measured.

Promise: no cost is negative, and the fit is the best such one in the sense of relative errors: a step of 5 ms
counts as much as one of 500 ms.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np

from minisgl.benchmark.report import Cell, Report
from minisgl.errors import ConfigError
from minisgl.scheduler.simulator import StepCost, attended_pairs


class Fit(NamedTuple):
    """A cost model, and for each measured point what it says."""

    cost: StepCost
    points: list[dict[str, Cell]]  # point, measured_ms, modelled_ms, ratio

    @property
    def mean_error(self) -> float:
        """Mean of |modelled / measured - 1|."""
        ratios = [float(point["ratio"] or 0.0) for point in self.points]
        return float(np.mean(np.abs(np.array(ratios) - 1.0)))


def fit_step_cost(report: Report) -> Fit:
    """Fit both halves of a `StepCost` to a step report's tables.

    Raises:
        ConfigError: the report is of another kind, or a table of it has too few points.
    """
    if report.kind != "step":
        raise ConfigError(
            f"--step-report needs a report of minisgl bench step, got one of bench {report.kind}"
        )
    decode = _Half("decode", report, lambda row: (1.0, row["batch"], row["batch"] * row["context"]))
    prefill = _Half(
        "prefill",
        report,
        lambda row: (1.0, row["new_tokens"], attended_pairs(int(row["new_tokens"]), int(row["prefix"]))),
    )
    cost = StepCost(*decode.costs, *prefill.costs)
    return Fit(cost, [*decode.points(), *prefill.points()])


def non_negative_least_squares(features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The x >= 0, float [N], with the least |features @ x - targets|.

    Exact for the few columns there are here: at the optimum the columns with x > 0 solve their own
    unconstrained problem, so the best feasible solution over all subsets of columns is it.

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


class _Half:
    """The decode or the prefill side of the model."""

    def __init__(
        self, table: str, report: Report, features_of: Callable[[Mapping[str, Any]], tuple[float, ...]]
    ) -> None:
        rows: Sequence[Mapping[str, Cell]] = report.tables.get(table, [])
        try:
            self._features = np.array([features_of(row) for row in rows], dtype=np.float64)
            self._measured = np.array([row["wall_ms"] for row in rows], dtype=np.float64)
            self._names = [_name(table, row) for row in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the step report's table {table!r} is not as expected: {error}") from error
        if len(rows) < 3:
            raise ConfigError(
                f"the step report has {len(rows)} {table} points, a fit needs at least 3; run minisgl bench "
                "step with more --batches, --contexts, --prefills and --prefixes"
            )
        # Relative errors: every point weighs 1 / its own time. Columns of like size are better conditioned.
        weights = 1.0 / self._measured
        scale = np.abs(self._features).max(axis=0)
        solved = non_negative_least_squares(
            self._features / scale * weights[:, None], np.ones(len(self._measured))
        )
        self.costs = [float(value) for value in solved / scale]

    def points(self) -> list[dict[str, Cell]]:
        modelled = self._features @ np.array(self.costs)
        return [
            {
                "point": name,
                "measured_ms": float(real),
                "modelled_ms": float(made),
                "ratio": float(made / real),
            }
            for name, real, made in zip(self._names, self._measured, modelled, strict=True)
        ]


def _name(table: str, row: Mapping[str, Cell]) -> str:
    if table == "decode":
        return f"decode {row['batch']} x {row['context']}"
    return f"prefill {row['new_tokens']} on {row['prefix']}"
