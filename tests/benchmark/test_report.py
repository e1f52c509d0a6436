"""A benchmark's report as a file, and its tables on a terminal."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.benchmark.reports.report import (
    CdfChart,
    Report,
    format_metrics,
    format_table,
    make_report,
    read_report,
    report_schema,
    write_report,
)
from minisgl.errors import ConfigError


def a_report() -> Report:
    # What comes out of numpy is not always a number of Python's.
    metrics: Any = {"output_tokens_per_s": np.float64(12.5), "num_steps": np.int64(7), "lost": float("nan")}
    return make_report(
        "offline",
        arguments={"model": "m", "rounds": 2, "prompts": None},
        metrics=metrics,
        tables={"rounds": [{"round": 1, "elapsed_s": 0.25, "note": "a"}, {"round": 2, "elapsed_s": None}]},
        samples={"step_ms": np.linspace(0, 1, 5)},
        charts=[CdfChart(title="Steps", samples=("step_ms",), x_label="ms")],
        command="minisgl bench offline --prompts '[ 1 ]'",
    )


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    report, path = a_report(), tmp_path / "a.json"
    write_report(path, report)
    assert read_report(path) == report
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert raw["metrics"] == {"output_tokens_per_s": 12.5, "num_steps": 7, "lost": None}
    assert raw["samples"]["step_ms"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert "[0.0, 0.25, 0.5, 0.75, 1.0]" in path.read_text(encoding="utf-8"), "samples are one line"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_a_name_that_is_no_unicode_does_not_spoil_the_file(tmp_path: Path) -> None:
    report = make_report("offline", arguments={"prompts": "caf\udce9.txt"}, metrics={}, command="x \udcff")
    write_report(tmp_path / "a.json", report)
    assert read_report(tmp_path / "a.json").arguments == {"prompts": "caf?.txt"}


def test_the_environment_says_where_and_with_what() -> None:
    environment = a_report().environment
    assert environment.command == "minisgl bench offline --prompts '[ 1 ]'"
    assert environment.python == sys.version.split()[0]
    assert environment.cpu
    assert environment.num_cpus >= 1
    assert environment.date.endswith("Z")


def test_the_schema_requires_what_every_report_has() -> None:
    definition = report_schema()["$defs"]["Report"]
    assert {"kind", "environment", "arguments", "metrics", "tables", "samples"} <= set(definition["required"])


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"kind": "offline"}', "\udcff", '{"kind": 3}'],
    ids=["empty", "list", "incomplete", "bytes", "mistyped"],
)
def test_a_file_that_is_no_report_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"odd\.json is no report"):
        read_report(path)


def test_a_missing_file_and_another_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        read_report(tmp_path / "none.json")
    path = tmp_path / "a.json"
    write_report(path, a_report())
    path.write_text(path.read_text(encoding="utf-8").replace('"format": 1', '"format": 99'), encoding="utf-8")
    with pytest.raises(ConfigError, match="format 99"):
        read_report(path)


def test_a_file_that_cannot_be_written_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't write"):
        write_report(tmp_path / "no" / "a.json", a_report())
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="can't write"):
        write_report(tmp_path / "folder", a_report())
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_samples_must_be_finite_and_charts_must_have_their_data() -> None:
    with pytest.raises(ValueError, match="'x'"):
        make_report("offline", arguments={}, metrics={}, samples={"x": [1.0, float("inf")]})
    chart = CdfChart(title="Steps", samples=("step_ms",), x_label="ms")
    with pytest.raises(ValueError, match="step_ms"):
        make_report("offline", arguments={}, metrics={}, charts=[chart])


def test_a_table_is_aligned() -> None:
    rows = [{"batch": 1, "wall_ms": 0.12345, "name": "a"}, {"batch": 64000, "wall_ms": None, "name": "long"}]
    assert format_table(rows).splitlines() == [
        " batch  wall_ms  name",
        "     1   0.1235  a",
        "64,000        -  long",
    ]
    assert format_metrics({"a_ms": 1234.5, "long_name": 3}).splitlines() == [
        "a_ms       1,234",
        "long_name      3",
    ]


def test_reports_load_neither_torch_nor_matplotlib() -> None:
    code = "import sys, minisgl.benchmark.reports.plots; print({'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
