"""Decides how many engines there should be, from the figures that the running engines report.

`wanted_engines` decides; `EnginePolicy` gives Ray Serve its answer. This module does not import Ray.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from minisgl.engine.remote.supervisor import Pulse


class Load(NamedTuple):
    """Sums over all running engines. Each figure is a mean over some time."""

    waiting: float
    """Requests that no engine has started on."""
    running: float
    rows: float
    """Most requests that can run."""
    held_pages: float
    pages: float
    """All KV pages; requests hold `held_pages` of them."""


METRICS = Load._fields
"""What each replica reports to Ray Serve, by these names."""


def figures_of(pulse: Pulse) -> dict[str, float]:
    """What a replica reports: its engine's own part of a `Load`."""
    return {name: float(getattr(pulse, name)) for name in METRICS}


def load_from(metrics: Mapping[str, Mapping[Any, float]]) -> Load:
    """The sums over replicas of what they reported (metric -> replica -> value). A missing value is 0."""
    return Load(*[sum(metrics.get(name, {}).values()) for name in METRICS])


def wanted_engines(num: int, load: Load, target_use: float, waiting_per_engine: int) -> int:
    """How many engines suit the load. Ray Serve bounds the answer and waits before it follows.

    - Running requests get so many engines that at most `target_use` of the rows and KV pages is in use.
    - For each `waiting_per_engine` waiting requests, one engine is added, up to twice as many as there are.
    - While half of `waiting_per_engine` wait, no engine is stopped: they need rows and pages next.

    Args:
        num: engines that run and have reported `load`.
    """
    if not load.rows or not load.pages:
        return num  # none has reported yet
    use = max(load.running / load.rows, load.held_pages / load.pages)
    # Less a little, so that a rounding error adds no engine when the use equals the target.
    wanted = math.ceil(num * use / target_use - 1e-6)
    more = int(load.waiting / waiting_per_engine)
    if more:
        wanted = max(wanted, num + more)
    elif load.waiting >= waiting_per_engine / 2:
        wanted = max(wanted, num)
    return max(1, min(wanted, 2 * num))


class EnginePolicy:
    """The autoscaling policy of the engines' deployment, for Ray Serve's `policy_function`.

    Args:
        target_use, waiting_per_replica: see `RayConfig`.
    """

    def __init__(self, target_use: float, waiting_per_replica: int) -> None:
        self._target_use = target_use
        self._waiting_per_replica = waiting_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas Ray Serve should have, from its `AutoscalingContext`; and no state."""
        num = context.current_num_replicas
        if not num:
            return context.target_num_replicas, {}
        load = load_from(context.aggregated_metrics or {})
        return wanted_engines(num, load, self._target_use, self._waiting_per_replica), {}
