"""What the engine knows of its own pace, and of the requests that it has and had.

Promise: it only reads; a step does the same with it and without it. It takes about a microsecond per step,
and some more per request: notes of many steps are written down together, as each then costs less.
"""

import time
from collections.abc import Callable

import msgspec

from minisgl.engine.watch.lives import Lives
from minisgl.engine.watch.moments import Moments
from minisgl.engine.watch.pace import Pace, StepCounts
from minisgl.engine.watch.step_timeline import StepInFlight, StepRecord
from minisgl.ipc.messages import AddRequest
from minisgl.ipc.questions import AskRequests
from minisgl.scheduler.journal import Note
from minisgl.scheduler.scheduler import Scheduler

NUM_AT_ONCE = 64
"""Calls of the scheduler whose notes are written down together: a few hundred microseconds of work."""


class EngineWatch:
    """Writes down what `scheduler` notes. The engine calls it after each of the scheduler's calls.

    Notes wait, with their time, until there are `NUM_AT_ONCE`, the engine rests, or somebody asks.
    """

    def __init__(self, scheduler: Scheduler, read_counts: Callable[[], StepCounts]) -> None:
        self._scheduler = scheduler
        self._journal = scheduler.journal
        self._moments = Moments()
        self._lives = Lives(self._moments)
        self._taken: list[tuple[list[Note], int, AddRequest | None]] = []  # notes, when, and of which call
        self.pace = Pace(self._moments, read_counts)

    @property
    def lives(self) -> Lives:
        """The lives, with all that was noted so far."""
        self._write()
        return self._lives

    @property
    def moments(self) -> Moments:
        """What was slow, with all that was noted so far."""
        self._write()
        return self._moments

    def record(self, now_s: float, call: AddRequest | None = None) -> None:
        """Take the scheduler's notes, at `now_s` by `time.perf_counter`; see `Lives.record`."""
        if self._journal.notes:
            taken = self._taken
            taken.append((self._journal.take(), int(now_s * 1e6), call))
            if len(taken) >= NUM_AT_ONCE:
                self._write()

    def count_step(self, record: StepRecord, newest: StepInFlight | None) -> None:
        """Count a step whose results were applied; see `Pace.count`."""
        if self._journal.notes:
            self.record(record.applied_s)
        self.pace.count(record, newest)

    def rest(self) -> None:
        """The engine has nothing to do; see `Pace.rest`."""
        self.pace.rest()
        self._write()

    def answer(self, ask: AskRequests) -> bytes:
        """A `LivesAnswer` as msgpack."""
        now_s = time.perf_counter()
        self.record(now_s)
        requests, queue = self._scheduler.open_requests()
        told = self.lives.tell(ask, int(now_s * 1e6), time.time() - now_s, requests, queue)
        return msgspec.msgpack.encode(told)

    def close(self) -> None:
        """Stop watching. May be called twice."""
        self.pace.gc.close()

    def _write(self) -> None:
        taken, self._taken = self._taken, []
        for notes, now_us, call in taken:
            self._lives.record(notes, now_us, call)
