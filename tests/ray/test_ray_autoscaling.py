"""How many engines a load wants, without Ray."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.engine.remote.supervisor import Pulse
from minisgl.ray.autoscaling import METRICS, EnginePolicy, Load, figures_of, load_from, wanted_engines

IDLE = Load(waiting=0, running=0, rows=512, held_pages=0, pages=2000)  # of two engines


def wanted(num: int, **load: float) -> int:
    return wanted_engines(num, IDLE._replace(**load), target_use=0.8, waiting_per_engine=8)


@pytest.mark.parametrize(
    ("load", "engines"),
    [
        ({}, 1),
        ({"held_pages": 800}, 1),  # 0.8 of the pages of one
        ({"held_pages": 801}, 2),
        ({"held_pages": 1600}, 2),
        ({"held_pages": 1601}, 3),
        ({"running": 204}, 1),
        ({"running": 206}, 2),
        ({"running": 512}, 3),
        ({"waiting": 3}, 1),
        ({"waiting": 4}, 2),  # none is stopped while they wait
        ({"waiting": 7.9}, 2),
        ({"waiting": 8}, 3),
        ({"waiting": 16}, 4),
        ({"waiting": 1000}, 4),  # at most twice as many at once
        ({"waiting": 8, "running": 512}, 3),
    ],
)
def test_two_engines_become(load: dict[str, float], engines: int) -> None:
    assert wanted(2, **load) == engines


def test_without_figures_nothing_changes() -> None:
    assert wanted(3, rows=0, pages=0) == 3


@given(
    num=st.integers(1, 64),
    waiting=st.floats(0, 1e4),
    use=st.floats(0, 1),
    target=st.floats(0.1, 1),
)
def test_the_answer_is_stable_and_grows_with_the_load(
    num: int, waiting: float, use: float, target: float
) -> None:
    load = Load(waiting, use * 100 * num, 100 * num, 0, 1000 * num)
    found = wanted_engines(num, load, target, 8)
    assert 1 <= found <= 2 * num
    assert found <= wanted_engines(num, load._replace(waiting=waiting + 8), target, 8)
    if found < num:
        # What is left carries the load, and does not ask for the stopped ones again.
        left = load._replace(rows=100 * found, pages=1000 * found)
        assert wanted_engines(found, left, target, 8) == found


def test_the_policy_adds_up_what_replicas_report() -> None:
    pulses = [
        Pulse(True, running=4, waiting=9, rows=4, held_pages=40, pages=100),
        Pulse(True, rows=4, pages=100),
    ]
    reports = {name: {i: figures_of(one)[name] for i, one in enumerate(pulses)} for name in METRICS}
    assert load_from(reports) == Load(9, 4, 8, 40, 200)
    context = SimpleNamespace(current_num_replicas=2, target_num_replicas=2, aggregated_metrics=reports)
    assert EnginePolicy(0.8, 8)(context) == (3, {})


def test_the_policy_waits_while_no_engine_runs() -> None:
    context = SimpleNamespace(current_num_replicas=0, target_num_replicas=1, aggregated_metrics={})
    assert EnginePolicy(0.8, 8)(context) == (1, {})
