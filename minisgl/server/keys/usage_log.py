"""The usage log: a line of JSON for every call that the engine got, for accounting.

Promise: a line is written whole and once. A log that can't be written never stops a call; the server's log
says so once, and how many lines were lost when it works again.
"""

import logging
import os
from pathlib import Path

import msgspec

from minisgl.errors import ConfigError

log = logging.getLogger(__name__)


class UsageLog:
    """An open usage log.

    Raises:
        ConfigError: the file can't be opened.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.expanduser()
        self._num_lost = 0
        self._is_torn = False  # the last write left a part of a line
        try:
            self._fd = self._open()
        except OSError as error:
            raise ConfigError(f"--usage-log {file} can't be written: {error.strerror}") from None

    def write(self, line: dict[str, object]) -> None:
        """Append a line."""
        data = (b"\n" if self._is_torn else b"") + msgspec.json.encode(line) + b"\n"
        try:
            # One call: lines of several processes do not mix, and a reader sees no half of one.
            written = os.write(self._fd, data)
            self._is_torn = 0 < written < len(data) or (self._is_torn and not written)
            if written < len(data):
                raise OSError("the disk took only a part of a line")
        except OSError as error:
            if not self._num_lost:
                log.error("usage can't be written to %s, and its lines are lost: %s", self._file, error)
            self._num_lost += 1
            return
        if self._num_lost:
            log.warning("usage is written to %s again; %d lines were lost", self._file, self._num_lost)
            self._num_lost = 0

    def reopen(self) -> None:
        """Open the file by its name again, because it may have been renamed; if that fails, keep the old."""
        try:
            fd = self._open()
        except OSError as error:
            log.error("--usage-log %s can't be opened again: %s", self._file, error)
            return
        os.close(self._fd)
        self._fd = fd

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
