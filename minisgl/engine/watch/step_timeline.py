"""Records what the last steps did and how long each of their phases took, to find lost time.

Promise: it holds numbers only, no token and no text. It uses a fixed amount of memory, and takes a few
microseconds per step.
"""

from collections import deque
from typing import NamedTuple

import msgspec

from minisgl.scheduler.plan import StepPlan

CAPACITY = 4096
"""Number of steps to remember: about half a minute of a busy engine."""
HOST_TRACK, DEVICE_TRACK = 1, 2


class UsedGraphs(NamedTuple):
    """The CUDA graphs that a step used."""

    decode_rows: int = 0  # size of the decode graph; 0 = none
    prefill_tokens: int = 0  # size of the prefill graph; 0 = none
    joined: bool = False  # decodes and chunks ran in one batch


class StepRecord(NamedTuple):
    """One step. Times are seconds of `time.perf_counter`, in chronological order but for the last two."""

    step_id: int
    begin_s: float  # planning begins
    planned_s: float
    launched_s: float
    num_decodes: int
    num_chunks: int
    num_prompt_tokens: int
    graphs: UsedGraphs
    waiting_s: float = 0.0  # the host begins to wait for the tokens
    collected_s: float = 0.0
    applied_s: float = 0.0
    masking_s: float = 0.0  # the host begins to fill masks, behind the launch; 0 = the step has none
    masked_s: float = 0.0  # the second half of the step, which samples, is launched


class StepInFlight:
    """What is known of a step between its launch and its end; see `StepRecord`."""

    __slots__ = ("begin_s", "counts", "graphs", "launched_s", "masked_s", "masking_s", "planned_s", "step_id")

    def __init__(
        self,
        step_id: int,
        begin_s: float,
        planned_s: float,
        launched_s: float,
        counts: tuple[int, int, int],
        graphs: UsedGraphs,
    ) -> None:
        self.step_id = step_id
        self.begin_s = begin_s
        self.planned_s = planned_s
        self.launched_s = launched_s
        self.counts = counts  # decodes, chunks, prompt tokens
        self.graphs = graphs
        self.masking_s = 0.0
        self.masked_s = 0.0


class StepTimeline:
    """A ring buffer of step records. Steps must end in the order of their launch."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._in_flight: deque[StepInFlight] = deque()
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    @property
    def records(self) -> list[StepRecord]:
        """The steps that have ended, oldest first."""
        return list(self._records)

    @property
    def newest(self) -> StepInFlight | None:
        """The step launched last; None = no step is in flight."""
        return self._in_flight[-1] if self._in_flight else None

    def record_launch(
        self, plan: StepPlan, graphs: UsedGraphs, begin_s: float, planned_s: float, launched_s: float
    ) -> None:
        """Record the launch of a step."""
        num_decodes = len(plan.decode_rows)
        counts = (num_decodes, len(plan.chunks), plan.num_new_tokens - num_decodes if plan.chunks else 0)
        self._in_flight.append(StepInFlight(plan.step_id, begin_s, planned_s, launched_s, counts, graphs))

    def record_masks(self, masking_s: float, masked_s: float) -> None:
        """Record that the newest step in flight has its masks."""
        step = self._in_flight[-1]
        step.masking_s, step.masked_s = masking_s, masked_s

    def record_end(self, waiting_s: float, collected_s: float, applied_s: float) -> StepRecord:
        """Record the end of the oldest step in flight."""
        step = self._in_flight.popleft()
        record = StepRecord(
            step.step_id,
            step.begin_s,
            step.planned_s,
            step.launched_s,
            *step.counts,
            step.graphs,
            waiting_s,
            collected_s,
            applied_s,
            step.masking_s,
            step.masked_s,
        )
        self._records.append(record)
        return record

    def to_trace(self) -> bytes:
        """The records as JSON in Chrome's trace format, which Perfetto reads too (ui.perfetto.dev).

        One track shows the host: plan, launch, masks (where a row follows a grammar), wait, apply. The other
        shows the steps on the device, from their launch to the arrival of their tokens. Two steps overlap
        there if one is launched before the tokens of the one before have arrived.
        """
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "minisgl engine"}},
            {"ph": "M", "pid": 1, "tid": HOST_TRACK, "name": "thread_name", "args": {"name": "host"}},
            {
                "ph": "M",
                "pid": 1,
                "tid": DEVICE_TRACK,
                "name": "thread_name",
                "args": {"name": "steps in flight"},
            },
        ]
        for record in self._records:
            events += _events(record)
        return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _events(record: StepRecord) -> list[dict[str, object]]:
    parts = [
        ("plan", record.begin_s, record.planned_s),
        ("launch", record.planned_s, record.launched_s),
        *([("masks", record.masking_s, record.masked_s)] if record.masked_s else []),
        ("wait", record.waiting_s, record.collected_s),
        ("apply", record.collected_s, record.applied_s),
    ]
    events: list[dict[str, object]] = [
        {
            "ph": "X",
            "pid": 1,
            "tid": HOST_TRACK,
            "name": name,
            "ts": begin_s * 1e6,
            "dur": (end_s - begin_s) * 1e6,
            "args": {"step": record.step_id},
        }
        for name, begin_s, end_s in parts
    ]
    facts = {
        "step": record.step_id,
        "decodes": record.num_decodes,
        "decode graph": record.graphs.decode_rows,
        "chunks": record.num_chunks,
        "prompt tokens": record.num_prompt_tokens,
        "prefill graph": record.graphs.prefill_tokens,
        "decodes with chunks": record.graphs.joined,
    }
    kinds = [
        kind for kind, count in (("decode", record.num_decodes), ("prefill", record.num_chunks)) if count
    ]
    common = {"cat": "step", "id": record.step_id, "pid": 1, "tid": DEVICE_TRACK, "name": " + ".join(kinds)}
    events.append({"ph": "b", "ts": record.launched_s * 1e6, "args": facts, **common})
    events.append({"ph": "e", "ts": record.collected_s * 1e6, **common})
    load = {"decodes": record.num_decodes, "prompt tokens": record.num_prompt_tokens}
    events.append({"ph": "C", "pid": 1, "name": "load", "ts": record.launched_s * 1e6, "args": load})
    return events
