"""The report of a benchmark: one JSON file with environment, metrics, tables, raw samples and charts.

Promise: `read_report` checks the type of every field. A report describes its own charts, so that
`minisgl bench plot` can draw it on another machine. Torch-free: the GPU's name comes from torch if it is
already loaded, else from nvidia-smi.
"""

import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

import minisgl
from minisgl.config import EngineConfig, ResolvedConfig
from minisgl.errors import ConfigError

FORMAT = 1
"""Increased when a field changes its meaning; `read_report` refuses other formats."""

Cell = str | float | int | bool | None


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of a measurement. None = absent or unknown."""

    date: str
    """UTC, for example 2025-01-31T12:00:00Z."""
    command: str
    git_commit: str | None
    git_dirty: bool | None
    """Tracked files differ from the commit."""
    minisgl: str
    python: str
    torch: str | None
    triton: str | None
    gpu: str | None
    driver: str | None
    cpu: str
    num_cpus: int
    """Processors that this process may use."""
    platform: str


class CdfChart(msgspec.Struct, frozen=True, kw_only=True, tag="cdf"):
    """Cumulative distributions of raw samples in one picture."""

    title: str
    samples: tuple[str, ...]
    """Names in `Report.samples`."""
    x_label: str
    log_x: bool = False


class LinesChart(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """Columns of a table over another of its columns."""

    title: str
    table: str
    x: str
    y: tuple[str, ...]
    by: str | None = None
    """A column; the rows with equal values of it make one line."""
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False


class HeatMapChart(msgspec.Struct, frozen=True, kw_only=True, tag="heat_map"):
    """One column of a table as colours over two others."""

    title: str
    table: str
    row: str
    column: str
    value: str
    label: str
    """The meaning of the colours."""
    as_percent: bool = False


class BarsChart(msgspec.Struct, frozen=True, kw_only=True, tag="bars"):
    """Columns of a table as horizontal bars, a group for each row."""

    title: str
    table: str
    label: str
    values: tuple[str, ...]
    x_label: str
    notes: tuple[str, ...] = ()
    """Columns whose values are written at the ends of the bars, instead of the bars' own values."""
    as_percent: bool = False
    """The values are shares, and the axis ends at 1."""


class TimelineChart(msgspec.Struct, frozen=True, kw_only=True, tag="timeline"):
    """Rows of a table as spans of time."""

    title: str
    table: str
    lane: str
    """A column; spans with equal values of it share a lane."""
    name: str
    """A column with the spans' names, which also choose their colours."""
    start: str
    duration: str
    x_label: str


Chart = CdfChart | LinesChart | HeatMapChart | BarsChart | TimelineChart


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one benchmark."""

    format: int = FORMAT
    kind: str
    """The subcommand."""
    environment: Environment
    arguments: dict[str, Any]
    metrics: dict[str, float | int | None]
    """Numbers by name; a name ends with its unit (`_ms`, `_s`, `_tokens_per_s`, `_bytes` ...)."""
    tables: dict[str, list[dict[str, Cell]]]
    samples: dict[str, list[float]]
    """Raw measurements by name; metrics summarise them."""
    charts: tuple[Chart, ...] = ()


def make_report(
    kind: str,
    *,
    arguments: Mapping[str, Any],
    metrics: Mapping[str, float | int | None],
    tables: Mapping[str, Sequence[Mapping[str, Cell]]] | None = None,
    samples: Mapping[str, Iterable[float]] | None = None,
    charts: Sequence[Chart] = (),
    command: str | None = None,
) -> Report:
    """A report with the present environment; `command` None = this process's own command line.

    Numbers that are not finite become None in metrics and tables.

    Raises:
        ValueError: a sample is not finite, or a chart names a table or samples that do not exist.
    """
    kept = {name: [float(value) for value in values] for name, values in (samples or {}).items()}
    for name, values in kept.items():
        if not all(map(math.isfinite, values)):
            raise ValueError(f"samples {name!r} hold a number that is not finite")
    report = Report(
        kind=kind,
        environment=find_environment(command),
        arguments=dict(arguments),
        metrics={name: _cell(value) for name, value in metrics.items()},
        tables={
            name: [{column: _cell(value) for column, value in row.items()} for row in rows]
            for name, rows in (tables or {}).items()
        },
        samples=kept,
        charts=tuple(charts),
    )
    _check_charts(report)
    return report


def find_environment(command: str | None = None) -> Environment:
    """The present environment."""
    commit, dirty = _git_state(Path(minisgl.__file__).resolve().parent.parent)
    gpu, driver = _gpu_and_driver()
    return Environment(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=command if command is not None else own_command(),
        git_commit=commit,
        git_dirty=dirty,
        minisgl=minisgl.__version__,
        python=platform.python_version(),
        torch=_version_of("torch"),
        triton=_version_of("triton"),
        gpu=gpu,
        driver=driver,
        cpu=_cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        platform=platform.platform(),
    )


def engine_arguments(config: EngineConfig | ResolvedConfig) -> dict[str, Any]:
    """An engine's settings for `Report.arguments`. The path of the compile cache becomes a boolean, because
    it has no influence on the measurement."""
    return asdict(config) | {"compile_cache": bool(config.compile_cache)}


def own_command() -> str:
    """This process's command line, without the folder of its program."""
    program = Path(sys.argv[0]).name
    return " ".join(["minisgl" if program in ("minisgl", "__main__.py") else program, *sys.argv[1:]])


