"""Progress reports of long work with a known size.

Promise: a progress function never raises and writes at most about ten times a second.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""Called as `progress(stage, done, total)`; `total` 0 = unknown; a stage ends with done == total."""

BAR_WIDTH = 28
REDRAW_S = 0.1
BYTES_FROM = 1 << 20
"""A total of at least this much counts bytes, and the bar shows a rate; else it counts files or tensors."""


def no_progress(stage: str, done: int, total: int) -> None:
    """A `Progress` that reports nothing."""


def progress_on(stream: TextIO | None = None) -> Progress:
    """A `Progress` that draws a bar on a terminal, and elsewhere writes one line when a stage begins.

    `stream` None = stderr.
    """
    out = stream if stream is not None else sys.stderr
    return _bar(out) if out.isatty() else _lines(out)


def shown_progress(logger: logging.Logger) -> Progress:
    """A `Progress` for work counted in bytes: a bar where stderr is a terminal, else lines in the log."""
    return _bar(sys.stderr) if sys.stderr.isatty() else logged_progress(logger)


def logged_progress(logger: logging.Logger, every_s: float = 5.0) -> Progress:
    """A `Progress` for work counted in bytes: logs share and GB/s every `every_s` seconds."""
    began = said = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < every_s or done >= total:
            return
        said = now
        logger.info("%s: %d %%, %.2f GB/s", stage, 100 * done // total, 1e-9 * done / (now - began))

    return report


def _lines(out: TextIO) -> Progress:
    current = ""

    def report(stage: str, done: int, total: int) -> None:
        nonlocal current
        if stage != current:
            current = stage
            _write(out, f"{stage} ...\n")

    return report


def _bar(out: TextIO) -> Progress:
    current = ""
    began = drawn_at = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal current, began, drawn_at
        now = time.monotonic()
        ended = total > 0 and done >= total
        if stage == current and not ended and now - drawn_at < REDRAW_S:
            return
        if stage != current:
            if current:
                _write(out, "\n")
            current, began = stage, now
        drawn_at = now
        filled = BAR_WIDTH * min(done, total) // total if total else 0
        share = f"{100 * min(done, total) // total:3d} %" if total else "  ..."
        rate = f"{1e-9 * done / (now - began):6.2f} GB/s" if total >= BYTES_FROM and now > began else ""
        _write(out, f"\r{stage:<34} |{'#' * filled:<{BAR_WIDTH}}| {share} {rate:<11}")
        if ended:
            _write(out, "\n")
            current = ""

    return report


def _write(out: TextIO, text: str) -> None:
    try:
        out.write(text)
        out.flush()
    except (OSError, ValueError):  # a closed terminal must not stop the work
        pass
