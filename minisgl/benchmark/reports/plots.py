"""Writes pictures of reports: as .png, as .svg, or as one .html page.

Promise: this module needs matplotlib only to draw, never to measure. An .html page contains its pictures and
its figures, and loads nothing from elsewhere.
"""

import io
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from msgspec.structs import replace

from minisgl.benchmark.reports.panels import Group, Panel, Span, bars, cdf, heat_map, lines, timeline
from minisgl.benchmark.reports.report import (
    BarsChart,
    CdfChart,
    Cell,
    Chart,
    Environment,
    HeatMapChart,
    LinesChart,
    Report,
    format_cell,
    output_path,
    write_atomically,
    write_report,
)
from minisgl.benchmark.settings import OutputSettings
from minisgl.errors import ConfigError

SUFFIXES = (".png", ".svg", ".html")
PANEL_WIDTH_IN = 10.0
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "minisgl",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "legend.frameon": False,
}


def check_chart_path(path: Path) -> None:
    """Check that a picture can be drawn to `path`.

    Raises:
        ConfigError: its name does not end with one of SUFFIXES, or matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot needs a name that ends in {', '.join(SUFFIXES)}, got {path}")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'minisgl[plot]'; or write the "
            "report with --out and draw it elsewhere with minisgl bench plot"
        )


def plot_report(path: Path, report: Report, *, source: str | None = None) -> None:
    """Draw all charts of a report, one below the other; `source` goes into the picture's metadata.

    Raises:
        ConfigError: as check_chart_path, or the report has no chart or one that does not fit its data.
    """
    if not report.charts:
        raise ConfigError(f"this report of minisgl bench {report.kind} has nothing to draw")
    try:
        panels = [_panel(chart, report) for chart in report.charts]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"a chart of the report does not fit its data: {error}") from error
    write_panels(path, panels, _caption(report.environment), report, source)


def check_output(output: OutputSettings) -> None:
    """Check that a report can be written and drawn; commands call this before they measure.

    Raises:
        ConfigError: nothing can be written or drawn there.
    """
    output_path("--out", output.out)
    plot_path = output_path("--plot", output.plot)
    if plot_path is not None:
        check_chart_path(plot_path)


def write_outputs(report: Report, output: OutputSettings, out: TextIO) -> None:
    """Write and draw a report as the settings say, and print the paths; `output.commit` replaces the commit.

    Raises:
        ConfigError: nothing can be written there.
    """
    if output.commit is not None:
        environment = replace(report.environment, git_commit=output.commit, git_dirty=None)
        report = replace(report, environment=environment)
    report_path = output_path("--out", output.out)
    if report_path is not None:
        write_report(report_path, report)
        print(report_path, file=out)
    plot_path = output_path("--plot", output.plot)
    if plot_path is not None:
        plot_report(plot_path, report)
        print(plot_path, file=out)


def write_chart(path: Path, title: str, series: tuple[str, ...], groups: list[Group], limit: float) -> None:
    """Draw bars of fractions; the axis ends at `limit`, for example 1.0 of a roofline.

    Raises:
        ConfigError: as check_chart_path.
    """
    write_panels(path, [bars(title, series, groups, limit=limit, as_percent=True)])


def write_panels(
    path: Path,
    panels: Sequence[Panel],
    caption: str = "",
    report: Report | None = None,
    source: str | None = None,
) -> None:
    """Draw panels one below the other; an .html page also gets the metrics of `report`.

    Args:
        source: the source field of the picture's metadata.

    Raises:
        ConfigError: as check_chart_path, or nothing can be written there.
    """
    check_chart_path(path)
    image_format = "png" if path.suffix == ".png" else "svg"
    image = _draw(panels, caption, image_format, source)
    if path.suffix == ".html":
        image = _page(image.decode("utf-8"), report).encode("utf-8")
    write_atomically(path, image)


def _panel(chart: Chart, report: Report) -> Panel:
    """The panel of a report's chart."""
    if isinstance(chart, CdfChart):
        samples = {name: report.samples[name] for name in chart.samples}
        return cdf(chart.title, samples, x_label=chart.x_label, log_x=chart.log_x)
    rows = report.tables[chart.table]
    if isinstance(chart, LinesChart):
        x, series = _series(chart, rows)
        return lines(
            chart.title,
            x,
            series,
            x_label=chart.x_label,
            y_label=chart.y_label,
            log_x=chart.log_x,
            log_y=chart.log_y,
        )
    if isinstance(chart, HeatMapChart):
        row_keys = _distinct(rows, chart.row)
        column_keys = _distinct(rows, chart.column)
        found = {(row[chart.row], row[chart.column]): _number(row[chart.value]) for row in rows}
        return heat_map(
            chart.title,
            [format_cell(key) for key in row_keys],
            [format_cell(key) for key in column_keys],
            [[found.get((row, column)) for column in column_keys] for row in row_keys],
            label=chart.label,
            row_label=chart.row,
            column_label=chart.column,
            as_percent=chart.as_percent,
        )
    if isinstance(chart, BarsChart):
        groups = [
            Group(
                str(row[chart.label]),
                tuple(_number(row[name]) for name in chart.values),
                tuple(format_cell(row[name]) for name in chart.notes or chart.values),
            )
            for row in rows
        ]
        return bars(
            chart.title,
            chart.values,
            groups,
            limit=1.0 if chart.as_percent else None,
            as_percent=chart.as_percent,
            x_label=chart.x_label,
        )
    spans = [
        Span(
            str(row[chart.lane]),
            str(row[chart.name]),
            _number(row[chart.start]) or 0.0,
            _number(row[chart.duration]) or 0.0,
        )
        for row in rows
    ]
    return timeline(chart.title, spans, x_label=chart.x_label)


