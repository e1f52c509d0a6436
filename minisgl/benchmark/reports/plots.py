"""Pictures of measurements: bars, distributions, lines, heat maps, timelines; .png, .svg, or one .html page.

Promise: needs matplotlib only to draw, never to measure; an .html page holds its pictures and its figures
and loads nothing from elsewhere.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from msgspec.structs import replace

from minisgl.benchmark.report import (
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
COLORS = ("#2f6fde", "#e08a1e", "#3a9d5d", "#b4438f", "#7a6ff0", "#8a8f99", "#c0392b", "#16808d")
PALE = "#b4bcc8"
"""For what the others are compared with."""
PANEL_WIDTH_IN = 10.0
MAX_CDF_POINTS = 2000
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


class Group(NamedTuple):
    """One line of a bar chart: a value for each series; None leaves the bar out."""

    label: str
    values: tuple[float | None, ...]
    notes: tuple[str, ...]  # written at the ends of the bars


class Span(NamedTuple):
    """A stretch of time in a timeline."""

    lane: str
    name: str
    start: float
    duration: float


class Panel(NamedTuple):
    """One picture of a figure: how high it is, and what draws it on matplotlib axes."""

    height_in: float
    draw: Callable[[Any], None]


def check_chart_path(path: Path) -> None:
    """Whether a picture could be drawn to `path`.

    Raises:
        ConfigError: its name ends otherwise than in SUFFIXES, or matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot needs a name that ends in {', '.join(SUFFIXES)}, got {path}")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install 'minisgl[plot]'; or write the "
            "report with --out and draw it elsewhere with minisgl bench plot"
        )


def plot_report(path: Path, report: Report) -> None:
    """Draw all charts of a report, one below the other.

    Raises:
        ConfigError: as check_chart_path, or the report has no chart or one that does not fit its data.
    """
    if not report.charts:
        raise ConfigError(f"this report of minisgl bench {report.kind} has nothing to draw")
    try:
        panels = [_panel(chart, report) for chart in report.charts]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"a chart of the report does not fit its data: {error}") from error
    write_panels(path, panels, _caption(report.environment), report)


def check_output(output: OutputSettings) -> None:
    """Whether a report could go where it is wanted; to be called before anything is measured.

    Raises:
        ConfigError: nothing can be written or drawn there.
    """
    output_path("--out", output.out)
    plot_path = output_path("--plot", output.plot)
    if plot_path is not None:
        check_chart_path(plot_path)


