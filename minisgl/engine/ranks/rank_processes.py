"""The processes of the ranks above 0 on this host.

Promise: the end of each process is reported once, from a thread. After `close`, none is left.
"""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable

from minisgl.ipc.child_process import module_command

FOLLOWER = tuple(module_command("minisgl.engine.ranks.follower"))


class RankProcesses:
    """Starts, watches and ends the processes.

    Args:
        on_end: called with the rank, the exit code, and a description of how it ended.
    """

    def __init__(self, on_end: Callable[[int, int, str], None]) -> None:
        self._on_end = on_end
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of their start."""
        return [process.pid for process in self._processes]

    def start(self, rank: int, line: bytes) -> None:
        """Start a rank, which reads `line` from its stdin. The rank exits when its stdin closes."""
        process = subprocess.Popen(FOLLOWER, stdin=subprocess.PIPE)
        self._processes.append(process)
        threading.Thread(
            target=self._watch, args=(rank, process), name=f"rank-{rank}-exit", daemon=True
        ).start()
        assert process.stdin is not None  # opened as a pipe
        with contextlib.suppress(BrokenPipeError):  # `on_end` reports it
            process.stdin.write(line + b"\n")
            process.stdin.flush()

    def kill(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def close(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the processes to end, then kill the rest. It may be called twice."""
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
