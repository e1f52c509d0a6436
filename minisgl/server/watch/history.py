"""Ten minutes of figures, one row of them per second, in fixed memory.

Promise: a figure that is unknown is null, never zero. Rates are per second of the time between two samples,
so a second that the engine did not answer in is made up for by the next.
"""

import math
from array import array
from collections.abc import Sequence

import msgspec

from minisgl.ipc.messages import Ready
from minisgl.ipc.questions import Status
from minisgl.lives import STEP_BOUNDS_MS, STEP_PARTS
from minisgl.server.stats import Histogram, ServerStats

CAPACITY = 600
"""Samples that are kept."""


class Sample(msgspec.Struct, kw_only=True):
    """The figures of one second. None = unknown, or there was nothing to measure."""

    time: float
    """Unix time in seconds."""
    output_tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    """Of requests that got a row, cached tokens included."""
    open_requests: float | None = None
    """In the server, from arrival to the end of the answer."""
    running: float | None = None
    """Requests with a row."""
    waiting: float | None = None
    """Requests that wait in the engine for a row or a grammar."""
    pages_free: float | None = None
    pages_running: float | None = None
    """Pages that requests hold."""
    pages_cached: float | None = None
    """Pages that only the prefix cache holds; they are free when they are needed."""
    hit_rate: float | None = None
    """Share (0 to 1) of those prompt tokens that were cached."""
    steps_per_s: float | None = None
    step_p50_ms: float | None = None
    step_p99_ms: float | None = None
    plan_ms: float | None = None
    """This and the next five: parts of the mean step (`lives.STEP_PARTS`)."""
    launch_ms: float | None = None
    masks_ms: float | None = None
    wait_ms: float | None = None
    apply_ms: float | None = None
    other_ms: float | None = None
    first_token_p50_ms: float | None = None
    """From a call's arrival at the server to the first token."""
    first_token_p99_ms: float | None = None
    token_p50_ms: float | None = None
    """Between two tokens of a request."""
    token_p99_ms: float | None = None
    graph_misses: float | None = None
    recompiles: float | None = None
    preemptions: float | None = None
    ended: float | None = None
    """Requests that the engine has ended."""
    refused: float | None = None
    """Calls that got a 429 or 503."""
    gc_ms: float | None = None
    """Python's garbage collection in the engine."""


NAMES = Sample.__struct_fields__


class Counted(msgspec.Struct, kw_only=True):
    """What a sample is made of: everything counted at one time."""

    time: float
    clock_s: float
    """Monotonic."""
    generation: int = 1
    """Of the engine's life, whose counters begin at 0."""
    status: Status | None
    """None = the engine did not answer."""
    ready: Ready | None
    stats: ServerStats


