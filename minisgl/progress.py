"""Shows how far long work is: a bar with rate and remaining time on a terminal, lines elsewhere.

Promise: it never stops the work, draws at most five times a second (0.3 ms each), and leaves whole lines
behind, however the work ends. rich, which draws the bars, is imported with the first one.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console

REDRAW_S = 0.2
LINE_S = 10.0
BAR_WIDTH = 28
LEAST_BAR_WIDTH = 10
STAGE_WIDTH = 34
LEAST_COLUMNS = 20
TAIL_WIDTH = 38
"""Kept for the figures, so that a bar does not move as they grow."""
BYTES = "bytes"


class Progress(Protocol):
    """Called as work goes on.

    Args:
        stage: what is done now. Stages follow each other; one ends with `done == total`.
        done: units that are done.
        total: units in all; 0 = unknown.
        unit: what is counted, in the plural; "bytes" are shown as MB and GB. Empty = nothing to count.
    """

    def __call__(self, stage: str, done: int, total: int, unit: str = "", /) -> None: ...


def no_progress(stage: str, done: int, total: int, unit: str = "", /) -> None:
    """A `Progress` that reports nothing."""


def lines_on(stream: TextIO | None = None, every_s: float = LINE_S) -> Progress:
    """A `Progress` that writes a line when a stage begins, and where it is every `every_s` seconds.

    `stream` None = stderr.
    """
    return _lines(lambda line: _write(stream or sys.stderr, f"{line}\n"), every_s, says_begin=True)


def logged_progress(logger: logging.Logger, every_s: float = 5.0) -> Progress:
    """A `Progress` that logs where a stage is every `every_s` seconds; a quick stage logs nothing."""
    return _lines(lambda line: logger.info("%s", line), every_s, says_begin=False)


class ShownProgress:
    """A `Progress` that draws bars on a terminal. Use it in a `with` block, which ends an open bar's line.

    Args:
        elsewhere: is called instead where `stream` is no terminal, or one that can't move its cursor.
        stream: where to draw; None = stderr.
    """

    def __init__(self, elsewhere: Progress = no_progress, stream: TextIO | None = None) -> None:
        self._elsewhere = elsewhere
        self._out = sys.stderr if stream is None else stream
        self._is_terminal = _is_terminal(self._out)
        self._console: Console | None = None
        self._stage: _Stage | None = None
        self._drawn_at = 0.0
        self._on_screen = False

    def __enter__(self) -> "ShownProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()

    def __call__(self, stage: str, done: int, total: int, unit: str = "", /) -> None:
        """Draw the stage's bar, if the last drawing is old enough."""
        if self._is_terminal and self._console is None:
            self._console = _console(self._out)
            self._is_terminal = not self._console.is_dumb_terminal
        if not self._is_terminal or self._console is None:
            self._elsewhere(stage, done, total, unit)
            return
        now = time.monotonic()
        if self._stage is None or self._stage.name != stage:
            self._end_line()
            self._stage = _Stage(stage, done, now)
        elif now - self._drawn_at < REDRAW_S and not 0 < total <= done:
            return
        self._drawn_at = now
        figures = self._stage.figures(done, total, unit, now)
        self._on_screen = True
        drawn = _drawn(self._console, _columns(self._out), stage, done, total, figures)
        _write(self._out, f"\r{drawn}\x1b[K")
        if 0 < total <= done:
            self._end_line()
            self._stage = None

    def clear(self) -> None:
        """Erase the bar until the next report, so that a line can be printed in its place."""
        if self._on_screen:
            self._on_screen = False
            self._drawn_at = 0.0
            _write(self._out, "\r\x1b[K")

    def _end_line(self) -> None:
        if self._on_screen:
            self._on_screen = False
            _write(self._out, "\n")


class _Stage:
    """The rate of a stage, counted from the moment when its first unit was begun."""

    def __init__(self, name: str, done: int, now: float) -> None:
        self.name = name
        self._first = done
        self._began = self._moved = now

    def figures(self, done: int, total: int, unit: str, now: float) -> list[str]:
        """What is done, at which rate, and the time that is left, or that it took; without those unknown."""
        if done == self._first:
            self._moved = now  # a download's connection, for example, is no part of its rate
        passed, num = now - self._moved, done - self._first
        rate = num / passed if passed > 0 else 0.0
        found: list[str] = []
        if unit == BYTES:
            found.append(f"{done / 1e6:.0f}/{total / 1e6:.0f} MB" if total else _bytes(done))
        elif unit:
            found.append(f"{done}/{total} {unit}" if total else f"{done} {unit}")
        if unit and rate:
            slow = f"{1 / rate:.1f} s each"
            found.append(f"{_bytes(rate)}/s" if unit == BYTES else f"{rate:.1f}/s" if rate >= 1 else slow)
        if 0 < total <= done:
            if now - self._began >= 1:
                found.append(f"in {_duration(now - self._began)}")
        elif total and rate:
            found.append(f"{_duration((total - done) / rate)} left")
        return found


def _lines(say: Callable[[str], None], every_s: float, *, says_begin: bool) -> Progress:
    stage: _Stage | None = None
    said_at = 0.0

    def report(name: str, done: int, total: int, unit: str = "", /) -> None:
        nonlocal stage, said_at
        now = time.monotonic()
        if stage is None or stage.name != name:
            stage, said_at = _Stage(name, done, now), now
            if says_begin:
                say(f"{name} ...")
        figures = stage.figures(done, total, unit, now)
        if figures and now - said_at >= every_s and not 0 < total <= done:
            said_at = now
            say(f"{name}: {', '.join(figures)}")

    return report


def _console(out: TextIO) -> "Console":
    from rich.console import Console  # lazy: most commands draw nothing

    return Console(file=out, highlight=False)


def _drawn(console: "Console", columns: int, stage: str, done: int, total: int, figures: list[str]) -> str:
    """One line, a column shorter than the terminal, with its escape codes."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    width = columns - 1
    while len(figures) > 1 and len("  ".join(figures)) > 0.6 * width:  # a narrow terminal shows the first
        figures = figures[:-1]
    tail = "  ".join(figures)
    room = width - max(len(tail), min(TAIL_WIDTH, width // 2)) - 2
    stage_width = max(8, min(STAGE_WIDTH, room - LEAST_BAR_WIDTH))
    bar_width = min(BAR_WIDTH, room - stage_width)
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_column(width=stage_width, no_wrap=True, overflow="ellipsis")
    parts: list[Text | ProgressBar] = [Text(stage)]
    if bar_width >= LEAST_BAR_WIDTH:
        line.add_column(width=bar_width)
        parts.append(ProgressBar(total=total or None, completed=done, width=bar_width))
    line.add_column(no_wrap=True)
    line.add_row(*parts, Text(tail, "bright_black"))
    with console.capture() as text:
        console.print(line, width=width)
    return text.get().rstrip()


def _bytes(num: float) -> str:
    return f"{num / 1e9:.2f} GB" if num >= 1e9 else f"{num / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _columns(out: TextIO) -> int:
    try:
        return max(os.get_terminal_size(out.fileno()).columns, LEAST_COLUMNS)
    except (OSError, ValueError):
        return 80


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False


def _write(out: TextIO, text: str) -> None:
    try:
        out.write(text)
        out.flush()
    except (OSError, ValueError):  # a closed terminal must not stop the work
        pass
