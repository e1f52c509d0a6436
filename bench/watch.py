"""What does watching cost? Times the host's work for a step with the watch and with nothing in its place.

python bench/watch.py --out bench/results/cpu/watch.json
Bar: under 1 % of a step's CPU while 256 rows decode. The step here is plan, apply and the encoding of its
outputs, without launching and collecting, so the share of a real step is smaller. Three schedulers do the
same work in turn, step by step and in several rounds: one with the watch, two without. A step's time is the
median of its rounds, so what other programs take does not count; the two without it show the error of the
method. Garbage is collected between the steps, as it would else always meet the same one of the three. Times
are the processor's.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Sequence
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
from minisgl.scheduler.journal import Journal
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler

NUM_ROWS = 256
NUM_WAITING = 700
PROMPT_TOKENS = 300
PAGE_SIZE = 16
WARM_UP_STEPS = 100
VOCAB_SIZE = 1 << 17


class Load:
    """Requests that come as others end, so that rows are full and the queue has `NUM_WAITING`."""

    def __init__(self, messages: Sequence[bytes], num_pages: int, num_waiting: int, is_watched: bool) -> None:
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
        self.watch = EngineWatch(self.scheduler, StepCounts) if is_watched else NoWatch(self.scheduler)
        self._timeline = StepTimeline()
        self._messages = iter(messages)
        self._decoder = msgspec.msgpack.Decoder(AddRequest)
        self._wanted = NUM_ROWS + num_waiting
        self._pending: StepPlan | None = None

    def add(self) -> None:
        """Fill up the queue, as the engine does with messages."""
        while self.scheduler.num_waiting + self.scheduler.num_running < self._wanted:
            call = self._decoder.decode(next(self._messages))
            prompt = np.frombuffer(call.prompt_ids, dtype="<i4").astype(np.int32)
            self.scheduler.add(call.request_id, prompt, call.params)
            self.watch.record(time.perf_counter(), call)

    def step(self) -> None:
        """One step, with one more in flight, and what the engine does with its results."""
        begin_s = time.perf_counter()
        plan = self.scheduler.plan()
        planned_s = time.perf_counter()
        self.watch.record(planned_s)
        if plan is not None:
            self._timeline.record_launch(plan, UsedGraphs(), begin_s, planned_s, time.perf_counter())
        step, self._pending = self._pending, plan
        if step is None:
            return
        waiting_s = time.perf_counter()
        self.scheduler.apply(step, [7] * len(step.sampled_rows))
        applied_s = time.perf_counter()
        record = self._timeline.record_end(waiting_s, waiting_s, applied_s)
        self.watch.count_step(record, self._timeline.newest)
        msgspec.msgpack.encode(StepOutput(self.scheduler.take_outputs()))


def messages_of(num: int, output_tokens: int) -> list[bytes]:
    """The encoded messages of requests, as a server would send them; always the same."""
    encode = msgspec.msgpack.Encoder().encode
    rng = np.random.default_rng(0)
    messages = []
    for number in range(num):
        prompt = rng.integers(3, VOCAB_SIZE, PROMPT_TOKENS).astype("<i4").tobytes()
        length = int(output_tokens * rng.uniform(0.5, 1.5)) + 1
        params = SamplingParams(max_tokens=length, ignore_eos=True, seed=number)
        messages.append(encode(AddRequest(number, prompt, params, call_id=f"call-{number}")))
    return messages


class NoWatch:
    """In the place of the watch: nothing. The scheduler writes no notes either."""

    def __init__(self, scheduler: Scheduler) -> None:
        notes = [name for name in vars(Journal) if not name.startswith("_") and name != "take"]
        for name in notes:
            setattr(scheduler.journal, name, self.nothing)

    def nothing(self, *_: object) -> None:
        """Do nothing."""

    record = count_step = nothing

    def close(self) -> None:
        """As the watch's."""


def times_of(loads: Sequence[Load], num_steps: int) -> list[list[float]]:
    """Microseconds of each step of each load, one step of each in turn."""
    times: list[list[float]] = [[] for _ in loads]
    gc.disable()
    for number in range(num_steps):
        if number % 10 == 0:
            gc.collect(1)
        for place in range(len(loads)):
            place = (place + number) % len(loads)
            began_s = time.thread_time()
            loads[place].add()
            loads[place].step()
            times[place].append((time.thread_time() - began_s) * 1e6)
    gc.enable()
    return times


def measure(
    name: str, output_tokens: int, num_pages: int, num_waiting: int, num_steps: int, num_rounds: int
) -> dict[str, Any]:
    """Run a load; its row of the report."""
    num = 2 * NUM_ROWS * (num_steps + 200) // output_tokens + 2 * (NUM_ROWS + num_waiting)
    messages = messages_of(num, output_tokens)
    rounds: list[list[list[float]]] = []
    loads: list[Load] = []
    for number in range(num_rounds):
        loads = [Load(messages, num_pages, num_waiting, is_watched) for is_watched in (True, False, False)]
        for place in range(len(loads)):  # memory that is taken first may be faster
            loads[(place + number) % len(loads)].add()
        gc.freeze()  # as the engine does
        times_of(loads, WARM_UP_STEPS)
        rounds.append(times_of(loads, num_steps))
        for load in loads:
            load.watch.close()
        gc.unfreeze()
    watched, *plain = (
        statistics.mean(statistics.median(step) for step in zip(*times, strict=True))
        for times in zip(*rounds, strict=True)
    )
    step_us = statistics.mean(plain)
    watching = loads[0].watch
    row: dict[str, Any] = {
        "load": name,
        "step_us": round(step_us, 1),
        "watch_us": round(watched - step_us, 2),
        "error_us": round(abs(plain[0] - plain[1]), 2),
        "share_percent": round(100 * (watched - step_us) / step_us, 2),
        "preemptions": loads[0].scheduler.stats.num_preemptions,
    }
    if isinstance(watching, EngineWatch):
        row["requests_per_step"] = round(watching.lives.num_ended / (num_steps + WARM_UP_STEPS), 2)
        ask_ms, size = [], 0
        for _ in range(20):
            began_s = time.perf_counter()
            size = len(watching.answer(AskRequests(0, limit=100)))
            ask_ms.append((time.perf_counter() - began_s) * 1e3)
        row |= {"answer_of_100_ms": round(statistics.median(ask_ms), 2), "answer_bytes": size}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    plenty = NUM_ROWS * 200
    loads = [
        ("steady: nobody comes, nobody ends", 3500, plenty, 0),
        ("answers of 500 tokens, 700 wait for rows", 500, plenty, NUM_WAITING),
        ("answers of 100 tokens, 700 wait for rows", 100, plenty, NUM_WAITING),
        ("answers of 300 tokens, 700 wait for pages", 300, 6000, NUM_WAITING),
    ]
    rows = [measure(*load, args.steps, args.rounds) for load in loads]
    if args.out:
        head = {"python": platform.python_version(), "machine": platform.machine(), "rows": NUM_ROWS}
        report = head | {"steps": args.steps, "rounds": args.rounds, "results": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
