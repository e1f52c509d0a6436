"""The engines of a server process. All other code talks to engines through `Engines`.

Promise: a call's requests go to one engine, and stay there while it runs. When that engine has ended and
another one is up, its requests go on there. Only suspects of the crash wait for the next life of their own
engine. An engine that was replaced gets no new requests, and either hands its own over or finishes them.
"""

import functools
import time
from collections.abc import Sequence

from minisgl.errors import EngineDeadError
from minisgl.ipc.messages import AbortRequest, AddRequest, Ready, StepOutput, ToEngine
from minisgl.server.engines.router import Router
from minisgl.server.engines.sent_requests import SentRequest
from minisgl.server.engines.served_engine import Reader, ServedEngine


class Engines:
    """Chooses an engine for each call. Create, use and close it in one event loop.

    Args:
        engines: one at least, by their numbers.
        may_grow: more may be added later.
    """

    def __init__(self, engines: Sequence[ServedEngine], *, may_grow: bool = False) -> None:
        self.all: Sequence[ServedEngine] = engines
        """By their numbers. Engines are added at the end only, so earlier numbers stay valid."""
        self.replaced: list[ServedEngine] = []
        """Replaced engines, of another model, that still run requests."""
        self._may_grow = may_grow
        self._reader: Reader | None = None
        self._router = Router(len(engines))
        self._calls: dict[tuple[str, float], tuple[ServedEngine, int]] = {}  # the engine, and open requests
        self._call_of: dict[int, tuple[str, float]] = {}  # by request id

    @property
    def first(self) -> ServedEngine:
        """The engine whose figures are shown where only one fits."""
        return self.all[0]

    @property
    def up(self) -> list[ServedEngine]:
        """The engines that take requests now."""
        return [engine for engine in self.all if engine.is_up]

    @property
    def open(self) -> list[ServedEngine]:
        """The engines that get new calls: those that are up, without those that leave if others are up."""
        up = self.up
        return [engine for engine in up if not engine.is_leaving] or up

    @property
    def num_restarts(self) -> int:
        """How often engines were started again."""
        return sum(engine.num_restarts for engine in self.all)

    @property
    def restart_reason(self) -> str | None:
        """Why requests wait for an engine to be started again, for people; None = they need not wait."""
        reasons = [engine.restart_reason for engine in self.all if engine.is_restarting]
        return reasons[0] if reasons and not self.up else None

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of any engine that is up."""
        return min(engine.link.silent_s for engine in self.up or self.all)

    def choose(self, message: AddRequest) -> ServedEngine:
        """The engine for the requests of a message."""
        if self._is_alone:
            return self.all[0]
        known = self._calls.get(_call_of(message))
        if known is not None and known[0].is_up:
            return known[0]
        candidates = self.open or [engine for engine in self.all if not engine.has_failed] or self.all
        prompts = (message.prompt_ids, *message.more_prompts)
        return self.all[self._router.choose(prompts, message.cache_salt, [one.number for one in candidates])]

    def send(self, message: ToEngine) -> None:
        """Hand the requests of a message to an engine, or end a request in the engine that has it.

        Raises:
            EngineDeadError: the message is neither of the two.
        """
        if isinstance(message, AddRequest):
            engine = self.choose(message)
            self._begin(engine, message)
            engine.send(message)
        elif isinstance(message, AbortRequest):
            self._end(message.request_id)
            for engine in (*self.all, *self.replaced):
                if engine.has(message.request_id):
                    engine.send(message)
        else:
            raise EngineDeadError(f"{type(message).__name__} is for one engine; send it through its link")

    def listen(self, reader: Reader) -> None:
        """Pass on the messages of all engines from now on."""
        self._reader = reader
        for engine in self.all:
            self._listen_to(engine, reader)

    def add(self, engine: ServedEngine) -> None:
        """Add an engine behind all others. Call it after `listen`."""
        assert self._may_grow, "the number of engines is fixed"
        assert self._reader is not None, "nobody listens"
        assert engine.number == len(self.all), f"engine {engine.number} comes behind {len(self.all)} engines"
        self.all = [*self.all, engine]
        self._router.add()
        self._listen_to(engine, self._reader)

    def prepare(self, engine: ServedEngine) -> None:
        """Listen to an engine that is to replace another one. Call it after `listen`."""
        assert self._reader is not None, "nobody listens"
        self._listen_to(engine, self._reader)

    def replace(self, old: ServedEngine, new: ServedEngine, *, leaves: bool) -> None:
        """Send requests to `new` instead of `old` from now on.

        Args:
            leaves: whether `old` finishes its requests. If not, they go on in `new`, or in another engine if
                `new` is not up yet.
        """
        self.all = [new if engine is old else engine for engine in self.all]
        self._router.forget(old.number)
        requests = [] if leaves else old.hand_over()
        new.succeed(old)
        if leaves:
            self.replaced.append(old)
        ready = new.last_ready
        if ready is not None and self._reader is not None:
            self._take_ready(self._reader, new, ready)
        self._distribute(requests, [new] if new.is_up else self.up or [new])

    def remove(self, engine: ServedEngine) -> None:
        """Forget an engine that was replaced, or that replaces none after all. It has ended."""
        if engine in self.replaced:
            self.replaced.remove(engine)
        engine.close()

    def forget_caches(self) -> None:
        """The engines have dropped their prefix caches."""
        for engine in self.all:
            self._router.forget(engine.number)

    def close(self) -> None:
        """Stop listening, and close the sockets."""
        for engine in (*self.all, *self.replaced):
            engine.close()

    @property
    def _is_alone(self) -> bool:
        return len(self.all) == 1 and not self._may_grow

    def _listen_to(self, engine: ServedEngine, reader: Reader) -> None:
        own = reader._replace(on_ready=functools.partial(self._take_ready, reader, engine))
        if self._is_alone:
            engine.listen(own)
            return
        own = own._replace(on_output=functools.partial(self._take, reader))
        engine.listen(own, functools.partial(self._move_requests, engine))

    def _take(self, reader: Reader, step: StepOutput) -> None:
        for output in step.outputs:
            if output.finish_reason is not None:
                self._end(output.request_id)
        reader.on_output(step)

    def _take_ready(self, reader: Reader, engine: ServedEngine, ready: Ready) -> None:
        if engine not in self.all:  # it has not replaced another one yet, or was replaced itself
            return
        self._router.set_capacity(engine.number, ready.num_pages * ready.page_size)
        reader.on_ready(ready)
        if self._may_grow:  # an engine that is away may never come again
            for other in self.all:
                if other is not engine and other.is_restarting:
                    self._give_requests(other, [engine])

    def _begin(self, engine: ServedEngine, message: AddRequest) -> None:
        if self._is_alone:
            return
        call = _call_of(message)
        prompts = (message.prompt_ids, *message.more_prompts)
        self._router.begin(
            engine.number, message.request_id, prompts, message.num_choices, message.cache_salt
        )
        known = self._calls.get(call)
        self._calls[call] = engine, message.num_requests + (known[1] if known is not None else 0)
        for index in range(message.num_requests):
            self._call_of[message.request_id + index] = call

    def _end(self, request_id: int) -> None:
        self._router.end(request_id)
        call = self._call_of.pop(request_id, None)
        if call is not None:
            engine, num_open = self._calls.pop(call)
            if num_open > 1:
                self._calls[call] = engine, num_open - 1

    def _move_requests(self, lost: ServedEngine) -> None:
        """Give the requests of an engine that has ended to others, if there are any."""
        if lost not in self.all:  # the others have another model
            return
        self._router.forget(lost.number)
        others = self.open
        if not others and lost.has_failed:
            others = [engine for engine in self.all if not engine.has_failed]
        if others:
            self._give_requests(lost, others)

    def _give_requests(self, lost: ServedEngine, others: Sequence[ServedEngine]) -> None:
        """Give the requests of an engine that does not run to `others`, except suspects of a crash."""
        self._distribute(lost.give_up(), others)

    def _distribute(self, requests: Sequence[SentRequest], others: Sequence[ServedEngine]) -> None:
        """Give the requests that an engine has forgotten to `others`, each call to one."""
        if self._is_alone:
            others[0].take_over(requests, time.monotonic())
            return
        moved: dict[int, list[SentRequest]] = {engine.number: [] for engine in others}
        targets: dict[tuple[str, float], int] = {}
        for request in requests:
            message, number = request.message, request.request_id
            call, prompts = _call_of(message), (request.prompt_ids,)
            if call not in targets:
                targets[call] = self._router.choose(prompts, message.cache_salt, list(moved))
                if call in self._calls:
                    self._calls[call] = self.all[targets[call]], self._calls[call][1]
            self._router.end(number)
            self._router.begin(targets[call], number, prompts, 1, message.cache_salt)
            moved[targets[call]].append(request)
        for engine in others:
            engine.take_over(moved[engine.number], time.monotonic())


def _call_of(message: AddRequest) -> tuple[str, float]:
    """The key of a message's call. Two calls of the same name never arrive at the same time."""
    return message.call_id, message.arrived_s
