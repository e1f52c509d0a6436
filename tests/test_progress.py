"""Progress as bars on a terminal, whose screen an independent emulator keeps, and as lines elsewhere."""

import fcntl
import io
import logging
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator

import pyte
import pytest

from minisgl.progress import BYTES, Progress, ShownProgress, lines_on, logged_progress

LINES = 12


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal:
    """A pseudo-terminal: `stream` writes to it, and `rows` are what its screen then shows."""

    def __init__(self, columns: int = 80) -> None:
        self._screen = pyte.Screen(columns, LINES)
        self._emulator = pyte.ByteStream(self._screen)
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        self.stream = open(inner, "w", encoding="utf-8")  # noqa: SIM115
        self.num_bytes = 0

    def rows(self) -> list[str]:
        while select.select([self._fd], [], [], 0)[0]:
            data = os.read(self._fd, 65536)
            self.num_bytes += len(data)
            self._emulator.feed(data)
        return [row.rstrip() for row in self._screen.display if row.strip()]

    def row_of_the_cursor(self) -> str:
        self.rows()
        return self._screen.display[self._screen.cursor.y].rstrip()

    def close(self) -> None:
        self.stream.close()
        os.close(self._fd)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr("minisgl.progress.time.monotonic", one)
    return one


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    one = Terminal()
    yield one
    one.close()


def test_a_download_shows_bytes_rate_and_remaining_time(terminal: Terminal, clock: Clock) -> None:
    with ShownProgress(stream=terminal.stream) as progress:
        progress("fetching a model", 0, 300_000_000, BYTES)
        clock.now += 60  # until the first byte arrives; no part of the rate
        progress("fetching a model", 0, 300_000_000, BYTES)
        clock.now += 10
        progress("fetching a model", 100_000_000, 300_000_000, BYTES)
        (row,) = terminal.rows()
        name, *figures = [part.strip() for part in row.split("  ") if part.strip()]
        assert name.startswith("fetching a model")
        assert "━" in row
        assert figures[-3:][0].endswith("100/300 MB")
        assert figures[-2:] == ["10.0 MB/s", "0:20 left"]
        clock.now += 20
        progress("fetching a model", 300_000_000, 300_000_000, BYTES)
    (row,) = terminal.rows()
    assert row.endswith("300/300 MB  10.0 MB/s  in 1:30")
    assert terminal.row_of_the_cursor() == ""


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.5, "7/21 points  14.0/s  0:01 left"), (700.0, "7/21 points  100.0 s each  23:20 left")],
)
def test_what_is_counted_has_its_name_and_a_rate_that_can_be_read(
    terminal: Terminal, clock: Clock, seconds: float, expected: str
) -> None:
    with ShownProgress(stream=terminal.stream) as progress:
        progress("steps", 0, 21, "points")
        clock.now += seconds
        progress("steps", 7, 21, "points")
        assert terminal.rows()[-1].endswith(expected)


@pytest.mark.parametrize("columns", [30, 41, 60, 80, 200])
def test_a_bar_never_wraps_whatever_the_terminals_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal(columns)
    try:
        with ShownProgress(stream=terminal.stream) as progress:
            for done in range(0, 101, 5):
                progress(
                    "a stage with a name that is longer than most terminals are wide", done, 100, "shapes"
                )
                clock.now += 1
                assert len(terminal.rows()) == 1
        assert "100/100 shapes" in terminal.rows()[0]
    finally:
        terminal.close()


def test_each_stage_leaves_one_whole_line(terminal: Terminal) -> None:
    with ShownProgress(stream=terminal.stream) as progress:
        two_stages(progress)
    rows = terminal.rows()
    assert [row.split("  ")[0].strip() for row in rows] == ["fetching", "converting"]
    assert terminal.num_bytes < 10_000  # of 1000 reports


def test_a_line_can_be_printed_above_the_bar(terminal: Terminal, clock: Clock) -> None:
    with ShownProgress(stream=terminal.stream) as progress:
        for done in range(3):
            progress("tuning", done, 3, "shapes")
            clock.now += 1
            progress.clear()
            print(f"result {done}", file=terminal.stream, flush=True)
        progress("tuning", 3, 3, "shapes")
    rows = terminal.rows()
    assert rows[:3] == ["result 0", "result 1", "result 2"]
    assert [row.split("  ")[0].strip() for row in rows[3:]] == ["tuning"]


def test_work_that_fails_leaves_the_cursor_on_a_new_line(terminal: Terminal) -> None:
    def work() -> None:
        with ShownProgress(stream=terminal.stream) as progress:
            progress("fetching", 3, 9, "files")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(terminal.rows()) == 1
    assert terminal.row_of_the_cursor() == ""


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with ShownProgress(lines_on(terminal.stream), terminal.stream) as progress:
        two_stages(progress)
    assert terminal.rows() == ["fetching ...", "converting ..."]


def test_rich_is_loaded_only_where_a_bar_is_drawn() -> None:
    code = (
        "import io, sys; from minisgl.progress import ShownProgress, lines_on;"
        "out = io.StringIO(); ShownProgress(lines_on(out), out)('fetching', 1, 2, 'files');"
        "print(out.getvalue().strip(), 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fetching ... False"


def test_elsewhere_each_stage_is_one_line() -> None:
    out = io.StringIO()
    two_stages(lines_on(out))
    assert out.getvalue() == "fetching ...\nconverting ...\n"


def test_elsewhere_long_work_says_where_it_is_from_time_to_time(clock: Clock) -> None:
    out = io.StringIO()
    report = lines_on(out, every_s=10.0)
    for done in range(9):
        report("measuring", done, 8, "shapes")
        clock.now += 6
    assert out.getvalue().splitlines() == [
        "measuring ...",
        "measuring: 2/8 shapes, 6.0 s each, 0:36 left",
        "measuring: 4/8 shapes, 6.0 s each, 0:24 left",
        "measuring: 6/8 shapes, 6.0 s each, 0:12 left",
    ]


def test_a_closed_stream_does_not_stop_the_work() -> None:
    out = io.StringIO()
    out.close()
    with ShownProgress(lines_on(out), out) as progress:
        two_stages(progress)


def test_a_log_gets_share_and_rate_from_time_to_time(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    caplog.set_level(logging.INFO)
    report = logged_progress(logging.getLogger("test"), every_s=5.0)
    for done in range(9):
        report("loading", done * 10**9, 8 * 10**9, BYTES)
        clock.now += 2.0
    assert caplog.messages == [
        "loading: 3000/8000 MB, 500.0 MB/s, 0:10 left",
        "loading: 6000/8000 MB, 500.0 MB/s, 0:04 left",
    ]


def two_stages(report: Progress) -> None:
    for done in range(1001):
        report("fetching", done, 1000, "files")
    report("converting", 0, 0)
    report("converting", 2, 2)
