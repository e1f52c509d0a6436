"""The fitted cost of a step: it finds the costs a report was made with."""

import numpy as np
import pytest

from minisgl.benchmark.reports.report import Report, make_report
from minisgl.benchmark.steps.step_fit import fit_step_cost, non_negative_least_squares
from minisgl.errors import ConfigError
from minisgl.scheduler.simulator import StepCost


def step_report(cost: StepCost, noise: float = 0.0) -> Report:
    """What a machine with exactly these costs would report."""
    rng = np.random.default_rng(0)

    def measured(wall_ms: float) -> float:
        return wall_ms * (1 + noise * float(rng.uniform(-1, 1)))

    decode = [
        {
            "batch": batch,
            "context": context,
            "wall_ms": measured(
                cost.decode_ms + cost.per_decode_row_ms * batch + cost.per_context_token_ms * batch * context
            ),
        }
        for batch in (1, 8, 64, 256)
        for context in (128, 1024, 4096)
    ]
    prefill = []
    for tokens in (16, 256, 1024, 4096):
        for prefix in (0, 4096):
            pairs = sum(prefix + place + 1 for place in range(tokens))
            wall_ms = cost.prefill_ms + cost.per_prompt_token_ms * tokens + cost.per_attended_token_ms * pairs
            wall_ms = measured(max(wall_ms, cost.least_prefill_ms))
            prefill.append({"new_tokens": tokens, "prefix": prefix, "wall_ms": wall_ms})
    return make_report(
        "step", arguments={}, metrics={}, tables={"decode": decode, "prefill": prefill}, command="test"
    )


COST = StepCost(
    decode_ms=3.5,
    per_decode_row_ms=0.01,
    per_context_token_ms=3e-5,
    prefill_ms=5.0,
    per_prompt_token_ms=0.02,
    per_attended_token_ms=1e-6,
)


@pytest.mark.parametrize("least_ms", [0.0, 12.0])
def test_a_fit_finds_the_costs_a_report_was_made_with(least_ms: float) -> None:
    cost = COST._replace(least_prefill_ms=least_ms)
    fit = fit_step_cost(step_report(cost))
    assert list(fit.cost) == pytest.approx(list(cost), rel=1e-6)
    assert fit.mean_error < 1e-9
    assert len(fit.points) == 12 + 8


def test_a_fit_of_noisy_times_is_near_and_says_how_near() -> None:
    fit = fit_step_cost(step_report(COST, noise=0.05))
    assert fit.mean_error < 0.05
    assert fit.cost.decode_ms == pytest.approx(3.5, rel=0.1)
    assert all(value >= 0 for value in fit.cost)


def test_small_prefills_that_all_take_the_same_time_do_not_bend_the_costs_of_large_ones() -> None:
    flat = fit_step_cost(step_report(COST._replace(least_prefill_ms=12.0), noise=0.03))
    assert flat.cost.least_prefill_ms == pytest.approx(12.0, rel=0.03)
    assert flat.cost.per_prompt_token_ms == pytest.approx(COST.per_prompt_token_ms, rel=0.1)
    assert flat.mean_error < 0.03


@pytest.mark.parametrize("seed", range(20))
def test_no_change_of_a_non_negative_solution_improves_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features, targets = rng.normal(size=(8, 3)), rng.normal(size=8)
    solution = non_negative_least_squares(features, targets)
    gradient = features.T @ (features @ solution - targets)
    assert (solution >= 0).all()
    # The conditions of Karush, Kuhn and Tucker, which only the optimum of a convex problem meets.
    assert np.allclose(gradient[solution > 0], 0, atol=1e-9)
    assert (gradient[solution == 0] >= -1e-9).all()


def test_other_reports_and_too_few_points_are_refused() -> None:
    with pytest.raises(ConfigError, match="got one of bench offline"):
        fit_step_cost(make_report("offline", arguments={}, metrics={}, command="test"))
    few = make_report("step", arguments={}, metrics={}, tables={"decode": [], "prefill": []}, command="test")
    with pytest.raises(ConfigError, match="at least 3"):
        fit_step_cost(few)
    odd = make_report("step", arguments={}, metrics={}, tables={"decode": [{"batch": 1}]}, command="test")
    with pytest.raises(ConfigError, match="not as expected"):
        fit_step_cost(odd)
