"""Keeps the scheduler's notes of each request with the engine's time, from which its life is told.

Promise: nothing is done for a request between two notes, and little with a note: phases are made when
somebody asks. Memory is bounded: `MAX_OPEN` open lives, `MAX_ENDED` ended ones, `MAX_EVENTS` events of each.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from minisgl.engine.watch.moments import Moments
from minisgl.engine.watch.phases import Event, fold, num_preemptions, phases_of, state_of
from minisgl.engine.watch.queue_clock import QueueClock
from minisgl.engine.watch.request_times import RequestTimes
from minisgl.engine.watch.running_median import RunningMedian
from minisgl.ipc.messages import AddRequest
from minisgl.ipc.questions import AskRequests
from minisgl.lives import MAX_ENDED, Life, LivesAnswer, State
from minisgl.request import Request
from minisgl.scheduler.journal import Added, Admitted, Computed, Ended, Held, Note, Released

MAX_OPEN = 1 << 14
"""Most open requests that are recorded; later ones are not, until some end."""
MAX_EVENTS = 96
LONGEST_SERVER_US = 600_000_000
"""A call that seems to have arrived earlier has another clock."""
SLOW_FIRST_TOKEN_MS = 1000.0
SLOW_FACTOR = 3.0
GROUPS: dict[str, tuple[State, ...]] = {
    "open": ("grammar", "queued", "prompt", "decoding", "preempted"),
    "waiting": ("grammar", "queued", "preempted"),
    "running": ("prompt", "decoding"),
}
"""Names for several states."""


class RecordedLife:
    """A request's notes with their times (microseconds of the engine's clock)."""

    __slots__ = (
        "added", "admitted_us", "arrived_us", "call_id", "end", "events", "first_token_us", "number",
        "waiting_since_us",
    )  # fmt: skip

    def __init__(self, number: int, call_id: str, arrived_us: int, added: Added | None) -> None:
        self.number = number
        self.call_id = call_id
        self.arrived_us = arrived_us
        self.added = added  # None = it was refused
        self.events: list[Event] = []  # the first is `added`, unless it was refused
        self.admitted_us = -1  # for the first time
        self.first_token_us = -1
        self.waiting_since_us: int | None = None  # for the engine to be started again
        self.end: tuple[int, Ended] | None = None

    @property
    def state(self) -> State:
        """What it does now."""
        return "ended" if self.end is not None else state_of(self.events)


class Lives:
    """Records lives. `moments` gets first tokens that took long."""

    def __init__(self, moments: Moments) -> None:
        self._moments = moments
        self._clock = QueueClock()
        self._open: dict[int, RecordedLife] = {}
        self._ended: deque[RecordedLife] = deque(maxlen=MAX_ENDED)
        self._now_us = 0
        self._first_token_ms = RunningMedian()
        self.times = RequestTimes()
        self.num_ended = 0

    def record(self, notes: Iterable[Note], now_us: int, call: AddRequest | None = None) -> None:
        """Record what happened since the last time.

        Args:
            now_us: the engine's clock; an earlier time than the last one counts as the last one.
            call: the message whose requests were just added, if any.
        """
        now_us = self._now_us = max(self._now_us, now_us)
        clock, open_ = self._clock, self._open
        clock.advance(now_us)
        for note in notes:
            if isinstance(note, Held):
                clock.hold(note)
            elif isinstance(note, Released):
                clock.release()
            elif isinstance(note, Added):
                if len(open_) < MAX_OPEN:
                    life = self._new(note.request_id, now_us, call, note)
                    life.events.append((now_us, note, clock.mark(note.priority)))
                    open_[note.request_id] = life
            else:
                life = open_.get(note.request_id)
                if life is not None:
                    self._change(life, note, now_us)
                elif isinstance(note, Ended) and call is not None:  # it was refused
                    self._end(self._new(note.request_id, now_us, call, None), note, now_us)

    def tell(
        self,
        ask: AskRequests,
        now_us: int,
        unix_offset_s: float,
        requests: Mapping[int, Request],
        queue: Sequence[Request],
    ) -> LivesAnswer:
        """The lives that are asked for, the newest first.

        Args:
            unix_offset_s: is added to times of the engine's clock to make them Unix times.
            requests, queue: `Scheduler.open_requests`.
        """
        now_us = self._now_us = max(self._now_us, now_us)
        self._clock.advance(now_us)
        ended_after_us = int((ask.ended_after - unix_offset_s) * 1e6) if ask.ended_after else -1
        states: Collection[str] = GROUPS.get(ask.state, (ask.state,) if ask.state else ())
        numbers = frozenset(ask.numbers)
        found = [
            life
            for life in chain(self._open.values(), self._ended)
            if (not states or life.state in states)
            and (not ask.id or life.call_id == ask.id)
            and (ask.number < 0 or life.number == ask.number)
            and (not numbers or life.number in numbers)
            and (life.end is None or life.end[0] >= ended_after_us)
        ]
        found.sort(key=lambda life: (life.arrived_us, life.number), reverse=True)
        places = {one.request_id: place for place, one in enumerate(queue)}
        return LivesAnswer(
            requests=[
                self._told(life, now_us, unix_offset_s, requests.get(life.number), places.get(life.number))
                for life in found[ask.skip : ask.skip + ask.limit]
            ],
            num_open=len(self._open),
            num_ended=self.num_ended,
            moments=[] if numbers else self._moments.told(unix_offset_s),
        )

    def _new(self, number: int, now_us: int, call: AddRequest | None, added: Added | None) -> RecordedLife:
        if call is None:
            return RecordedLife(number, "", now_us, added)
        waiting_since_us = int(call.waiting_since_s * 1e6)
        # A call that is known to have waited may be as old as it says.
        earliest_us = 0 if waiting_since_us else max(now_us - LONGEST_SERVER_US, 0)
        then_us = int(call.arrived_s * 1e6)
        arrived_us = then_us if earliest_us < then_us < now_us else now_us
        life = RecordedLife(number, call.call_id, arrived_us, added)
        if arrived_us <= waiting_since_us < now_us:
            life.waiting_since_us = waiting_since_us
        return life

    def _change(self, life: RecordedLife, note: Note, now_us: int) -> None:
        if isinstance(note, Computed):
            if state_of(life.events) != "prompt":
                return  # it was preempted while the step was in flight
            if note.is_last and life.first_token_us < 0:
                life.first_token_us = now_us
                self.times.prefilled(now_us - life.admitted_us)
                if life.waiting_since_us is None:
                    self._count_first_token(life, now_us)
            life.events.append((now_us, note, None))
        elif isinstance(note, Ended):
            del self._open[life.number]
            self._end(life, note, now_us)
            return
        else:
            assert life.added is not None
            if isinstance(note, Admitted):
                if life.admitted_us < 0:
                    life.admitted_us = now_us
                    self.times.queued(now_us - life.events[0][0])
                before_us, before, mark = life.events[-1]
                if isinstance(before, Admitted):
                    life.events[-1] = (before_us, note, mark)
                    return
            life.events.append((now_us, note, self._clock.mark(life.added.priority)))
        if len(life.events) > MAX_EVENTS:
            fold(life.events)

    def _end(self, life: RecordedLife, note: Ended, now_us: int) -> None:
        if life.added is not None and state_of(life.events) in ("queued", "preempted"):
            life.events.append((now_us, note, self._clock.mark(life.added.priority)))
        life.end = (now_us, note)
        if life.first_token_us >= 0:
            self.times.decoded(now_us - life.first_token_us)
        if life.admitted_us >= 0:
            self.times.inferred(now_us - life.admitted_us)
        self._ended.append(life)
        self.num_ended += 1

    def _count_first_token(self, life: RecordedLife, now_us: int) -> None:
        ms, usual_ms = (now_us - life.arrived_us) / 1e3, self._first_token_ms.value
        if ms > SLOW_FIRST_TOKEN_MS and ms > SLOW_FACTOR * usual_ms > 0:
            parts: list[tuple[float, str]] = []
            for phase in phases_of(life.arrived_us, life.events, now_us, 0, None):
                parts += [(wait.ms, wait.reason) for wait in phase.waits]
                if not phase.waits:
                    end_ms = ms if phase.end_ms is None else phase.end_ms
                    parts.append((end_ms - phase.begin_ms, phase.kind))
            longest_ms, reason = max(parts)
            assert life.added is not None
            figures = {
                "number": float(life.number),
                "prompt_tokens": float(life.added.num_prompt_tokens),
                "reason_ms": longest_ms,
            }
            self._moments.add("first_token", reason, now_us, ms, usual_ms, figures)
        if ms > 0:
            self._first_token_ms.add(ms)

    def _told(
        self,
        life: RecordedLife,
        now_us: int,
        unix_offset_s: float,
        request: Request | None,
        ahead: int | None,
    ) -> Life:
        added, end = life.added, life.end
        end_us = now_us if end is None else end[0]
        if end is not None:
            output_tokens = end[1].num_output_tokens
        else:
            output_tokens = 0 if request is None else len(request.output)
        mark = self._clock.mark(added.priority) if added is not None and end is None else None
        admissions = [note for _, note, _ in life.events if isinstance(note, Admitted)]
        return Life(
            number=life.number,
            id=life.call_id,
            state=life.state,
            arrived_at=round(life.arrived_us / 1e6 + unix_offset_s, 6),
            total_ms=(end_us - life.arrived_us) / 1e3,
            first_token_ms=None if life.first_token_us < 0 else (life.first_token_us - life.arrived_us) / 1e3,
            prompt_tokens=0 if added is None else added.num_prompt_tokens,
            cached_tokens=admissions[0].num_cached_tokens if admissions else 0,
            output_tokens=output_tokens,
            priority=0 if added is None else added.priority,
            num_preemptions=num_preemptions(life.events),
            ahead=ahead,
            end=None if end is None else end[1].reason.value,
            error_code="" if end is None else end[1].error_code,
            phases=phases_of(
                life.arrived_us,
                life.events,
                None if end is None else end_us,
                output_tokens,
                mark,
                life.waiting_since_us,
            ),
        )
