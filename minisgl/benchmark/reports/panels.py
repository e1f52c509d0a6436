"""The kinds of pictures: bars, cumulative distributions, lines, heat maps and timelines.

Promise: a function here returns a Panel and imports no matplotlib; only drawing the panel needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from minisgl.benchmark.reports.report import format_cell

COLORS = ("#2f6fde", "#e08a1e", "#3a9d5d", "#b4438f", "#7a6ff0", "#8a8f99", "#c0392b", "#16808d")
PALE = "#b4bcc8"
"""The colour of the first series, with which the others are compared."""
MAX_CDF_POINTS = 2000


class Group(NamedTuple):
    """One group of a bar chart: a value for each series; None leaves the bar out."""

    label: str
    values: tuple[float | None, ...]
    notes: tuple[str, ...]  # written at the ends of the bars


class Span(NamedTuple):
    """A span of time in a timeline."""

    lane: str
    name: str
    start: float
    duration: float


class Panel(NamedTuple):
    """One picture of a figure: its height, and a function that draws it on matplotlib axes."""

    height_in: float
    draw: Callable[[Any], None]


def bars(
    title: str,
    series: Sequence[str],
    groups: Sequence[Group],
    *,
    limit: float | None = None,
    as_percent: bool = False,
    x_label: str = "",
) -> Panel:
    """Horizontal bars in groups; values above `limit` are drawn up to it."""

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
            # A part of very many samples looks the same and keeps the file small.
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
            axes.set_xticks([], minor=True)
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
    """Values as colours, with their numbers; `values` is by row, and None stays empty. 1 is 100 percent."""

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
    """Spans as bars along time, with a row for each lane and a colour for each name."""
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
    """A light tint, on which black text is readable; the tints repeat after fourteen."""
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
    if log_x:
        axes.set_xscale("log")
        _plain_numbers(axes.xaxis)
    if log_y:
        axes.set_yscale("log")
        _plain_numbers(axes.yaxis)


def _plain_numbers(axis: Any) -> None:
    """Label ticks of a log scale as 0.6, not 6e-01; matplotlib chooses the minor ticks with a label."""
    from matplotlib.ticker import LogFormatter

    chooser = LogFormatter(minor_thresholds=(2, 0.5))
    chooser.set_axis(axis)

    def minor(value: float, _: int) -> str:
        chooser.set_locs(axis.get_minorticklocs())
        return f"{value:g}" if chooser(value) else ""

    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(minor)
