"""The processes of further ranks on this host.

Promise: each end is told of once, from a thread; after `close` none is left.
"""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable

FOLLOWER = ("-m", "minisgl.engine.follower")


class RankProcesses:
    """Starts them, watches them, ends them.

    Args:
        on_end: called with the rank, the exit code, and in words how it ended.
    """

    def __init__(self, on_end: Callable[[int, int, str], None]) -> None:
        self._on_end = on_end
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of their start."""
        return [process.pid for process in self._processes]

    def start(self, rank: int, line: bytes) -> None:
        """Start a rank, which reads `line` from its stdin; that stays open, its end is the sign of ours."""
        process = subprocess.Popen([sys.executable, *FOLLOWER], stdin=subprocess.PIPE)
        self._processes.append(process)
        threading.Thread(
            target=self._watch, args=(rank, process), name=f"rank-{rank}-exit", daemon=True
        ).start()
        assert process.stdin is not None  # opened as a pipe
        with contextlib.suppress(BrokenPipeError):  # `on_end` tells
            process.stdin.write(line + b"\n")
            process.stdin.flush()

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def close(self, timeout_s: float) -> None:
        """Wait so long at most for those that were asked to end, and end the others. May be called twice."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
        self.kill()
        for process in self._processes:
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._on_end(rank, code, f"killed by signal {-code}" if code < 0 else f"exit code {code}")