def write_report(path: Path, report: Report) -> None:
    """Write a report as JSON, atomically.

    Raises:
        ConfigError: nothing can be written there.
    """
    text = _as_lines(msgspec.to_builtins(report))
    write_atomically(path, f"{text}\n".encode("utf-8", "replace"))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` with a file of this content; after an error, `path` is unchanged.

    Raises:
        ConfigError: nothing can be written there.
    """
    name = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            name = file.name
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except OSError as error:
        if name is not None:
            os.unlink(name)
        raise ConfigError(f"can't write {path}: {error.strerror}") from error


def output_path(flag: str, text: str | None) -> Path | None:
    """The flag's value as a path; commands check it before they measure.

    Raises:
        ConfigError: no file can be written there.
    """
    if text is None:
        return None
    path = Path(text).expanduser()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag} needs a file in a folder that can be written to, got {text}")
    return path


def read_report(path: Path) -> Report:
    """The report in a file.

    Raises:
        ConfigError: the file can't be read or is not a report.
    """
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no report of minisgl bench: {error}") from error
    if report.format != FORMAT:
        raise ConfigError(f"{path} is a report of format {report.format}; this minisgl reads {FORMAT}")
    try:
        _check_charts(report)
    except ValueError as error:
        raise ConfigError(f"{path} is no report of minisgl bench: {error}") from error
    return report


def report_schema() -> dict[str, Any]:
    """The JSON schema of a report."""
    return msgspec.json.schema(Report)


def format_table(rows: Sequence[Mapping[str, Cell]], columns: Sequence[str] | None = None) -> str:
    """Rows under their column names, numbers aligned right; `columns` None = all columns of the rows."""
    names = (
        list(columns) if columns is not None else list(dict.fromkeys(name for row in rows for name in row))
    )
    cells = [[format_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    is_number = [
        any(isinstance(row.get(name), int | float) for row in rows)
        and not any(isinstance(row.get(name), str | bool) for row in rows)
        for name in names
    ]
    lines = []
    for line in (names, *cells):
        placed = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_number, strict=True)
        ]
        lines.append("  ".join(placed).rstrip())
    return "\n".join(lines)


def format_metrics(metrics: Mapping[str, float | int | None]) -> str:
    """One metric per line, numbers aligned."""
    names = max(map(len, metrics), default=0)
    values = {name: format_cell(value) for name, value in metrics.items()}
    width = max(map(len, values.values()), default=0)
    return "\n".join(f"{name:<{names}}  {value:>{width}}" for name, value in values.items())


def format_cell(value: Cell) -> str:
    """A value as text: at most four decimal places, commas between thousands."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "-"
        if value == 0 or abs(value) >= 1000:
            return f"{value:,.0f}"
        if abs(value) < 1e-3:
            return f"{value:.3g}"
        decimals = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:.{min(decimals, 4)}f}"
    return value


def _cell(value: Any) -> Any:
    """A value as plain data: a numpy number becomes Python's, a number that is not finite becomes None."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    number = value.item() if hasattr(value, "item") else value
    return number if not isinstance(number, float) or math.isfinite(number) else None


def _check_charts(report: Report) -> None:
    for chart in report.charts:
        if isinstance(chart, CdfChart):
            missing = [name for name in chart.samples if name not in report.samples]
            if missing:
                raise ValueError(f"the chart {chart.title!r} needs samples {missing[0]!r}")
        elif chart.table not in report.tables:
            raise ValueError(f"the chart {chart.title!r} needs a table {chart.table!r}")


def _as_lines(value: Any, indent: str = "") -> str:
    """Readable JSON: one line for each entry of an object, each row of a table, and each list of samples."""
    deeper = indent + " "
    if isinstance(value, dict) and value:
        entries = [f"{deeper}{json.dumps(name)}: {_as_lines(one, deeper)}" for name, one in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        rows = [deeper + json.dumps(one, ensure_ascii=False) for one in value]
        return "[\n" + ",\n".join(rows) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def _version_of(package: str) -> str | None:
    loaded = sys.modules.get(package)
    if loaded is not None:
        return str(getattr(loaded, "__version__", "")) or None
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state(folder: Path) -> tuple[str | None, bool | None]:
    """The checkout's commit, and whether its files have changed; (None, None) for an installed package."""
    if not (folder / ".git").exists():
        return None, None
    commit = _output_of("git", "-C", str(folder), "rev-parse", "HEAD")
    if commit is None:
        return None, None
    changes = _output_of("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _gpu_and_driver() -> tuple[str | None, str | None]:
    answer = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    found = [line.rpartition(",") for line in (answer or "").splitlines() if "," in line]
    names = [name.strip() for name, _, _ in found]
    driver = found[0][2].strip() if found else None
    torch = sys.modules.get("torch")
    if torch is not None:
        return (torch.cuda.get_device_name() if torch.cuda.is_available() else None), driver
    if not names:
        return None, driver
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}", driver


def _cpu_name() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _output_of(*command: str) -> str | None:
    """The output of a command; None if it does not exist, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
