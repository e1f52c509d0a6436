"""Pictures: each kind is drawn with its data in it, to each format, and needs matplotlib only then."""

import importlib.util
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from minisgl.benchmark.reports import panels, plots
from minisgl.benchmark.reports.panels import Group, Span
from minisgl.benchmark.reports.plots import (
    check_chart_path,
    plot_report,
    write_chart,
    write_panels,
)
from minisgl.benchmark.reports.report import (
    BarsChart,
    CdfChart,
    HeatMapChart,
    LinesChart,
    Report,
    TimelineChart,
    make_report,
)
from minisgl.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> list[str]:
    """What is written in an SVG."""
    root = xml.etree.ElementTree.parse(path).getroot()
    return ["".join(one.itertext()).strip() for one in root.iter(f"{SVG}text")]


def a_report() -> Report:
    table = [
        {"batch": batch, "context": context, "ms": batch * context / 100, "fraction": 0.5, "at": 0.0}
        for batch in (1, 8)
        for context in (100, 200)
    ]
    return make_report(
        "step",
        arguments={},
        metrics={"best_fraction": 0.75},
        tables={"decode": table},
        samples={"step_ms": [3.0, 1.0, 2.0], "other_ms": []},
        charts=[
            CdfChart(title="A distribution", samples=("step_ms", "other_ms"), x_label="ms", log_x=True),
            LinesChart(
                title="Some lines",
                table="decode",
                x="batch",
                y=("ms",),
                by="context",
                x_label="batch",
                y_label="ms",
                log_x=True,
            ),
            HeatMapChart(
                title="A map",
                table="decode",
                row="batch",
                column="context",
                value="fraction",
                label="share",
                as_percent=True,
            ),
            BarsChart(title="Some bars", table="decode", label="batch", values=("ms",), x_label="ms"),
            TimelineChart(
                title="A timeline",
                table="decode",
                lane="batch",
                name="context",
                start="at",
                duration="ms",
                x_label="s",
            ),
        ],
        command="minisgl bench step <&>",
    )


def test_every_chart_of_a_report_is_drawn(tmp_path: Path) -> None:
    report = a_report()
    plot_report(tmp_path / "a.svg", report)
    written = texts(tmp_path / "a.svg")
    titles = {chart.title for chart in report.charts}
    assert titles <= set(written)
    assert "step_ms (n = 3)" in written
    assert "context 200" in written
    assert "50%" in written


def test_a_png_is_a_png_and_a_page_holds_pictures_and_figures(tmp_path: Path) -> None:
    plot_report(tmp_path / "a.png", a_report())
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plot_report(tmp_path / "a.html", a_report())
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1
    assert "<td>best_fraction</td>" in page
    assert "minisgl bench step &lt;&amp;&gt;" in page
    assert "<script" not in page
    assert "src=" not in page


def test_bars_end_at_the_limit_and_none_leaves_one_out(tmp_path: Path) -> None:
    groups = [Group("a < b", (0.5, None, 2.0), ("x", "", "z")), Group("c", (0.1, 0.2, 0.3), ("1", "2", "3"))]
    write_chart(tmp_path / "a.svg", "title & more", ("p", "q", "r"), groups, 1.0)
    written = texts(tmp_path / "a.svg")
    assert {"title & more", "a < b", "100%", "x", "z", "1", "2", "3"} <= set(written)
    widths = bar_widths(panels.bars("", ("p", "q", "r"), groups, limit=1.0))
    assert sorted(widths) == pytest.approx([0.1, 0.2, 0.3, 0.5, 1.0])


def bar_widths(panel: panels.Panel) -> list[float]:
    from matplotlib.figure import Figure

    axes: Any = Figure().subplots()
    panel.draw(axes)
    return [patch.get_width() for patch in axes.patches]


def test_spans_have_their_lengths_and_a_cdf_ends_at_one() -> None:
    spans = [
        Span("cold", "load", 0.0, 2.0),
        Span("cold", "compile", 2.0, 5.0),
        Span("warm", "load", 0.0, 1.0),
    ]
    assert sorted(bar_widths(panels.timeline("", spans, x_label="s"))) == [1.0, 2.0, 5.0]
    from matplotlib.figure import Figure

    axes: Any = Figure().subplots()
    panels.cdf("", {"x": [4.0, 1.0, 2.0, 3.0]}, x_label="").draw(axes)
    x, y = axes.lines[0].get_data()
    assert list(zip(x, y, strict=True)) == [(1, 0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_a_cdf_of_very_many_samples_is_thinned_and_keeps_its_end() -> None:
    from matplotlib.figure import Figure

    axes: Any = Figure().subplots()
    panels.cdf("", {"x": [float(value) for value in range(100_000)]}, x_label="").draw(axes)
    x, y = axes.lines[0].get_data()
    assert len(x) < 2100
    assert (x[-1], y[-1]) == (99_999, 1.0)
    assert all(abs(share - value / 100_000) < 1e-3 for value, share in zip(x[1:], y[1:], strict=True))


def test_no_data_is_no_crash(tmp_path: Path) -> None:
    empty = [
        panels.bars("b", ("p",), []),
        panels.cdf("c", {}, x_label=""),
        panels.lines("l", [], {}, x_label="", y_label=""),
        panels.heat_map("h", ["1"], ["1"], [[None]], label=""),
        panels.timeline("t", [], x_label=""),
    ]
    write_panels(tmp_path / "a.svg", empty)
    assert {"b", "c", "l", "h", "t"} <= set(texts(tmp_path / "a.svg"))


def test_a_name_with_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.html"):
        write_chart(tmp_path / "a.pdf", "", ("p",), [], 1.0)


def test_a_missing_matplotlib_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'minisgl\[plot\]'"):
        check_chart_path(Path("a.svg"))
    monkeypatch.undo()
    assert importlib.util.find_spec("matplotlib") is not None


def test_a_report_without_charts_says_so(tmp_path: Path) -> None:
    report = make_report("kernel", arguments={}, metrics={})
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot_report(tmp_path / "a.svg", report)


def test_a_log_scale_below_one_has_plain_numbers_beside_the_powers_of_ten() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes: Any = figure.subplots()
    points = {"a": [0.3, 2.0]}
    panels.lines("", [1.0, 8.0], points, x_label="", y_label="", log_x=True, log_y=True).draw(axes)
    figure.canvas.draw()
    labels = [text.get_text() for text in axes.get_yticklabels(minor=True) if text.get_text()]
    assert {"0.3", "0.6", "2"} <= set(labels)
    assert not any("e" in label for label in labels)
