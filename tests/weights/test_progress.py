"""Progress as a bar on a terminal and as lines elsewhere."""

import io
import logging

import pytest

from minisgl.weights.progress import Progress, logged_progress, progress_on


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
    assert [line.split("\r")[-1][-5:] for line in lines] == ["100 %", "100 %", ""]
    assert out.getvalue().count("\r") < 100


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
