"""How long steps take, which part of them takes it, and which were slow for what reason.

Promise: fixed memory, and about a microsecond per step whatever the number of rows. A slow step is one that
took more than `SLOW_FACTOR` times the running median and more than `SLOW_S`.
"""

import gc
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from minisgl.engine.watch.moments import Moments
from minisgl.engine.watch.running_median import RunningMedian
from minisgl.engine.watch.step_timeline import StepInFlight, StepRecord
from minisgl.lives import STEP_BOUNDS_MS, STEP_PARTS, StepReason

SLOW_FACTOR = 3.0
SLOW_S = 0.05
LONG_GC_S = 0.001
MANY_PROMPT_TOKENS = 16
"""Fewer do not make a step slow."""
LARGE_PART = 1 / 3
"""A part of a slow step that takes this share of it is its reason."""
NUM_AT_ONCE = 64
"""Steps that are added to the figures together."""
_BOUNDS_S = tuple(bound / 1e3 for bound in STEP_BOUNDS_MS)


class StepCounts(NamedTuple):
    """Counters of the engine; what grew lately may be why a step was slow."""

    num_recompiles: int = 0
    num_graph_misses: int = 0
    num_preemptions: int = 0
    is_profiling: bool = False


class GcClock:
    """How long Python's garbage collection has held this process since the clock was made."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began_s = 0.0
        self._long: deque[tuple[float, float]] = deque(maxlen=8)  # end and length of the last long ones
        gc.callbacks.append(self._on_gc)

    def seconds_since(self, since_s: float) -> float:
        """Seconds of long collections that ended after `since_s` (`time.perf_counter`)."""
        return sum(length_s for end_s, length_s in self._long if end_s > since_s)

    def close(self) -> None:
        """Stop counting. May be called twice."""
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, _: dict[str, int]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._began_s = now_s
            return
        length_s = now_s - self._began_s
        self.seconds += length_s
        if length_s > LONG_GC_S:
            self._long.append((now_s, length_s))


class Pace:
    """Counts steps.

    Args:
        moments: gets the slow steps.
        read_counts: reads the engine's counters; called for slow steps and by `refresh`, not for each step.
    """

    def __init__(self, moments: Moments, read_counts: Callable[[], StepCounts]) -> None:
        self._moments = moments
        self._read_counts = read_counts
        self._step_counts = [0] * (len(_BOUNDS_S) + 1)
        self._new: list[StepRecord] = []  # steps that are not yet in the figures
        self._new_s: list[float] = []  # and their lengths
        self.gc = GcClock()
        self._median_ms = RunningMedian()
        self._last_applied_s = 0.0  # 0 = the engine was idle since
        self._length_s = 0.0  # of all steps, and their parts
        self._plan_s = 0.0
        self._launch_s = 0.0
        self._masks_s = 0.0
        self._wait_s = 0.0
        self._apply_s = 0.0
        self._last_counts = StepCounts()
        self.recorded_at_s = 0.0
        """When a CUDA graph was last recorded between steps."""

    @property
    def step_counts(self) -> list[int]:
        """Steps by length, a bucket for each of `STEP_BOUNDS_MS` and one for longer ones."""
        self._add_new()
        return self._step_counts

    @property
    def part_s(self) -> list[float]:
        """Seconds of all steps by `STEP_PARTS`."""
        self._add_new()
        parts = [self._plan_s, self._launch_s, self._masks_s, self._wait_s, self._apply_s]
        return [*parts, max(self._length_s - sum(parts), 0.0)]

    def refresh(self) -> None:
        """Take the counters as they are, so that what grew before is not the reason of a later step."""
        self._last_counts = self._read_counts()

    def rest(self) -> None:
        """The engine has nothing to do, so the time until the next step counts for none."""
        self._last_applied_s = 0.0

    def count(self, record: StepRecord, newest: StepInFlight | None) -> None:
        """Count a step that was applied.

        Its length is the time since the step before it was applied, or since its plan began if the engine was
        idle: the pause between two tokens of a request.

        Args:
            newest: the step in flight that was launched last, if there is one (overlap).
        """
        applied_s = record.applied_s
        length_s = applied_s - (self._last_applied_s or record.begin_s)
        self._last_applied_s = applied_s
        if length_s > SLOW_S:
            self._add_new()
            if length_s * 1e3 > SLOW_FACTOR * self._median_ms.value > 0:
                self._add_moment(record, newest, length_s)
        self._new_s.append(length_s)
        new = self._new
        new.append(record)
        if len(new) >= NUM_AT_ONCE:
            self._add_new()

    def _add_new(self) -> None:
        """Add the new steps to the figures: with caches full of other
        work, many at once take a quarter of what they take one by one."""
        if not self._new:
            return
        _, begin, planned, launched, _, _, _, _, *times = zip(*self._new, strict=True)
        waiting, collected, applied, masking, masked = map(sum, times)
        planned_s = sum(planned)
        self._plan_s += planned_s - sum(begin)
        self._launch_s += sum(launched) - planned_s
        self._masks_s += masked - masking
        self._wait_s += collected - waiting
        self._apply_s += applied - collected
        self._length_s += sum(self._new_s)
        counts = self._step_counts
        for length_s in self._new_s:
            counts[bisect_left(_BOUNDS_S, length_s)] += 1
        self._median_ms.add(*[length_s * 1e3 for length_s in self._new_s])
        self._new, self._new_s = [], []

    def _add_moment(self, record: StepRecord, newest: StepInFlight | None, length_s: float) -> None:
        launched = newest or record  # with overlap, the next step was launched since the last one ended
        parts_s = [
            launched.planned_s - launched.begin_s,
            launched.launched_s - launched.planned_s,
            launched.masked_s - launched.masking_s,
            record.collected_s - record.waiting_s,
            record.applied_s - record.collected_s,
        ]
        length_ms = length_s * 1e3
        parts_ms = [*(s * 1e3 for s in parts_s), max(length_ms - sum(parts_s) * 1e3, 0.0)]
        since_s = record.applied_s - length_s
        gc_ms = self.gc.seconds_since(since_s) * 1e3
        before, now = self._last_counts, self._read_counts()
        self._last_counts = now
        reason = slow_reason(record, parts_ms, gc_ms, self.recorded_at_s > since_s, before, now)
        figures = {f"{name}_ms": round(ms, 3) for name, ms in zip(STEP_PARTS, parts_ms, strict=True)}
        figures |= {
            "gc_ms": round(gc_ms, 3),
            "decodes": record.num_decodes,
            "chunks": record.num_chunks,
            "prompt_tokens": record.num_prompt_tokens,
        }
        until_us = int(record.applied_s * 1e6)
        self._moments.add("step", reason, until_us, length_ms, self._median_ms.value, figures)


def slow_reason(
    record: StepRecord,
    parts_ms: list[float],
    gc_ms: float,
    was_recording: bool,
    before: StepCounts,
    now: StepCounts,
) -> StepReason:
    """What most likely made a step slow: the rarest thing that happened in it, else its largest part.

    Args:
        parts_ms: by `STEP_PARTS`; their sum is the step's length.
        was_recording: a CUDA graph was recorded meanwhile.
        before, now: the engine's counters some time before the step, and now.
    """
    plan_ms, launch_ms, masks_ms, wait_ms, _, other_ms = parts_ms
    large_ms = LARGE_PART * sum(parts_ms)
    if now.num_recompiles > before.num_recompiles:
        return "recompile"
    if gc_ms > large_ms:
        return "gc"
    if was_recording and other_ms > large_ms:
        return "graph_recording"
    if masks_ms > large_ms:
        return "grammar"
    if now.is_profiling:
        return "profile"
    if plan_ms > large_ms:
        return "preemption" if now.num_preemptions > before.num_preemptions else "planning"
    if other_ms > large_ms:
        return "messages"
    if record.num_prompt_tokens >= MANY_PROMPT_TOKENS and wait_ms + launch_ms > large_ms:
        return "prompt"
    if now.num_graph_misses > before.num_graph_misses:
        return "graph_miss"
    if now.num_preemptions > before.num_preemptions:
        return "preemption"
    return "device"
