"""What does watching cost? Times notes, lives and pace beside the host's work for a step, at 256 rows.

python bench/watch.py --out bench/results/cpu/watch.json
Bar: under 1 % of a step's CPU while rows decode. The step here is plan, apply and the encoding of its
outputs, without launching and collecting, so the share of a real step is smaller. Times are the processor's.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from minisgl.engine.step_timeline import StepTimeline, UsedGraphs
from minisgl.engine.watch.pace import StepCounts
from minisgl.engine.watch.watch import EngineWatch
from minisgl.ipc.messages import AddRequest, StepOutput
from minisgl.ipc.questions import AskRequests
from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler

NUM_ROWS = 256
NUM_WAITING = 700
PROMPT_TOKENS = 300
PAGE_SIZE = 16
VOCAB_SIZE = 1 << 17


class Load:
    """Requests that come as others end, so that rows are full and the queue has `NUM_WAITING`."""

    def __init__(self, output_tokens: int, num_pages: int, num_waiting: int) -> None:
        cache = KVCacheManager(num_pages=num_pages, page_size=PAGE_SIZE)
        config = SchedulerConfig(
            max_rows=NUM_ROWS,
            max_step_tokens=8192,
            chunk_tokens=8192,
            mixed_step_tokens=1024,
            max_context_tokens=min(4096, (num_pages - 1) * PAGE_SIZE),
            vocab_size=VOCAB_SIZE,
        )
        self.scheduler = Scheduler(config, cache)
        self.watch = EngineWatch(self.scheduler, StepCounts)
        self._timeline = StepTimeline()
        self._rng = np.random.default_rng(0)
        self._output_tokens = output_tokens
        self._num_added = 0
        self._messages: deque[bytes] = deque()
        self._decoder = msgspec.msgpack.Decoder(AddRequest)
        self._wanted = NUM_ROWS + num_waiting
        self._pending: StepPlan | None = None
        self.watch_s = 0.0

    def prepare(self, num_requests: int) -> None:
        """Encode the messages of the next requests, as a server would send them."""
        encode = msgspec.msgpack.Encoder().encode
        for number in range(self._num_added, self._num_added + num_requests):
            prompt = self._rng.integers(3, VOCAB_SIZE, PROMPT_TOKENS).astype("<i4").tobytes()
            length = int(self._output_tokens * self._rng.uniform(0.5, 1.5)) + 1
            params = SamplingParams(max_tokens=length, ignore_eos=True, seed=number)
            self._messages.append(encode(AddRequest(number, prompt, params, call_id=f"call-{number}")))
        self._num_added += num_requests

    def add(self) -> None:
        """Fill up the queue, as the engine does with messages."""
        while self.scheduler.num_waiting + self.scheduler.num_running < self._wanted:
            call = self._decoder.decode(self._messages.popleft())
            prompt = np.frombuffer(call.prompt_ids, dtype="<i4").astype(np.int32)
            self.scheduler.add(call.request_id, prompt, call.params)
            began_s = time.perf_counter()
            self.watch.record(began_s, call)
            self.watch_s += time.perf_counter() - began_s

    def step(self) -> None:
        """One step, with one more in flight, and what the engine does with its results."""
        begin_s = time.perf_counter()
        plan = self.scheduler.plan()
        planned_s = time.perf_counter()
        self.watch.record(planned_s)
        self.watch_s += time.perf_counter() - planned_s
        if plan is not None:
            self._timeline.record_launch(plan, UsedGraphs(), begin_s, planned_s, time.perf_counter())
        step, self._pending = self._pending, plan
        if step is None:
            return
        waiting_s = time.perf_counter()
        self.scheduler.apply(step, [7] * len(step.sampled_rows))
        applied_s = time.perf_counter()
        record = self._timeline.record_end(waiting_s, waiting_s, applied_s)
        counting_s = time.perf_counter()
        self.watch.count_step(record, self._timeline.newest)
        self.watch_s += time.perf_counter() - counting_s
        msgspec.msgpack.encode(StepOutput(self.scheduler.take_outputs()))


def note_us() -> float:
    """What the scheduler pays for one note, in microseconds (the dearest kind, which has four fields)."""
    load = Load(10, 4096, 0)
    load.prepare(NUM_ROWS)
    load.add()
    _, queue = load.scheduler.open_requests()
    journal = load.scheduler.journal
    times = []
    for _ in range(50):
        began_s = time.perf_counter()
        for request in queue:
            journal.added(request)
        times.append((time.perf_counter() - began_s) / len(queue) * 1e6)
        journal.take()
    return statistics.median(times)


def typical(times: list[float]) -> float:
    """The mean without the tenth that took longest, when other programs had the processor."""
    return statistics.mean(sorted(times)[: int(0.9 * len(times))])


def measure(
    name: str, output_tokens: int, num_pages: int, num_steps: int, one_note_us: float, num_waiting: int
) -> dict[str, Any]:
    """Run a load; its row of the report."""
    load = Load(output_tokens, num_pages, num_waiting)
    load.prepare(2 * NUM_ROWS * (num_steps + 200) // output_tokens + 2 * (NUM_ROWS + num_waiting))
    load.add()
    gc.freeze()  # as the engine does
    for _ in range(100):
        load.add()
        load.step()
    notes = 0
    take = load.scheduler.journal.take

    def counted() -> Any:
        nonlocal notes
        taken = take()
        notes += len(taken)
        return taken

    load.scheduler.journal.take = counted
    whole, watched = [], []
    for _ in range(num_steps):
        load.watch_s = 0.0
        began_s = time.thread_time()
        load.add()
        load.step()
        whole.append((time.thread_time() - began_s) * 1e6)
        watched.append(load.watch_s * 1e6)
    notes_us = notes / num_steps * one_note_us
    step_us, watch_us = typical(whole), typical(watched) + notes_us
    row = {
        "load": name,
        "step_us": round(step_us, 1),
        "watch_us": round(watch_us, 2),
        "notes_per_step": round(notes / num_steps, 2),
        "preemptions": load.scheduler.stats.num_preemptions,
        "share_percent": round(100 * watch_us / (step_us - watch_us), 2),
    }
    ask_ms, size = [], 0
    for _ in range(20):
        began_s = time.perf_counter()
        size = len(load.watch.answer(AskRequests(0, limit=100)))
        ask_ms.append((time.perf_counter() - began_s) * 1e3)
    row |= {"answer_of_100_ms": round(statistics.median(ask_ms), 2), "answer_bytes": size}
    load.watch.close()
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    one_note_us = note_us()
    print(f"a note: {one_note_us:.2f} us")
    plenty = NUM_ROWS * 200
    rows = [
        measure("steady: nobody comes, nobody ends", 3500, plenty, args.steps, one_note_us, 0),
        measure(
            "answers of 500 tokens, 700 wait for rows", 500, plenty, args.steps, one_note_us, NUM_WAITING
        ),
        measure(
            "answers of 100 tokens, 700 wait for rows", 100, plenty, args.steps, one_note_us, NUM_WAITING
        ),
        measure("answers of 300 tokens, 700 wait for pages", 300, 6000, args.steps, one_note_us, NUM_WAITING),
    ]
    if args.out:
        report = {"python": platform.python_version(), "machine": platform.machine(), "note_us": one_note_us}
        args.out.write_text(json.dumps(report | {"rows": NUM_ROWS, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
