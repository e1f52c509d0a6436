"""The engine's process, as the server process that starts it sees it.

Promise: `kill` leaves no process of the engine's process group behind. Every wait has a limit.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Sequence

from minisgl.errors import DEVICE_FAULT_EXIT_CODE, ConfigError, EngineDeadError
from minisgl.ipc.messages import Shutdown
from minisgl.server.engines.engine_link import EngineLink

log = logging.getLogger(__name__)

LAST_MESSAGES_S = 0.3
"""How long to read the socket after the engine's process has ended."""
SHUTDOWN_S = 5.0
"""An engine that was asked to stop is killed after this time."""


class EngineProcess:
    """The engine's process, a child of this server process. Create, use and close it in one event loop.

    Args:
        command: the command line. The process reads lines of JSON from stdin, and exits when stdin ends.

    Raises:
        ConfigError: the command can't be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._link: EngineLink | None = None
        self.exited = asyncio.Event()
        try:
            # Its own session, so that Ctrl-C in the terminal reaches only the server, which drains first.
            self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"the engine can't be started: {command[0]}: {error}") from None
        assert self._process.stdin is not None  # opened as a pipe
        self._stdin = self._process.stdin
        try:
            threading.Thread(target=self._wait_for_exit, name="engine-exit", daemon=True).start()
        except RuntimeError as error:  # the system allows no more threads
            self._process.kill()
            self._process.wait()
            self._stdin.close()
            raise ConfigError(f"the engine can't be watched: {error}") from None

    def begin(self, line: bytes, link: EngineLink) -> None:
        """Begin the life whose settings `line` has: JSON.

        Args:
            link: learns when the process has ended. The process is killed when `link.died` resolves.
        """
        assert not self.exited.is_set()  # then nobody would tell `link`
        self._link = link
        link.died.add_done_callback(lambda _: self.kill())
        self.tell(line)

    def tell(self, line: bytes) -> None:
        """Write a line to the process's stdin."""
        # If the engine has already ended, `died` resolves. The pipe stays open: its end tells the engine
        # that the server has ended.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(line + b"\n")
            self._stdin.flush()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the engine and its children."""
        if self._process.returncode is None:  # not reaped, so the pid is still the engine's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask the engine to exit; kill it after `SHUTDOWN_S`. Call `begin` before."""
        assert self._link is not None
        with contextlib.suppress(EngineDeadError):
            self._link.send(Shutdown())
        if not await self._exits_within(SHUTDOWN_S):
            log.warning("the engine did not stop within %g s and is killed", SHUTDOWN_S)
            self.kill()
            await self._exits_within(SHUTDOWN_S)

    async def close(self) -> None:
        """Kill the engine if it still runs, and close the pipe."""
        self.kill()
        await self._exits_within(SHUTDOWN_S)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    async def _exits_within(self, seconds: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.exited.wait(), seconds)
        return self.exited.is_set()

    def _wait_for_exit(self) -> None:
        """Wait for the process to end. Runs in a thread, so that it does not depend on the pipes."""
        pid = self._process.pid
        # The zombie still holds the process group's id, so the signal reaches only the engine's children.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for this
            self._loop.call_soon_threadsafe(self._after_exit, code)

    def _after_exit(self, code: int) -> None:
        self.exited.set()
        link = self._link
        if link is None:
            return  # it has had no life
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == DEVICE_FAULT_EXIT_CODE:  # it, or another rank, may not have been able to say more
            link.is_device_fault = True
            how += ", a GPU fault"
        # Its last messages (step outputs, a Fatal) may not have been read yet.
        self._loop.call_later(LAST_MESSAGES_S, link.declare_dead, f"its process ended ({how})")
