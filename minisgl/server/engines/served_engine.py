"""One engine as a server process sees it, through all of its lives.

Each life has a generation, counted from 1, and sockets of its own. A request that is added between two lives
is sent when the next one is ready.

Promise: each life gets every request that was added and has not ended, behind the output that its reader has
got. Nothing of a life that has ended reaches the server or the next life.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from minisgl.errors import EngineDeadError
from minisgl.ipc.messages import AbortRequest, AddRequest, Ready, StartupStage, StepOutput, ToEngine
from minisgl.request import FinishReason, RequestOutput
from minisgl.server.engines.ended_life import EndedLife
from minisgl.server.engines.engine_link import EngineLink, LifeSocket
from minisgl.server.engines.sent_requests import SentRequest, SentRequests

log = logging.getLogger(__name__)

WAIT_NOTE_S = 5.0
"""How often clients hear that their answer goes on, while the engine is started again."""
EMPTY_CHECK_S = 0.05
MAX_ENDED_LIVES = 20
RELOADED = "it was reloaded"
"""The reason that is noted when a reload replaces an engine."""


class Reader(NamedTuple):
    """The callbacks that read the engine's messages. They are called in the event loop."""

    on_output: Callable[[StepOutput], None]
    on_stage: Callable[[StartupStage], None]
    """A stage of the first life's start is over."""
    on_ready: Callable[[Ready], None]
    """Before the first request is sent to a life."""
    on_wait: Callable[[Iterable[int]], None]
    """Now and then while the engine is started again; gets the ids of the requests that wait for it."""


