"""Progress as a bar on a terminal and as lines elsewhere."""

import io
import logging

import pytest

from minisgl.weights.progress import Progress, logged_progress, progress_on, shown_progress


class Terminal(io.StringIO):
    """Text that says it is shown on a terminal."""

    def isatty(self) -> bool:
        return True


def two_stages(report: Progress) -> None:
    for done in range(1001):
        report("fetching", done, 1000)
    report("converting", 0, 0)
    report("converting", 2, 2)


def test_elsewhere_each_stage_is_one_line() -> None:
    out = io.StringIO()
    two_stages(progress_on(out))
    assert out.getvalue() == "fetching ...\nconverting ...\n"


def test_a_terminal_gets_a_bar_that_ends_full_and_is_not_flooded() -> None:
    out = Terminal()
    two_stages(progress_on(out))
    lines = out.getvalue().split("\n")
    assert [line.split("\r")[-1].strip()[-5:] for line in lines] == ["100 %", "100 %", ""]
    assert out.getvalue().count("\r") < 100


def test_a_bar_shows_the_rate_of_what_is_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("minisgl.weights.progress.time.monotonic", lambda: now)
    out = Terminal()
    report = progress_on(out)
    for done in range(3):
        report("loading", done * 10**9, 2 * 10**9)
        now += 0.5
    assert [drawn.split("|")[-1].split() for drawn in out.getvalue().split("\r")[1:]] == [
        ["0", "%"],
        ["50", "%", "2.00", "GB/s"],
        ["100", "%", "2.00", "GB/s"],
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_load_is_a_bar_on_a_terminal_and_lines_in_the_log_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    caplog.set_level(logging.INFO)
    now = 100.0
    monkeypatch.setattr("minisgl.weights.progress.time.monotonic", lambda: now)
    report = shown_progress(logging.getLogger("test"))
    report("loading", 0, 10**9)
    now += 10
    report("loading", 10**8, 10**9)
    assert ("loading" in out.getvalue()) is is_terminal
    assert caplog.messages == ([] if is_terminal else ["loading: 10 %, 0.01 GB/s"])


def test_a_closed_stream_does_not_stop_the_work() -> None:
    out = io.StringIO()
    report = progress_on(out)
    out.close()
    two_stages(report)


def test_a_log_gets_share_and_rate_from_time_to_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("minisgl.weights.progress.time.monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    report = logged_progress(logging.getLogger("test"), every_s=5.0)
    for done in range(9):
        report("loading", done * 10**9, 8 * 10**9)
        now += 2.0
    assert caplog.messages == ["loading: 37 %, 0.50 GB/s", "loading: 75 %, 0.50 GB/s"]
