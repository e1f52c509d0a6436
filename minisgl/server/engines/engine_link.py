"""The engine as a server process sees it: started, heard, asked, watched, ended.

Promise: `died` resolves soon after the engine ends, gives up or falls silent, whatever the reason;
nothing here waits without a limit, and `EngineProcess.kill` leaves no process of the engine's group behind.
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
from minisgl.messages import (
    AskProfile,
    AskTimeline,
    CacheFlushed,
    DebugAnswer,
    Fatal,
    FlushCache,
    Ping,
    Ready,
    Shutdown,
    StartupStage,
    Status,
    StepOutput,
    ToEngine,
)
from minisgl.transport import ServerSocket

log = logging.getLogger(__name__)
T = TypeVar("T")
Answer = Status | CacheFlushed | DebugAnswer

PING_INTERVAL_S = 1.0
LAST_MESSAGES_S = 0.3
"""How long messages of an engine that has ended are still taken from the socket."""
SHUTDOWN_S = 5.0
"""How long an engine may take to stop when asked, before it is killed."""


class EngineLink:
    """One server process's socket to the engine. Make, use and close it inside one event loop.

    Args:
        rank: of this server process; several share one engine.
    """

    def __init__(self, ipc_dir: Path, rank: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.died: asyncio.Future[str] = self._loop.create_future()
        self.status: Status | None = None
        self._rank = rank
        self._heard_at = time.monotonic()
        self._sequence = 0
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._socket = ServerSocket(ipc_dir, rank)
        self._tasks: list[asyncio.Task[None]] = []

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

    async def ask_status(self, limit_s: float) -> Status | None:
        """The engine's figures as they are now; None when it does not answer within `limit_s`."""
        self._sequence += 1
        answer = await self._ask(self._sequence, Ping(self._sequence, self._rank), limit_s)
        return answer if isinstance(answer, Status) else None

    async def flush_cache(self, limit_s: float) -> int | None:
        """Have the prefix cache dropped; pages freed, or None when no answer came within `limit_s`."""
        self._sequence += 1
        answer = await self._ask(self._sequence, FlushCache(self._sequence, self._rank), limit_s)
        return answer.num_pages if isinstance(answer, CacheFlushed) else None

    async def ask_timeline(self, limit_s: float) -> DebugAnswer | None:
        """The last steps as a trace; None when it does not come within `limit_s`."""
        self._sequence += 1
        answer = await self._ask(self._sequence, AskTimeline(self._sequence, self._rank), limit_s)
        return answer if isinstance(answer, DebugAnswer) else None

    async def ask_profile(self, num_steps: int, limit_s: float) -> DebugAnswer | None:
        """Have the next steps profiled; None when no answer came within `limit_s`."""
        self._sequence += 1
        question = AskProfile(self._sequence, self._rank, num_steps)
        answer = await self._ask(self._sequence, question, limit_s)
        return answer if isinstance(answer, DebugAnswer) else None

    def listen(
        self, on_output: Callable[[StepOutput], None], on_stage: Callable[[StartupStage], None]
    ) -> None:
        """From now on take the engine's messages: each step's outputs and each stage of the start-up."""
        self._tasks.append(self._loop.create_task(self._listen(on_output, on_stage)))

    def watch(self, timeout_s: float) -> None:
        """From now on the engine must be heard at least every `timeout_s`; otherwise it counts as dead."""
        self._tasks.append(self._loop.create_task(self._heartbeat(timeout_s)))

    def declare_dead(self, reason: str) -> None:
        """Resolve `died`; the first reason stays."""
        if not self.died.done():
            self.died.set_result(reason)

    def close(self) -> None:
        """Stop listening and close the socket."""
        for task in self._tasks:
            task.cancel()
        self._socket.close()

    async def _ask(self, sequence: int, question: ToEngine, limit_s: float) -> Answer | None:
        answer = self._asked[sequence] = self._loop.create_future()
        try:
            self.send(question)
            await asyncio.wait((answer,), timeout=limit_s)
            return answer.result() if answer.done() else None
        except EngineDeadError:
            return None
        finally:
            del self._asked[sequence]

    def _answered(self, message: Answer) -> None:
        waiting = self._asked.get(message.sequence)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

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
                    self._answered(message)
                elif isinstance(message, CacheFlushed | DebugAnswer):
                    self._answered(message)
                elif isinstance(message, StartupStage):
                    _call(on_stage, message)
                elif isinstance(message, Ready):
                    if not self.ready.done():
                        self.ready.set_result(message)
                elif isinstance(message, Fatal):
                    self.declare_dead(message.message)
                await asyncio.sleep(0)  # an engine that talks without pause must not keep others waiting
        except Exception as error:
            log.exception("the engine's messages can't be read")
            self.declare_dead(f"its messages can't be read: {error}")

    async def _heartbeat(self, timeout_s: float) -> None:
        """Counts its own turns, not the clock: a machine that slept must not look like a dead engine."""
        interval_s = min(PING_INTERVAL_S, timeout_s / 4)
        silent_turns = 0
        heard_at = self._heard_at
        while not self.died.done():
            self._sequence += 1
            with contextlib.suppress(EngineDeadError):
                self.send(Ping(self._sequence, self._rank))
            await asyncio.sleep(interval_s)
            silent_turns = 0 if self._heard_at != heard_at else silent_turns + 1
            heard_at = self._heard_at
            if silent_turns * interval_s >= timeout_s:
                self.declare_dead(f"it neither stepped nor answered for {timeout_s:g} s")


class EngineProcess:
    """The engine's process, started by one server process. Make, use and close it inside one event loop.

    Args:
        command: what to start; it reads one line of JSON from stdin and ends when stdin does.
        first_line: that line.
        link: hears when the process has ended; the process is killed when the link says that it is dead.

    Raises:
        ConfigError: the command can't be started.
    """

    def __init__(self, command: Sequence[str], first_line: bytes, link: EngineLink) -> None:
        self._loop = asyncio.get_running_loop()
        self._link = link
        self.exited = asyncio.Event()
        try:
            # A session of its own: Ctrl-C in the terminal is for the server, which drains first.
            self._process = subprocess.Popen(list(command), stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"the engine can't be started: {command[0]}: {error}") from None
        assert self._process.stdin is not None  # opened as a pipe
        self._stdin = self._process.stdin
        threading.Thread(target=self._wait_for_exit, name="engine-exit", daemon=True).start()
        link.died.add_done_callback(lambda _: self.kill())
        # Ends early: `died` tells. The pipe stays open, its end is how the engine learns of ours.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(first_line + b"\n")
            self._stdin.flush()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """End the engine and its children now."""
        if self._process.returncode is None:  # not reaped: the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask the engine to end; after `SHUTDOWN_S` end it."""
        with contextlib.suppress(EngineDeadError):
            self._link.send(Shutdown())
        if not await self._exits_within(SHUTDOWN_S):
            log.warning("the engine did not stop within %g s and is killed", SHUTDOWN_S)
            self.kill()
            await self._exits_within(SHUTDOWN_S)

    async def close(self) -> None:
        """Kill what still runs, close the pipe."""
        self.kill()
        await self._exits_within(SHUTDOWN_S)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    async def _exits_within(self, seconds: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.exited.wait(), seconds)
        return self.exited.is_set()

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
        self._loop.call_later(LAST_MESSAGES_S, self._link.declare_dead, f"its process ended ({how})")


def _call(callback: Callable[[T], None], message: T) -> None:
    """A defect in what listens is no defect of the engine."""
    try:
        callback(message)
    except Exception:
        log.exception("a message of the engine was not taken in")