class ServedEngine:
    """Create, use and close it in one event loop.

    Args:
        number: of the engine, from 0.
        rank: of this server process.
        socket: of the first life.
        name: of the engine, for people.
        between_lives: what happens to the engine between two lives, for people.
        generation: of the first life.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        socket: LifeSocket,
        name: str = "the engine",
        between_lives: str = "is being started again",
        generation: int = 1,
    ) -> None:
        self.number = number
        self.name = name
        self._between_lives = between_lives
        self.has_failed = False
        """Whether it has ended and is not started again."""
        self.first_generation = generation
        self.generation = generation
        self.pid = 0
        """The process id of the current life, or of the last one; 0 = none yet."""
        self.link = EngineLink(socket, rank)
        """The connection to the current life, or to the one that ended last."""
        self.ended: list[EndedLife] = []
        """The lives that have ended, the oldest first; up to `MAX_ENDED_LIVES`."""
        self.rank = rank
        self._loop = asyncio.get_running_loop()
        self._requests = SentRequests()
        self._num_earlier_restarts = 0  # of the engines that it has replaced
        self._reader: Reader | None = None
        self._on_lost: Callable[[], None] | None = None
        self._moving: set[asyncio.Task[int]] = set()
        self._is_open = False  # requests are sent as they come
        self._is_lost = False  # the life has ended
        self._num_begun = 0  # lives behind the first one
        self._down_since_s = 0.0  # time.monotonic
        self._trial: _Trial | None = None
        self._notes: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the engine takes requests now."""
        return self._is_open and self.link.is_up

    @property
    def is_leaving(self) -> bool:
        """Whether the current life wants to end, and should get no new calls."""
        return self.link.leaving.done()

    @property
    def num_open(self) -> int:
        """Requests that it was given and that have not ended."""
        return len(self._requests)

    @property
    def is_restarting(self) -> bool:
        """Whether a life has ended, and the next one does not take all requests yet."""
        return bool(self.ended) and not self._is_open and not self.has_failed

    @property
    def last_ready(self) -> Ready | None:
        """What the current life said when it was ready; None = it is not yet."""
        ready = self.link.ready
        return ready.result() if ready.done() else None

    @property
    def num_restarts(self) -> int:
        """How often the engine, or one that it replaced, was started again."""
        return self._num_earlier_restarts + self._num_begun

    @property
    def num_suspects(self) -> int:
        """Requests that must be tried alone before the others are sent."""
        return len(self._requests.suspects())

    @property
    def restart_reason(self) -> str:
        """Why the engine is being started again, for people."""
        why = self.ended[-1].reason if self.ended else ""
        return f"{self.name} {self._between_lives} ({why})"

    def listen(self, reader: Reader, on_lost: Callable[[], None] | None = None) -> None:
        """Pass on the engine's messages from now on. `on_lost` is called when a life has ended."""
        self._reader, self._on_lost = reader, on_lost
        self.link.listen(self._take, reader.on_stage)

    def begin(self, generation: int, socket: LifeSocket) -> None:
        """Connect to the next life. Its process may start before or after."""
        assert generation > self.generation, f"life {generation} begins behind life {self.generation}"
        self.link.close()
        self.generation = generation
        self._num_begun += 1
        self._is_lost = False
        self.link = EngineLink(socket, self.rank)
        assert self._reader is not None, "nobody listens"
        self.link.listen(self._take, lambda _: None)

    def lose(self, reason: str, *, is_crash: bool = True) -> None:
        """The current life has ended. Requests wait for the next one; those that crash engines end."""
        if self._is_lost:
            return
        self.link.declare_dead(reason)
        self.link.close()
        self._is_lost, was_open, self._is_open = True, self._is_open, False
        if was_open or not self.ended:
            self._down_since_s = time.monotonic()
        life = EndedLife(generation=self.generation, pid=self.pid, ended_at=_now(), reason=reason)
        self.ended = [*self.ended[-MAX_ENDED_LIVES + 1 :], life]
        if self._trial is not None:
            self._trial.over.set()
        for request in self._requests.lose(self.generation, is_crash=is_crash):
            self._end_guilty(request, reason)
        if self._on_lost is not None:
            self._on_lost()
        if not self.has_failed:
            self._start_notes()

    def fail(self, reason: str) -> None:
        """The engine has ended and is not started again. Requests that no other engine takes end."""
        self.has_failed = True
        self.lose(reason)
        self._stop_notes()
        errors = [
            RequestOutput(
                request.request_id,
                [],
                FinishReason.ERROR,
                error_status=503,
                error_code="engine_dead",
                error_message=f"{self.name} died: {reason}",
            )
            for request in self._requests
        ]
        for error in errors:
            self._requests.forget(error.request_id)
        if errors and self._reader is not None:
            self._reader.on_output(StepOutput(errors))

    def give_up(self) -> list[SentRequest]:
        """After the end of a life: the requests that another engine may run, which this one forgets."""
        given = [request for request in self._requests if not request.is_suspect]
        for request in given:
            self._requests.forget(request.request_id)
        return given

    def hand_over(self) -> list[SentRequest]:
        """Another engine replaces this one: no more of its messages are passed on.

        Returns the open requests, which it forgets. None is a suspect any more, because the other engine may
        have other settings.
        """
        self._is_lost, self._is_open = True, False
        if self._trial is not None:
            self._trial.over.set()
        self._stop_notes()
        given = list(self._requests)
        for request in given:
            self._requests.forget(request.request_id)
            request.acquit()
        return given

    def succeed(self, earlier: "ServedEngine") -> None:
        """Take the place of another engine. Its lives are shown as lives of this one."""
        life = EndedLife(
            generation=earlier.generation,
            pid=earlier.pid,
            ended_at=_now(),
            reason=RELOADED,
            back_at=_now() if self.is_up else None,
        )
        self.ended = [*earlier.ended, life, *self.ended][-MAX_ENDED_LIVES:]
        self._num_earlier_restarts += earlier.num_restarts
        self._down_since_s = time.monotonic()
        if not self.is_up:
            self._start_notes()

    async def wait_until_empty(self) -> None:
        """Return when no request is open."""
        while len(self._requests):
            await asyncio.sleep(EMPTY_CHECK_S)

    def take_over(self, requests: Sequence[SentRequest], since_s: float) -> None:
        """Run requests that another engine has given up, behind their output.

        Args:
            since_s: when that engine ended (`time.monotonic`).
        """
        for request in requests:
            self._requests.adopt(request)
        if requests and self.is_up:  # else the next life gets them
            log.warning("%s goes on with %d requests of another", self.name, len(requests))
            task = self._loop.create_task(self._send_unsent(since_s))
            self._moving.add(task)
            task.add_done_callback(self._moving.discard)

    async def try_suspects(self) -> None:
        """Send each suspect alone, until it is past the place of the crash or has ended."""
        generation = self.generation
        for request in self._requests.suspects():
            if self._is_lost or self.generation != generation:
                return
            if request.request_id in self._requests:
                await self._try(request)

    async def resume(self) -> None:
        """Send all open requests that this life has not got, and from now on requests as they come."""
        if self._reader is not None:
            self._reader.on_ready(self.link.ready.result())
        generation, num_sent = self.generation, 0
        # More may be added while these are sent, so the loop goes on until none is left.
        while not self._is_open:
            num_sent += await self._send_unsent(self._down_since_s)
            if self._is_lost or self.generation != generation:
                return
            self._is_open = not any(one.sent_to != generation for one in self._requests)
        self._stop_notes()
        if self.ended and self.ended[-1].back_at is None:
            self.ended[-1] = msgspec.structs.replace(self.ended[-1], back_at=_now())
            down_s = time.monotonic() - self._down_since_s
            log.warning("%s is back after %.1f s; %d requests go on", self.name, down_s, num_sent)

    def send(self, message: AddRequest | AbortRequest) -> None:
        """Take in a message without waiting. If the engine is down, it is remembered."""
        if isinstance(message, AddRequest):
            self._requests.add(message, self.generation if self.is_up else 0)
            if self.is_up:
                self._send(message)
            return
        self._requests.forget(message.request_id)
        if self._trial is not None and self._trial.request.request_id == message.request_id:
            self._trial.over.set()
        self._send(message)

    def waiting(self) -> tuple[list[SentRequest], float]:
        """The requests that wait for the next life, and since when (`time.monotonic`)."""
        return (list(self._requests) if self.is_restarting else []), self._down_since_s

    def has(self, request_id: int) -> bool:
        """Whether this request was sent here and has not ended."""
        return request_id in self._requests

    def close(self) -> None:
        """Stop listening, and close the sockets."""
        self._stop_notes()
        for task in self._moving:
            task.cancel()
        self.link.close()

    async def _send_unsent(self, since_s: float) -> int:
        """Send the open requests that this life has not got; returns how many it has got now."""
        generation, num_sent = self.generation, 0
        for message in self._requests.unsent(generation, since_s):
            if self._is_lost or self.generation != generation:
                break
            self._send(message)
            num_sent += message.num_requests
            await asyncio.sleep(0)
        return num_sent

    def _send(self, message: ToEngine) -> None:
        try:
            self.link.send(message)
        except EngineDeadError:  # the next life gets all open requests
            log.debug("a message did not reach the engine, which has ended")

    async def _try(self, request: SentRequest) -> None:
        trial = self._trial = _Trial(request)
        try:
            self._send(self._requests.again(request, self.generation, self._down_since_s))
            await trial.over.wait()
            if self._is_lost:
                return
            request.acquit()
            if request.request_id in self._requests:
                # Abort it, so that the next suspect is alone. It is sent again with all others.
                trial.over.clear()
                trial.is_taken_back = True
                self._send(AbortRequest(request.request_id))
                await trial.over.wait()
                request.sent_to = 0
        finally:
            self._trial = None

    def _take(self, step: StepOutput) -> None:
        """Keep what the step's requests have generated, and pass it on."""
        assert self._reader is not None
        if self._is_lost:  # it was replaced, and another engine has its requests
            return
        trial = self._trial
        outputs = [one for one in step.outputs if not self._is_taken_back(one)]
        if len(outputs) < len(step.outputs):
            step = StepOutput(outputs)
            if trial is not None:
                trial.over.set()
        self._requests.take_output(step)
        self._reader.on_output(step)
        if trial is not None and not trial.is_taken_back and trial.request.is_past_its_crash:
            trial.over.set()
        if trial is not None and trial.request.request_id not in self._requests:
            trial.over.set()

    def _is_taken_back(self, output: RequestOutput) -> bool:
        """Whether this output answers our abort after a trial, so the request goes on.

        A request that a client aborted is not open any more. An answer may come after the trial, which ends
        early if the life ends.
        """
        return output.finish_reason is FinishReason.ABORT and output.request_id in self._requests

    def _end_guilty(self, request: SentRequest, reason: str) -> None:
        log.error(
            "request %d of call %s ends: the engine crashed on it %d times, the last time while it ran alone",
            request.request_id,
            request.message.call_id or "?",
            request.num_crashes,
        )
        error = RequestOutput(
            request.request_id,
            [],
            FinishReason.ERROR,
            error_status=500,
            error_code="request_crashes_engine",
            error_message=f"the engine crashed {request.num_crashes} times behind {len(request.output)} "
            f"tokens of this request, the last time while it ran alone ({reason}); do not send it again",
        )
        self._requests.forget(request.request_id)
        if self._reader is not None:
            self._reader.on_output(StepOutput([error]))

    def _start_notes(self) -> None:
        if self._notes is None:
            self._notes = self._loop.create_task(self._note_wait())

    def _stop_notes(self) -> None:
        if self._notes is not None:
            self._notes.cancel()
            self._notes = None

    async def _note_wait(self) -> None:
        while True:
            if self._reader is not None:
                self._reader.on_wait([request.request_id for request in self._requests])
            await asyncio.sleep(WAIT_NOTE_S)


class _Trial:
    """A suspect that is alone in the engine."""

    def __init__(self, request: SentRequest) -> None:
        self.request = request
        self.over = asyncio.Event()  # it got past its crash, has ended, or was taken back; or the life ended
        self.is_taken_back = False


def _now() -> float:
    return round(time.time(), 3)
