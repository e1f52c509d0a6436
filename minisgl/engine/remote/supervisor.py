"""`minisgl engine --server -`: a supervisor (`minisgl/ray/`) says on stdin where the server is.

Each line of stdin is JSON, `{"server": "tcp://host:port", "secret": "..."}`. The last line counts: the engine
leaves its server when a line names another one. Each line of stdout is JSON, a `Pulse`.

Promise: an engine in service writes a line at least once in `2 * PULSE_S` unless it hangs. The process ends
when stdin does.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from minisgl.ipc.server_line import ServerDoor

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine.engine import Engine

log = logging.getLogger(__name__)

PULSE_S = 1.0


class ServerAddress(msgspec.Struct, frozen=True):
    """Where the server is, and its secret."""

    server: str
    secret: str


class Pulse(msgspec.Struct, frozen=True):
    """How busy a connected engine is."""

    in_service: bool
    """Whether the engine is connected and its model is loaded. If not, the other fields are 0."""
    running: int = 0
    waiting: int = 0
    """Requests."""
    rows: int = 0
    """Most requests that run together."""
    held_pages: int = 0
    pages: int = 0
    """All KV pages; requests hold `held_pages` of them."""


class Supervisor:
    """Reads stdin and writes stdout. Call `follow` once."""

    def __init__(self) -> None:
        self._next_pulse_s = 0.0  # time.monotonic
        self._lines = _lines_of_stdin()

    def first_address(self) -> ServerAddress:
        """The first line of stdin; waits for it. Ends the process if there is none."""
        for line in self._lines:
            return msgspec.json.decode(line, type=ServerAddress)
        sys.exit(1)

    def follow(self, door: ServerDoor) -> None:
        """Point `door` to each further server that stdin names; end the process when stdin ends."""
        threading.Thread(target=self._read, args=(door,), name="supervisor", daemon=True).start()

    def note_service(self, engine: "Engine") -> None:
        """The engine is in service. Call it at each turn of its loop."""
        now_s = time.monotonic()
        if now_s >= self._next_pulse_s:
            self._next_pulse_s = now_s + PULSE_S
            status = engine.status(0)
            rows = engine.config.max_running_requests
            counts = status.num_running, status.num_waiting, rows, status.num_held_pages, engine.num_pages
            _write(Pulse(True, *counts))

    def note_pause(self) -> None:
        """The engine has no server."""
        self._next_pulse_s = 0.0
        _write(Pulse(False))

    def _read(self, door: ServerDoor) -> None:
        for line in self._lines:
            try:
                address = msgspec.json.decode(line, type=ServerAddress)
            except msgspec.DecodeError as error:
                log.error("a line on stdin names no server: %s", error)
                continue
            door.move(address.server, address.secret)
        os._exit(1)


def _lines_of_stdin() -> Iterator[bytes]:
    # A thread that reads sys.stdin would hold its lock, without which the interpreter can't exit.
    rest = b""
    while data := os.read(0, 1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _write(pulse: Pulse) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(pulse) + b"\n")
    sys.stdout.buffer.flush()