class History:
    """The last `CAPACITY` samples: one array of numbers for each figure."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._columns = {name: array("d", [math.nan]) * capacity for name in NAMES}
        self._num = 0
        self._last: Counted | None = None
        self._last_answered: Counted | None = None
        self._sample: Sample | None = None

    def add(self, now: Counted) -> Sample:
        """Take in a sample: the differences to the last one."""
        sample = Sample(time=round(now.time, 3), open_requests=now.stats.num_open_requests)
        if self._last is not None:
            _fill_server(sample, self._last, now)
        if now.status is not None:
            _fill_gauges(sample, now.status, now.ready)
            before = self._last_answered
            is_same_life = before is not None and before.generation == now.generation
            if before is not None and before.status is not None and is_same_life:
                _fill_engine(sample, before.status, now.status, now.clock_s - before.clock_s)
            self._last_answered = now
        self._last = now
        place = self._num % self._capacity
        for name, column in self._columns.items():
            value = getattr(sample, name)
            column[place] = math.nan if value is None else value
        self._num += 1
        self._sample = sample
        return sample

    def columns(self, seconds: int) -> dict[str, list[float | None]]:
        """The samples of the last `seconds`, oldest first, as a list for each figure."""
        count = min(seconds, self._num, self._capacity)
        places = [number % self._capacity for number in range(self._num - count, self._num)]
        return {
            name: [None if math.isnan(column[place]) else column[place] for place in places]
            for name, column in self._columns.items()
        }

    @property
    def last(self) -> Sample | None:
        """The newest sample; None = there is none yet."""
        return self._sample


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the counted ones lie; None = nothing was counted.

    Args:
        bounds: upper bounds of the buckets, ascending; the last bucket of `counts` has none.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, before = share * total, 0
    for place, count in enumerate(counts):
        if before + count >= wanted and count:
            if place == len(bounds):
                return bounds[-1]
            low = bounds[place - 1] if place else 0.0
            return low + (bounds[place] - low) * (wanted - before) / count
        before += count
    return bounds[-1]


def _fill_gauges(sample: Sample, status: Status, ready: Ready | None) -> None:
    sample.running = status.num_running
    sample.waiting = status.num_waiting
    sample.pages_free = status.num_free_pages
    sample.pages_running = status.num_held_pages
    if ready is not None:
        sample.pages_cached = max(ready.num_pages - status.num_free_pages - status.num_held_pages, 0)


def _fill_engine(sample: Sample, before: Status, now: Status, passed_s: float) -> None:
    passed_s = max(passed_s, 1e-3)
    sample.output_tokens_per_s = round((now.num_output_tokens - before.num_output_tokens) / passed_s, 1)
    prompt_tokens = now.num_prompt_tokens - before.num_prompt_tokens
    sample.prompt_tokens_per_s = round(prompt_tokens / passed_s, 1)
    if prompt_tokens:
        sample.hit_rate = round((now.num_cached_tokens - before.num_cached_tokens) / prompt_tokens, 4)
    sample.graph_misses = now.num_graph_misses - before.num_graph_misses
    sample.recompiles = now.num_recompiles - before.num_recompiles
    sample.preemptions = now.num_preemptions - before.num_preemptions
    sample.ended = now.num_ended - before.num_ended
    sample.gc_ms = round((now.gc_s - before.gc_s) * 1e3, 3)
    num_steps = now.num_steps - before.num_steps
    sample.steps_per_s = round(num_steps / passed_s, 1)
    if num_steps <= 0 or not now.step_counts or len(now.step_counts) != len(before.step_counts):
        return  # an engine of another version may not say
    counts = [b - a for a, b in zip(before.step_counts, now.step_counts, strict=True)]
    sample.step_p50_ms = _rounded(quantile(STEP_BOUNDS_MS, counts, 0.5))
    sample.step_p99_ms = _rounded(quantile(STEP_BOUNDS_MS, counts, 0.99))
    for name, a, b in zip(STEP_PARTS, before.step_part_s, now.step_part_s, strict=True):
        setattr(sample, f"{name}_ms", round((b - a) / num_steps * 1e3, 3))


def _fill_server(sample: Sample, before: Counted, now: Counted) -> None:
    sample.refused = max(_num_refused(now.stats) - _num_refused(before.stats), 0)
    for name, old, new in (
        ("first_token", before.stats.first_token_s, now.stats.first_token_s),
        ("token", before.stats.inter_token_s, now.stats.inter_token_s),
    ):
        counts = _growth(old, new)
        for share in (50, 99):
            found = quantile(new.bounds, counts, share / 100)
            setattr(sample, f"{name}_p{share}_ms", None if found is None else _rounded(found * 1e3))


def _growth(before: Histogram, now: Histogram) -> list[int]:
    """The observations between two times; all of them if a process did not answer one of the times."""
    counts = [b - a for a, b in zip(before.counts, now.counts, strict=True)]
    return counts if min(counts) >= 0 else [0] * len(counts)


def _num_refused(stats: ServerStats) -> int:
    """Calls that got a 429 or 503."""
    return sum(
        count
        for key, count in stats.responses.items()
        if key.startswith("POST ") and key.endswith((" 429", " 503"))
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
