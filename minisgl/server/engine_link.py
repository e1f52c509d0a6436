"""The engine's process as the server sees it: started, heard, watched, ended.

Promise: `died` resolves soon after the engine ends, gives up or falls silent, whatever the reason;
nothing here waits without a limit, and `kill` leaves no process of the engine's group behind.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from minisgl.errors import ConfigError, EngineDeadError
from minisgl.messages import Fatal, Ping, Ready, Shutdown, StartupStage, Status, StepOutput, ToEngine
from minisgl.transport import ServerSocket

log = logging.getLogger(__name__)
T = TypeVar("T")

PING_INTERVAL_S = 1.0
LAST_MESSAGES_S = 0.3
"""How long messages of an engine that has ended are still taken from the socket."""
SHUTDOWN_S = 5.0
"""How long an engine may take to stop when asked, before it is killed."""


class EngineLink:
    """One engine process and the socket to it. Make, use and close it inside one event loop.

    Args:
        command: what to start; it reads one line of JSON from stdin and ends when stdin does.
        first_line: that line.

    Raises:
        ConfigError: the command can't be started.
    """

    def __init__(self, command: Sequence[str], first_line: bytes, ipc_dir: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.died: asyncio.Future[str] = self._loop.create_future()
        self.exited = asyncio.Event()
        self.status: Status | None = None
        self._heard_at = time.monotonic()
        self._ping_sequence = 0
        self._socket = ServerSocket(ipc_dir)
        try:
            # A session of its own: Ctrl-C in the terminal is for the server, which drains first.
            self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"the engine can't be started: {command[0]}: {error}") from None
        assert self._process.stdin is not None  # opened as a pipe
        self._stdin = self._process.stdin
        threading.Thread(target=self._wait_for_exit, name="engine-exit", daemon=True).start()
        # Ends early: `died` tells. The pipe stays open, its end is how the engine learns of ours.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(first_line + b"\n")
            self._stdin.flush()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    @property
    def silent_s(self) -> float:
        """Seconds since the last `StepOutput`, `Status` or other message."""
        return time.monotonic() - self._heard_at

    def send(self, message: ToEngine) -> None:
        """Hand a message over without waiting.

        Raises:
            EngineDeadError: there is no engine to take it.
        """
        self._socket.send(message)

    def listen(
        self, on_output: Callable[[StepOutput], None], on_stage: Callable[[StartupStage], None]
    ) -> None:
        """From now on take the engine's messages: each step's outputs and each stage of the start-up."""
        self._tasks.append(self._loop.create_task(self._listen(on_output, on_stage)))

    def watch(self, timeout_s: float) -> None:
        """From now on the engine must be heard at least every `timeout_s`; otherwise it is killed."""
        self._tasks.append(self._loop.create_task(self._heartbeat(timeout_s)))

    def kill(self) -> None:
        """End the engine and its children now."""
        if self._process.returncode is None:  # not reaped: the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask the engine to end; after `SHUTDOWN_S` end it."""
        with contextlib.suppress(EngineDeadError):
            self.send(Shutdown())
        if not await self._exits_within(SHUTDOWN_S):
            log.warning("the engine did not stop within %g s and is killed", SHUTDOWN_S)
            self.kill()
            await self._exits_within(SHUTDOWN_S)

    async def close(self) -> None:
        """Kill what still runs, close socket and pipe."""
        for task in self._tasks:
            task.cancel()
        self.kill()
        await self._exits_within(SHUTDOWN_S)
        self._socket.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    async def _exits_within(self, seconds: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.exited.wait(), seconds)
        return self.exited.is_set()

    def _declare_dead(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)

    async def _listen(
        self, on_output: Callable[[StepOutput], None], on_stage: Callable[[StartupStage], None]
    ) -> None:
        try:
            while True:
                message = await self._socket.receive()
                self._heard_at = time.monotonic()
                if isinstance(message, StepOutput):
                    _call(on_output, message)
                elif isinstance(message, Status):
                    self.status = message
                elif isinstance(message, StartupStage):
                    _call(on_stage, message)
                elif isinstance(message, Ready):
                    if not self.ready.done():
                        self.ready.set_result(message)
                elif isinstance(message, Fatal):
                    self._declare_dead(message.message)
                await asyncio.sleep(0)  # an engine that talks without pause must not keep others waiting
        except Exception as error:
            log.exception("the engine's messages can't be read")
            self._declare_dead(f"its messages can't be read: {error}")
            self.kill()

    async def _heartbeat(self, timeout_s: float) -> None:
        """Counts its own turns, not the clock: a machine that slept must not look like a dead engine."""
        interval_s = min(PING_INTERVAL_S, timeout_s / 4)
        silent_turns = 0
        heard_at = self._heard_at
        while not self.died.done():
            self._ping_sequence += 1
            with contextlib.suppress(EngineDeadError):
                self.send(Ping(self._ping_sequence))
            await asyncio.sleep(interval_s)
            silent_turns = 0 if self._heard_at != heard_at else silent_turns + 1
            heard_at = self._heard_at
            if silent_turns * interval_s >= timeout_s:
                self._declare_dead(f"it neither stepped nor answered for {timeout_s:g} s")
                self.kill()

    def _wait_for_exit(self) -> None:
        """In a thread of its own, because waiting for a process must not depend on its pipes."""
        pid = self._process.pid
        # The zombie keeps the group's number taken, so the signal can only reach the engine's own children.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._after_exit, code)

    def _after_exit(self, code: int) -> None:
        self.exited.set()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        # What it said last may still be on its way: outputs of its last step, a Fatal.
        self._loop.call_later(LAST_MESSAGES_S, self._declare_dead, f"its process ended ({how})")


def _call(callback: Callable[[T], None], message: T) -> None:
    """A defect in what listens is no defect of the engine."""
    try:
        callback(message)
    except Exception:
        log.exception("a message of the engine was not taken in")
