"""`minisgl bench compare`: what counts as a difference, and what the exit code says."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from minisgl.benchmark.reports.compare import (
    block_length,
    compare,
    is_higher_better,
    parse_share,
    ratio_interval,
    source_of,
)
from minisgl.benchmark.reports.report import Report, make_report, write_report
from minisgl.cli import main
from minisgl.errors import ConfigError


def a_report(kind: str = "offline", **samples: Sequence[float]) -> Report:
    metrics = {name: float(np.mean(values)) for name, values in samples.items() if len(values)}
    return make_report(kind, arguments={}, metrics=metrics, samples=samples, command="test")


def noisy(center: float, seed: int, num: int = 40) -> list[float]:
    return list(np.random.default_rng(seed).normal(center, center / 50, num))


def run(tmp_path: Path, a: Report, b: Report, *flags: str) -> int:
    write_report(tmp_path / "a.json", a)
    write_report(tmp_path / "b.json", b)
    return main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *flags])


def test_a_slower_report_is_a_regression_and_a_faster_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, fast = a_report(step_ms=noisy(11, 1)), a_report(step_ms=noisy(10, 2))
    assert run(tmp_path, fast, slow) == 1
    assert "REGRESSION" in capsys.readouterr().out
    assert run(tmp_path, slow, fast) == 0
    assert "better" in capsys.readouterr().out
    assert run(tmp_path, fast, slow, "--threshold", "20%") == 0
    assert "worse, within the threshold" in capsys.readouterr().out


def test_less_throughput_is_worse(tmp_path: Path) -> None:
    a, b = a_report(output_tokens_per_s=noisy(100, 1)), a_report(output_tokens_per_s=noisy(80, 2))
    assert run(tmp_path, a, b) == 1
    assert run(tmp_path, b, a) == 0


def test_noise_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spread = [5.0, 15.0, 8.0, 12.0]
    assert run(tmp_path, a_report(step_ms=spread), a_report(step_ms=[value * 1.1 for value in spread])) == 0
    assert "no significant difference" in capsys.readouterr().out


def test_few_samples_prove_nothing_however_far_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for few in ([1.0], [1.0, 1.01], [1.0, 1.01, 1.02]):
        assert run(tmp_path, a_report(step_ms=few), a_report(step_ms=[9 * value for value in few])) == 0
        assert "too few samples" in capsys.readouterr().out
    four = [1.0, 1.02, 1.01, 1.03]
    assert run(tmp_path, a_report(step_ms=four), a_report(step_ms=[9 * value for value in four])) == 1


def test_the_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(200):
        a, b = rng.normal(10, 1, 50), rng.normal(12, 1, 50)
        low, high = ratio_interval(a, b, lambda x: x.mean(axis=-1), 0.9, 400, trial)
        hits += low <= 1.2 <= high
    assert 0.83 <= hits / 200 <= 0.97


def walk(rng: np.random.Generator, keeps: float, num: int = 400) -> np.ndarray:
    """Samples around 10, each keeping a share of what set the one before apart."""
    values = np.empty(num)
    values[0] = rng.normal()
    for place in range(1, num):
        values[place] = keeps * values[place - 1] + (1 - keeps**2) ** 0.5 * rng.normal()
    return values + 10


def test_samples_that_hang_together_make_the_interval_as_wide_as_it_has_to_be() -> None:
    rng = np.random.default_rng(6)
    hits, hits_shuffled = 0, 0
    for trial in range(150):
        a, b = walk(rng, 0.9), walk(rng, 0.9)
        low, high = ratio_interval(a, b, lambda x: x.mean(axis=-1), 0.9, 200, trial)
        hits += low <= 1.0 <= high
        low, high = ratio_interval(
            rng.permutation(a), rng.permutation(b), lambda x: x.mean(axis=-1), 0.9, 200, trial
        )
        hits_shuffled += low <= 1.0 <= high
    assert 0.78 <= hits / 150 <= 0.97
    assert hits_shuffled / 150 < 0.5, "what single draws would say"


def test_blocks_are_as_long_as_samples_hang_together() -> None:
    rng = np.random.default_rng(7)
    assert np.mean([block_length(rng.normal(size=60)) for _ in range(100)]) < 2.5
    # The autocorrelation time of such a walk is (1 + 0.9) / (1 - 0.9) = 19; a block has twice that.
    assert 25 < np.mean([block_length(walk(rng, 0.9, 2000)) for _ in range(30)]) < 50
    assert block_length(np.arange(100.0)) == 25
    assert block_length(np.ones(100)) == block_length(np.array([1.0, 2.0])) == 1


def test_a_comparison_is_repeatable_and_its_metrics_do_not_influence_each_other() -> None:
    a = a_report(step_ms=noisy(10, 1), elapsed_s=noisy(3, 2))
    b = a_report(step_ms=noisy(11, 3), elapsed_s=noisy(3, 4))
    both = compare(a, b)
    assert both == compare(a, b)
    assert [one.name for one in both] == ["step_ms", "elapsed_s"]
    assert compare(a, b, wanted=["elapsed_s"]) == [both[1]]


def test_a_percentile_is_compared_as_one() -> None:
    samples = {"ttft_ms": [1.0, 2.0, 3.0, 100.0], "elapsed_s": [1.0, 1.0]}
    metrics = {"ttft_p50_ms": 2.5, "ttft_p99_ms": 97.1, "ttft_max_ms": 100.0, "num_steps": 3}
    report = make_report("serve", arguments={}, metrics=metrics, samples=samples, command="test")
    found = {one.name: one.a for one in compare(report, report)}
    assert found == pytest.approx({"ttft_p50_ms": 2.5, "ttft_p99_ms": 97.09, "ttft_max_ms": 100.0})
    assert source_of("num_steps", report) is None


@pytest.mark.parametrize(
    ("metric", "higher"),
    [
        ("output_tokens_per_s", True),
        ("prefix_hit_rate", True),
        ("elapsed_s", False),
        ("ttft_p99_ms", False),
        ("gpu_memory_bytes", False),
        ("num_steps", None),
    ],
)
def test_the_better_direction_follows_from_the_unit(metric: str, higher: bool | None) -> None:
    assert is_higher_better(metric) is higher


def test_a_threshold_is_a_share() -> None:
    assert parse_share("5%") == parse_share("0.05") == 0.05
    with pytest.raises(ConfigError, match="--threshold"):
        parse_share("five")


def test_files_that_cannot_be_compared_are_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = a_report(step_ms=[1.0, 2.0])
    assert run(tmp_path, a, a_report("step", step_ms=[1.0, 2.0])) == 2
    assert "bench offline can't be compared with one of bench step" in capsys.readouterr().err
    assert run(tmp_path, a, a_report(elapsed_s=[1.0])) == 2
    assert run(tmp_path, a, a, "--metrics", "elapsed_s") == 2
    assert run(tmp_path, a, a, "--confidence", "1") == 2
    (tmp_path / "b.json").write_text("{}", encoding="utf-8")
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 2


def test_other_circumstances_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = a_report(step_ms=[1.0, 2.0])
    a = replace(a, metrics=a.metrics | {"num_requests": 8})
    environment = replace(a.environment, cpu="another processor")
    b = replace(a, environment=environment, metrics=a.metrics | {"num_requests": 9})
    run(tmp_path, a, b)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        f"cpu differs: {a.environment.cpu} and another processor",
        "num_requests differs: 8 and 9",
    ]


def test_a_ratio_to_zero_is_no_verdict(tmp_path: Path) -> None:
    assert run(tmp_path, a_report(waiting_ms=[0.0, 0.0, 1.0]), a_report(waiting_ms=[5.0, 5.0, 5.0])) == 0


def test_large_samples_fit_in_memory() -> None:
    values = np.random.default_rng(0).normal(10, 1, 50_000)
    low, high = ratio_interval(values, values, lambda x: x.mean(axis=-1), 0.95, 100, 0)
    assert 0.998 < low < 1 < high < 1.002
