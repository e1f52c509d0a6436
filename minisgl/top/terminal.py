"""A terminal in raw mode: keys as they are pressed, one at a time.

Promise: the terminal is as before after the `with` block, however it ends.
"""

import os
import select
import sys
import termios
import threading
import tty
from types import TracebackType
from typing import TextIO

KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[5~": "page-up", b"\x1b[6~": "page-down",
    b"\r": "enter", b"\n": "enter", b"\x03": "ctrl-c", b"\x1b": "escape",
}  # fmt: skip


class Keyboard:
    """Reads keys of a terminal. `wake`, from any thread, ends a wait for keys."""

    def __init__(self, terminal: TextIO) -> None:
        self._fd = terminal.fileno()
        self._before: list[object] | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> "Keyboard":
        self._before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)  # pyright: ignore[reportArgumentType]
        with self._lock:
            self._is_closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)

    def wake(self) -> None:
        """End the `wait`."""
        with self._lock:
            if not self._is_closed:
                os.write(self._wake_write, b"!")

    def wait(self) -> list[str]:
        """Wait for keys or `wake`, and return the keys: their names, or the characters."""
        ready, _, _ = select.select([self._fd, self._wake_read], [], [])
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        if self._fd not in ready:
            return []
        data = os.read(self._fd, 1024)
        if not data:  # the terminal is gone
            return ["q"]
        return parse_keys(data)


def parse_keys(data: bytes) -> list[str]:
    """The keys of what a terminal sent at once."""
    found: list[str] = []
    while data:
        name = next((one for one in sorted(KEYS, key=len, reverse=True) if data.startswith(one)), None)
        if name is not None:
            found.append(KEYS[name])
            data = data[len(name) :]
        else:
            character = data.decode("utf-8", "replace")[0]
            found.append(character)
            data = data[max(1, len(character.encode()) if character != "\ufffd" else 1) :]
    return found


def is_terminal() -> bool:
    """Whether both the input and the output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()