def deliver(report: Report, output: OutputSettings, out: TextIO) -> None:
    """Write and draw a report where that is wanted, and say so; the commit is the one that was given.

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
    """Bars of fractions; `limit` is the value at the right end, as 1.0 of a roofline.

    Raises:
        ConfigError: as check_chart_path.
    """
    write_panels(path, [bars(title, series, groups, limit=limit, as_percent=True)])


def write_panels(
    path: Path, panels: Sequence[Panel], caption: str = "", report: Report | None = None
) -> None:
    """Draw panels one below the other; an .html page also gets the figures of `report`.

    Raises:
        ConfigError: as check_chart_path, or nothing can be written there.
    """
    check_chart_path(path)
    image_format = "png" if path.suffix == ".png" else "svg"
    image = _draw(panels, caption, image_format)
    if path.suffix == ".html":
        image = _page(image.decode("utf-8"), report).encode("utf-8")
    write_atomically(path, image)


def bars(
    title: str,
    series: Sequence[str],
    groups: Sequence[Group],
    *,
    limit: float | None = None,
    as_percent: bool = False,
    x_label: str = "",
) -> Panel:
    """Horizontal bars, a group for each line; values beyond `limit` end there."""

    def draw(axes: Any) -> None:
        thickness = 0.8 / len(series)
        colors = (PALE, *COLORS) if len(series) > 1 else COLORS
        values = [value for group in groups for value in group.values if value is not None]
        end = limit if limit is not None else max(values, default=1.0) or 1.0
        for place, name in enumerate(series):
            kept = [(i, g, g.values[place]) for i, g in enumerate(groups)]
            kept = [(i, g, min(value, end)) for i, g, value in kept if value is not None]
            spots = [i + place * thickness for i, _, _ in kept]
            axes.barh(
                spots,
                [length for _, _, length in kept],
                thickness * 0.9,
                label=name,
                color=colors[place % len(colors)],
            )
            for spot, (_, group, length) in zip(spots, kept, strict=True):
                axes.text(length + 0.005 * end, spot, group.notes[place], va="center", fontsize=7)
        axes.set_yticks(
            [i + 0.4 - thickness / 2 for i in range(len(groups))], [g.label for g in groups], fontsize=8
        )
        axes.set_xlim(0, end * 1.12)
        if as_percent:
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.grid(visible=False, axis="y")
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.set_title(title)
        if len(series) > 1:
            _legend(axes, loc="lower right")

    return Panel(1.4 + 0.17 * (len(series) + 0.6) * len(groups), draw)


def cdf(title: str, samples: Mapping[str, Sequence[float]], *, x_label: str, log_x: bool = False) -> Panel:
    """The share of samples at or below each value, one step line per name."""

    def draw(axes: Any) -> None:
        for place, (name, values) in enumerate(samples.items()):
            if not values:
                continue
            ordered = sorted(values)
            # Of very many samples a part looks the same, and the file stays small.
            kept = range(len(ordered) - 1, -1, -max(1, len(ordered) // MAX_CDF_POINTS))[::-1]
            shares = [(i + 1) / len(ordered) for i in kept]
            axes.step(
                [ordered[0], *(ordered[i] for i in kept)],
                [0.0, *shares],
                where="post",
                color=COLORS[place % len(COLORS)],
                label=f"{name} (n = {len(values):,})",
            )
        for share in (0.5, 0.9, 0.99):
            axes.axhline(share, color="#999", linewidth=0.6, linestyle=":")
        axes.set_ylim(0, 1.01)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 0.99])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        _scale(axes, log_x=log_x and all(value > 0 for values in samples.values() for value in values))
        axes.set_xlabel(x_label)
        axes.set_title(title)
        _legend(axes, loc="lower right")

    return Panel(3.6, draw)


def lines(
    title: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> Panel:
    """Values over `x`, one line with markers per name; None leaves a point out."""

    def draw(axes: Any) -> None:
        for place, (name, values) in enumerate(series.items()):
            points = sorted((a, b) for a, b in zip(x, values, strict=True) if b is not None)
            axes.plot(
                [a for a, _ in points],
                [b for _, b in points],
                marker="o",
                markersize=3.5,
                label=name,
                color=COLORS[place % len(COLORS)],
            )
        _scale(axes, log_x=log_x, log_y=log_y)
        if log_x and len(set(x)) <= 12:
            axes.set_xticks(sorted(set(x)), [f"{value:g}" for value in sorted(set(x))])
            axes.minorticks_off()
        if not log_y:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title)
        _legend(axes)

    return Panel(3.6, draw)


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    label: str,
    row_label: str = "",
    column_label: str = "",
    as_percent: bool = False,
) -> Panel:
    """Values as colours with the numbers in them; `values` by row, None stays empty. Percent is of 1."""

    def draw(axes: Any) -> None:
        filled = [[float("nan") if value is None else value for value in line] for line in values]
        limits = {"vmin": 0.0, "vmax": 1.0} if as_percent else {}
        image = axes.imshow(filled, aspect="auto", cmap="viridis", **limits)
        low, high = image.get_clim()
        for i, line in enumerate(values):
            for j, value in enumerate(line):
                if value is not None:
                    shade = (value - low) / (high - low) if high > low else 1.0
                    text = f"{value:.0%}" if as_percent else format_cell(value)
                    color = "black" if shade > 0.6 else "white"
                    axes.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.grid(visible=False)
        axes.set_xlabel(column_label)
        axes.set_ylabel(row_label)
        axes.set_title(title)
        bar = axes.figure.colorbar(image, ax=axes, label=label, pad=0.02)
        if as_percent:
            bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return Panel(1.4 + 0.4 * len(rows), draw)


def timeline(title: str, spans: Sequence[Span], *, x_label: str) -> Panel:
    """Spans as bars along time, a line for each lane, a colour for each name."""
    lanes = list(dict.fromkeys(span.lane for span in spans))
    names = list(dict.fromkeys(span.name for span in spans))

    def draw(axes: Any) -> None:
        end = max((span.start + span.duration for span in spans), default=1.0)
        for place, name in enumerate(names):
            own = [span for span in spans if span.name == name]
            axes.barh(
                [lanes.index(span.lane) for span in own],
                [span.duration for span in own],
                0.7,
                left=[span.start for span in own],
                color=_color(place),
                label=name,
                edgecolor="white",
                linewidth=0.5,
            )
            for span in own:
                text = format_cell(span.duration)
                if span.duration > 0.05 * end:
                    middle = span.start + span.duration / 2
                    axes.text(middle, lanes.index(span.lane), text, ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_xlim(0, end * 1.01)
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.set_title(title)
        _legend(axes, loc="upper left", bbox_to_anchor=(1.01, 1.0))

    return Panel(max(1.0 + 0.35 * len(lanes), 0.6 + 0.18 * len(names)), draw)


def _color(place: int) -> str:
    """A light tint, so that black text can be read on it; repeats after fourteen."""
    tints = (
        "#8fb4f2", "#f0bd7c", "#8ccba2", "#d99cc5", "#b9b3f6",
        "#c3c7ce", "#e39b93", "#83c3cb", "#e6d36b", "#c9ab8f",
        "#b5cf6b", "#f4b9cf", "#8e9fd0", "#7fa894",
    )  # fmt: skip
    return tints[place % len(tints)]


def _legend(axes: Any, **where: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, **where)


def _scale(axes: Any, *, log_x: bool = False, log_y: bool = False) -> None:
    from matplotlib.ticker import LogFormatter

    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())
        axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def _panel(chart: Chart, report: Report) -> Panel:
    """The picture that a chart of a report asks for."""
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
    """The x values of all rows, and for each line its value in each row (None in rows of other lines)."""
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


def _draw(panels: Sequence[Panel], caption: str, image_format: str) -> bytes:
    # A Figure of its own, not pyplot: no windows, no global state.
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
        metadata = {"Date": None} if image_format == "svg" else {"Software": None}
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
    """One page with the SVG in it; with a report, its metrics and circumstances too."""
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
