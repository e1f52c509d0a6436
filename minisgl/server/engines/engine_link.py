"""A server process's connection to one life of the engine: its sockets, its answers and its heartbeat.

Promise: `died` resolves soon after the engine exits, reports a fatal error or stops answering. Every wait
has a limit. No message of an earlier life arrives here.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from minisgl.errors import EngineDeadError
from minisgl.ipc.door_messages import FromEngine, Leaving
from minisgl.ipc.messages import Fatal, Ready, StartupStage, StepOutput, ToEngine
from minisgl.ipc.questions import (
    AskProfile,
    AskRequests,
    AskTimeline,
    CacheFlushed,
    DebugAnswer,
    FlushCache,
    Ping,
    Status,
)
from minisgl.lives import LivesAnswer

log = logging.getLogger(__name__)
T = TypeVar("T")
Answer = Status | CacheFlushed | DebugAnswer

PING_INTERVAL_S = 1.0


class LifeSocket(Protocol):
    """The server's end of the connection to one life of an engine, a child or one from elsewhere."""

    async def receive(self) -> FromEngine:
        """The next message; waits for one. Cancelling it loses nothing.

        Raises:
            EngineDeadError: the engine has gone.
        """
        ...

    def send(self, message: ToEngine) -> None:
        """Queue `message` without waiting.

        Raises:
            EngineDeadError: no engine is connected.
        """
        ...

    def close(self) -> None:
        """Close; may be called twice."""
        ...


class EngineLink:
    """One server process's connection to one life of the engine. Create, use and close it in one event loop.

    Args:
        socket: of this life; closed by `close`.
        rank: of this server process; several server processes may share one engine.
    """

    def __init__(self, socket: LifeSocket, rank: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.died: asyncio.Future[str] = self._loop.create_future()
        self.leaving: asyncio.Future[float] = self._loop.create_future()
        """The engine wants to go, at the latest after so many seconds (`door_messages.Leaving`)."""
        self.is_user_mistake = False
        """Whether the engine ended before it was ready because settings or model are unusable; see `died`."""
        self.is_device_fault = False
        """Whether the engine ended because of a GPU fault; known when `died` is."""
        self.status: Status | None = None
        self.stages: list[StartupStage] = []
        """The stages of the start that are over."""
        self._rank = rank
        self._heard_at = time.monotonic()
        self._sequence = 0
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._socket = socket
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_up(self) -> bool:
        """Whether the engine is ready and has not died."""
        return self.ready.done() and not self.died.done()

    @property
    def silent_s(self) -> float:
        """Seconds since the engine's last message of any kind."""
        return time.monotonic() - self._heard_at

    def send(self, message: ToEngine) -> None:
        """Send a message without waiting.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self._socket.send(message)

    async def ask_status(self, limit_s: float) -> Status | None:
        """The engine's current status; None if it does not answer within `limit_s`."""
        self._sequence += 1
        answer = await self._ask(self._sequence, Ping(self._sequence, self._rank), limit_s)
        return answer if isinstance(answer, Status) else None

    async def flush_cache(self, limit_s: float) -> int | None:
        """Drop the prefix cache; returns the pages freed, or None without an answer within `limit_s`."""
        self._sequence += 1
        answer = await self._ask(self._sequence, FlushCache(self._sequence, self._rank), limit_s)
        return answer.num_pages if isinstance(answer, CacheFlushed) else None

    async def ask_timeline(self, limit_s: float) -> DebugAnswer | None:
        """The last steps in Chrome's trace format; None without an answer within `limit_s`."""
        self._sequence += 1
        answer = await self._ask(self._sequence, AskTimeline(self._sequence, self._rank), limit_s)
        return answer if isinstance(answer, DebugAnswer) else None

    async def ask_profile(self, num_steps: int, limit_s: float) -> DebugAnswer | None:
        """Profile the next `num_steps` steps; None without an answer within `limit_s`."""
        self._sequence += 1
        question = AskProfile(self._sequence, self._rank, num_steps)
        answer = await self._ask(self._sequence, question, limit_s)
        return answer if isinstance(answer, DebugAnswer) else None

    async def ask_requests(self, which: AskRequests, limit_s: float) -> LivesAnswer | None:
        """The requests that `which` asks for; None without an answer within `limit_s`."""
        self._sequence += 1
        question = msgspec.structs.replace(which, sequence=self._sequence, server=self._rank)
        answer = await self._ask(self._sequence, question, limit_s)
        if not isinstance(answer, DebugAnswer):
            return None
        return msgspec.msgpack.decode(answer.body, type=LivesAnswer)

    def listen(
        self, on_output: Callable[[StepOutput], None], on_stage: Callable[[StartupStage], None]
    ) -> None:
        """Receive the engine's messages from now on; pass on step outputs and start-up stages."""
        self._tasks.append(self._loop.create_task(self._listen(on_output, on_stage)))

    def start_heartbeat(self, timeout_s: float) -> None:
        """Ping the engine from now on, and declare it dead after `timeout_s` without a message."""
        self._tasks.append(self._loop.create_task(self._heartbeat(timeout_s)))

    def declare_dead(self, reason: str) -> None:
        """Resolve `died` with `reason`, unless it already has one."""
        if not self.died.done():
            self.died.set_result(reason)

    def close(self) -> None:
        """Stop listening and close the socket."""
        for task in self._tasks:
            task.cancel()
        self._socket.close()

    async def _ask(self, sequence: int, question: ToEngine, limit_s: float) -> Answer | None:
        answer = self._pending[sequence] = self._loop.create_future()
        try:
            self.send(question)
            await asyncio.wait((answer,), timeout=limit_s)
            return answer.result() if answer.done() else None
        except EngineDeadError:
            return None
        finally:
            del self._pending[sequence]

    def _resolve_answer(self, message: Answer) -> None:
        waiting = self._pending.get(message.sequence)
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
                    self._resolve_answer(message)
                elif isinstance(message, CacheFlushed | DebugAnswer):
                    self._resolve_answer(message)
                elif isinstance(message, StartupStage):
                    self.stages.append(message)
                    _call(on_stage, message)
                elif isinstance(message, Ready):
                    if not self.ready.done():
                        self.ready.set_result(message)
                elif isinstance(message, Leaving):
                    if not self.leaving.done():
                        self.leaving.set_result(message.limit_s)
                elif isinstance(message, Fatal):
                    self.is_user_mistake = message.is_user_error and not self.ready.done()
                    self.is_device_fault = message.is_device_fault
                    self.declare_dead(message.message)
                await asyncio.sleep(0)  # other tasks must run even if messages arrive without pause
        except EngineDeadError as error:
            self.declare_dead(str(error))
        except Exception as error:
            log.exception("the engine's messages can't be read")
            self.declare_dead(f"its messages can't be read: {error}")

    async def _heartbeat(self, timeout_s: float) -> None:
        """Counts its own turns instead of reading the clock, so that a machine's sleep does not count."""
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


def _call(callback: Callable[[T], None], message: T) -> None:
    """Call `callback` and log its exceptions: a defect of the callback must not count as the engine's."""
    try:
        callback(message)
    except Exception:
        log.exception("a message of the engine was not taken in")