def _series(
    chart: LinesChart, rows: Sequence[Mapping[str, Cell]]
) -> tuple[list[float], dict[str, list[float | None]]]:
    """The x values of all rows, and for each line its values by row (None in rows of other lines)."""
    x = [_number(row[chart.x]) or 0.0 for row in rows]
    if chart.by is None:
        return x, {name: [_number(row[name]) for row in rows] for name in chart.y}
    by = chart.by
    return x, {
        f"{name}, {by} {format_cell(key)}" if len(chart.y) > 1 else f"{by} {format_cell(key)}": [
            _number(row[name]) if row[by] == key else None for row in rows
        ]
        for name in chart.y
        for key in _distinct(rows, by)
    }


def _distinct(rows: Sequence[Mapping[str, Cell]], column: str) -> list[Cell]:
    return list(dict.fromkeys(row[column] for row in rows))


def _number(value: Cell) -> float | None:
    return None if value is None else float(value)


def _caption(environment: Environment) -> str:
    commit = f", {environment.git_commit[:10]}" if environment.git_commit else ""
    changed = " with changes" if environment.git_dirty else ""
    device = environment.gpu or environment.cpu
    return f"{device}, torch {environment.torch}, {environment.date[:10]}{commit}{changed}"


def _draw(panels: Sequence[Panel], caption: str, image_format: str, source: str | None) -> bytes:
    # A Figure instead of pyplot has no windows and no global state.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    heights = [panel.height_in for panel in panels]
    with rc_context(STYLE):
        figure = Figure(figsize=(PANEL_WIDTH_IN, sum(heights)), layout="constrained")
        column = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
        for panel, axes in zip(panels, column[:, 0], strict=True):
            panel.draw(axes)
        if caption:
            figure.supxlabel(caption, fontsize=7, color="#555", x=0.01, ha="left")
        metadata = {"Date" if image_format == "svg" else "Software": None, "Source": source}
        buffer = io.BytesIO()
        figure.savefig(buffer, format=image_format, dpi=130, metadata=metadata)
    return buffer.getvalue()


PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px/1.4 Helvetica, Arial, sans-serif; color: #222; margin: 2em auto; max-width: 1000px; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
td, th {{ padding: 2px 12px; border-bottom: 1px solid #e4e4e4; text-align: left; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def _page(svg: str, report: Report | None) -> str:
    """One page with the SVG and, if given, the metrics and environment of the report."""
    picture = svg[svg.index("<svg") :]
    if report is None:
        return PAGE.format(title="minisgl", body=picture)
    title = escape(f"minisgl bench {report.kind}")
    metrics = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{escape(format_cell(value))}</td></tr>'
        for name, value in report.metrics.items()
    )
    facts = {name: getattr(report.environment, name) for name in report.environment.__struct_fields__}
    circumstances = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(format_cell(value))}</td></tr>"
        for name, value in facts.items()
    )
    return PAGE.format(
        title=title,
        body=f"{picture}\n<h2>Figures</h2>\n<table>{metrics}</table>\n"
        f"<h2>Circumstances</h2>\n<table>{circumstances}</table>",
    )
