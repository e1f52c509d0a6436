"""Horizontal bars, grouped, as an SVG written by hand; or as a PNG where matplotlib is installed."""

from html import escape
from pathlib import Path
from typing import NamedTuple

from minisgl.errors import ConfigError

WIDTH = 960
LABEL_WIDTH = 330
BAR_HEIGHT = 13
GROUP_GAP = 9
COLORS = ("#b4bcc8", "#2f6fde", "#e08a1e", "#3a9d5d")
TEXT = 'font-family="Helvetica, Arial, sans-serif" fill="#222"'


class Group(NamedTuple):
    """One line of the chart: a value for each series; None leaves the bar out."""

    label: str
    values: tuple[float | None, ...]
    notes: tuple[str, ...]  # written at the ends of the bars


def write_chart(path: Path, title: str, series: tuple[str, ...], groups: list[Group], limit: float) -> None:
    """Draw the groups to a .svg or .png file; `limit` is the value at the right end, as 1.0 of a roofline.

    Raises:
        ConfigError: the file's name ends otherwise, or a PNG is wanted and matplotlib is not installed.
    """
    check_chart_path(path)
    if path.suffix == ".svg":
        path.write_text(svg(title, series, groups, limit), encoding="utf-8")
    else:
        _write_png(path, title, series, groups, limit)


def check_chart_path(path: Path) -> None:
    """Whether `write_chart` could write there.

    Raises:
        ConfigError: it could not.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot needs a name that ends in .svg or .png, got {path}")
    if path.suffix == ".png":
        try:
            import matplotlib  # noqa: F401  # pyright: ignore[reportMissingImports]  (optional)
        except ImportError:
            raise ConfigError("--plot to a .png needs matplotlib; a .svg needs nothing") from None


def svg(title: str, series: tuple[str, ...], groups: list[Group], limit: float) -> str:
    """The chart as SVG text."""
    group_height = len(series) * BAR_HEIGHT + GROUP_GAP
    top, bottom = 70, 34
    height = top + len(groups) * group_height + bottom
    scale = (WIDTH - LABEL_WIDTH - 130) / limit
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold" {TEXT}>{escape(title)}</text>',
    ]
    x = LABEL_WIDTH
    for name, color in zip(series, COLORS, strict=False):
        lines.append(f'<rect x="{x}" y="40" width="11" height="11" fill="{color}"/>')
        lines.append(f'<text x="{x + 16}" y="50" font-size="12" {TEXT}>{escape(name)}</text>')
        x += 40 + 7 * len(name)
    end = top + len(groups) * group_height
    for step in range(6):
        value = limit * step / 5
        x = LABEL_WIDTH + value * scale
        color = "#888" if step in (0, 5) else "#e4e4e4"
        lines.append(f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{end}" stroke="{color}"/>')
        lines.append(
            f'<text x="{x:.1f}" y="{end + 18}" font-size="11" text-anchor="middle" {TEXT}>{value:.0%}</text>'
        )
    for index, group in enumerate(groups):
        y = top + index * group_height
        middle = y + len(series) * BAR_HEIGHT / 2 + 4
        lines.append(
            f'<text x="{LABEL_WIDTH - 8}" y="{middle:.1f}" font-size="11" text-anchor="end" {TEXT}>'
            f"{escape(group.label)}</text>"
        )
        for place, (value, note) in enumerate(zip(group.values, group.notes, strict=True)):
            if value is None:
                continue
            bar_y = y + place * BAR_HEIGHT
            length = min(value, limit) * scale
            lines.append(
                f'<rect x="{LABEL_WIDTH}" y="{bar_y}" width="{length:.1f}" height="{BAR_HEIGHT - 2}" '
                f'fill="{COLORS[place % len(COLORS)]}"/>'
            )
            lines.append(
                f'<text x="{LABEL_WIDTH + length + 5:.1f}" y="{bar_y + 9.5}" font-size="10" {TEXT}>'
                f"{escape(note)}</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


def _write_png(path: Path, title: str, series: tuple[str, ...], groups: list[Group], limit: float) -> None:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]  (optional)

    thickness = 0.8 / len(series)
    figure = Figure(figsize=(11, 1.4 + 0.17 * (len(series) + 0.6) * len(groups)))
    axes = figure.subplots()
    for place, name in enumerate(series):
        kept = [(i, group) for i, group in enumerate(groups) if group.values[place] is not None]
        spots = [i + place * thickness for i, _ in kept]
        lengths = [min(group.values[place] or 0.0, limit) for _, group in kept]
        axes.barh(spots, lengths, thickness * 0.9, label=name, color=COLORS[place % len(COLORS)])
        for spot, length, (_, group) in zip(spots, lengths, kept, strict=True):
            axes.text(length + 0.005 * limit, spot, group.notes[place], va="center", fontsize=7)
    axes.set_yticks(
        [i + 0.4 - thickness / 2 for i in range(len(groups))], [g.label for g in groups], fontsize=8
    )
    axes.set_xlim(0, limit * 1.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130, bbox_inches="tight")
