"""Reads what the parent says on stdin, and ends this process when the parent has ended, for any reason."""

import os
import queue
import shutil
import threading

import msgspec


class _Places(msgspec.Struct):
    """The directories that a line names."""

    ipc_dir: str | None = None
    private_dir: str = ""


class ParentWatch:
    """Reads the lines of stdin, a pipe that stays open while the parent lives. Its end ends this process.

    If the last line has an `ipc_dir`, that is removed then, or its `private_dir`, because a killed parent
    can't. A line that came before the end always counts, whatever this process is doing.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="parent-watch", daemon=True).start()

    def next_line(self) -> bytes:
        """Wait for the next line, JSON. If none comes, the process ends with 1."""
        return self._lines.get()

    def _read(self) -> None:
        folder, rest = None, b""
        while data := _read_stdin():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._lines.put(line)
                places = msgspec.json.decode(line, type=_Places)
                folder = places.ipc_dir and (places.private_dir or places.ipc_dir)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _read_stdin() -> bytes:
    """The next bytes; empty at the end. A thread that waits in sys.stdin would hold its lock at exit."""
    try:
        return os.read(0, 1 << 16)
    except OSError:  # closed, so nobody can write to it
        return b""
