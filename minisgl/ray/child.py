"""A child process of a replica: the server of the ingress, or an engine.

Promise: the child does not outlive this process, because its stdin closes then. Its stderr goes to ours, and
the last lines are kept to say why it ended.
"""

import asyncio
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

KEPT_LINES = 20
"""Lines of stderr that are kept for `why_ended`."""
EXIT_POLL_S = 0.1
"""How often `stop` checks whether the process has ended."""


class Child:
    """Starts at once.

    Args:
        command: its command line.
        on_line: called in a thread with each line of its stdout.

    Raises:
        OSError: the command can't be started.
    """

    def __init__(self, command: Sequence[str], on_line: Callable[[str], None]) -> None:
        self._last_errors: deque[str] = deque(maxlen=KEPT_LINES)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, on_line), daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, self._keep_error), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def why_ended(self) -> str:
        """The signal that ended it, or its exit code and last error, for people. Waits for the end."""
        code = self._process.wait()
        if code < 0:
            return f"signal {-code} has ended it"
        for reader in self._readers:
            reader.join(1.0)
        errors = [line for line in self._last_errors if line.startswith("minisgl: error:")]
        last = errors[-1:] or list(self._last_errors)[-1:]
        return f"it ended with exit code {code}: {last[0] if last else 'it said nothing'}"

    def tell(self, content: Any) -> None:
        """Write one line of JSON to its stdin. Nothing happens if it has ended."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(msgspec.json.encode(content).decode() + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # ValueError: closed here
            pass

    async def stop(self, limit_s: float) -> None:
        """Send SIGTERM, and kill it if it has not ended after `limit_s` seconds."""
        self._process.terminate()
        deadline = time.monotonic() + limit_s
        while self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(EXIT_POLL_S)
        self.kill()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()

    def _read(self, pipe: Any, take: Callable[[str], None]) -> None:
        for line in pipe:
            take(line.rstrip("\n"))

    def _keep_error(self, line: str) -> None:
        self._last_errors.append(line)
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
