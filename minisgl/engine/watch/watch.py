"""What the engine knows of its own pace, and of the requests that it has and had.

Promise: it only reads; a step does the same with it and without it. It takes a few microseconds per step, and
some ten per request.
"""

import time
from collections.abc import Callable

import msgspec

from minisgl.engine.step_timeline import StepInFlight, StepRecord
from minisgl.engine.watch.lives import Lives
from minisgl.engine.watch.moments import Moments
from minisgl.engine.watch.pace import Pace, StepCounts
from minisgl.ipc.messages import AddRequest
from minisgl.ipc.questions import AskRequests
from minisgl.scheduler.scheduler import Scheduler


class EngineWatch:
    """Writes down what `scheduler` notes. The engine calls it after each of the scheduler's calls."""

    def __init__(self, scheduler: Scheduler, read_counts: Callable[[], StepCounts]) -> None:
        self._scheduler = scheduler
        self._journal = scheduler.journal
        self.moments = Moments()
        self.lives = Lives(self.moments)
        self.pace = Pace(self.moments, read_counts)

    def record(self, now_s: float, call: AddRequest | None = None) -> None:
        """Take the scheduler's notes, at `now_s` by `time.perf_counter`; see `Lives.record`."""
        if self._journal.notes:
            self.lives.record(self._journal.take(), int(now_s * 1e6), call)

    def count_step(self, record: StepRecord, newest: StepInFlight | None) -> None:
        """Count a step whose results were applied; see `Pace.count`."""
        if self._journal.notes:
            self.record(record.applied_s)
        self.pace.count(record, newest)

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
