"""What does watching cost? Times the host's work for a step with the watch and with nothing in its place.

python bench/watch.py --out bench/results/cpu/watch.json
Bar: under 1 % of a step's CPU while 256 rows decode. Two kinds of steps are measured:
 scheduler  plan, apply and the encoding of the outputs: the smallest part of a step that can be compared
 host       all that an engine's thread does for a step: receive, plan, build and pack inputs, collect, apply,
            encode, send. Two stand-ins take the place of the device's graphs and return at once, so the step
            has neither a model nor calls of CUDA, and the share of a real step is smaller
Three loads do the same work in turn: one with the watch, two without; a step's time is the median of its
rounds. The two without it show the error of the method. Garbage is collected between the steps. Short
requests run first: in fresh memory, notes lie between the requests, and the walk over these takes longer.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from minisgl.config import EngineConfig
from minisgl.engine.graphs.buckets import PrefillBucket
from minisgl.engine.graphs.decode_graphs import DecodeGraphs
from minisgl.engine.graphs.prefill_graphs import PrefillChoice, PrefillGraphs
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.start.build import build_engine
from minisgl.engine.step.inputs import Decodes, HostPageTable, build_prefill, prefill_size, row_ids_to_device
from minisgl.engine.step.steps import StepOutput as DeviceOutput
from minisgl.engine.watch.pace import StepCounts
from minisgl.engine.watch.step_timeline import StepTimeline, UsedGraphs
from minisgl.engine.watch.watch import EngineWatch
from minisgl.ipc.messages import AddRequest, StepOutput
from minisgl.ipc.questions import AskRequests
from minisgl.ipc.transport import EngineSocket, ServerSocket, make_ipc_dir
from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.journal import Journal
from minisgl.scheduler.plan import Chunk, StepPlan
from minisgl.scheduler.scheduler import Scheduler

NUM_ROWS = 256
NUM_WAITING = 700
PROMPT_TOKENS = 300
NUM_LOADS = 3
"""The first one is watched."""
PAGE_SIZE = 16
WARM_UP_STEPS = 700
"""They end the requests that come first."""
NUM_FIRST = 3000
FIRST_TOKENS = 64
STEP_TOKENS = 8192
MIXED_STEP_TOKENS = 1024
VOCAB_SIZE = 1 << 17
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""It is never run."""


class SchedulerLoad:
    """A scheduler with requests that come as others end: rows are full and the queue has `num_waiting`."""

    def __init__(self, messages: Sequence[bytes], num_pages: int, num_waiting: int, is_watched: bool) -> None:
        cache = KVCacheManager(num_pages=num_pages, page_size=PAGE_SIZE)
        config = SchedulerConfig(
            max_rows=NUM_ROWS,
            max_step_tokens=STEP_TOKENS,
            chunk_tokens=STEP_TOKENS,
            mixed_step_tokens=MIXED_STEP_TOKENS,
            max_context_tokens=context_tokens(num_pages),
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

    def close(self) -> None:
        """Stop watching."""
        self.watch.close()


class HostLoad:
    """An engine whose device returns at once, with the same requests as a `SchedulerLoad`.

    Args:
        socket: takes the outputs; another process reads them.
    """

    def __init__(
        self,
        messages: Sequence[bytes],
        num_pages: int,
        num_waiting: int,
        is_watched: bool,
        folder: Path,
        socket: EngineSocket,
    ) -> None:
        config = EngineConfig(
            model=str(folder),
            dummy_weights=True,
            device="cpu",
            compile_mode="off",
            overlap=True,
            max_running_requests=NUM_ROWS,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            max_step_tokens=STEP_TOKENS,
            chunk_tokens=STEP_TOKENS,
            mixed_step_tokens=MIXED_STEP_TOKENS,
            max_context_tokens=context_tokens(num_pages),
        )
        self.engine = build_engine(config, folder, lambda stage, duration_ms: None)
        runner = self.engine.runner
        runner.decode_graphs = cast(DecodeGraphs, NoDecodeGraphs(runner))
        runner.prefill_graphs = cast(PrefillGraphs, NoPrefillGraphs(runner))
        self.scheduler = self.engine._scheduler
        if not is_watched:
            self.engine.watch = cast(EngineWatch, NoWatch(self.scheduler))
        self.watch = self.engine.watch
        self._socket = socket
        self._messages = iter(messages)
        self._decoder = msgspec.msgpack.Decoder(AddRequest)
        self._wanted = NUM_ROWS + num_waiting

    def add(self) -> None:
        """Look for messages, then fill up the queue, as the engine's process does."""
        self._socket.receive(0)
        while self.scheduler.num_waiting + self.scheduler.num_running < self._wanted:
            self.engine.add(self._decoder.decode(next(self._messages)))

    def step(self) -> None:
        """One turn of the loop of the engine's process."""
        outputs = self.engine.step()
        if outputs:
            self._socket.send_outputs(StepOutput(outputs))

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


class NoDecodeGraphs:
    """In the place of the decode graphs: their inputs are made, then every row has the same token."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._tokens = torch.full((NUM_ROWS,), 7, dtype=torch.int32)

    def __call__(self, rows: tuple[int, ...]) -> Tensor:
        self._runner.planner.plan_decode(rows, NUM_ROWS)
        row_ids_to_device(self._tokens.device, rows)
        return self._tokens

    def bucket_of(self, num_rows: int) -> int:
        """As the real ones'."""
        return num_rows

    def duration_us(self, num_rows: int) -> float:
        """As the real ones'."""
        return float(num_rows)


class NoPrefillGraphs:
    """In the place of the prefill graphs: their inputs are packed, then every row has the same token."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def choose(
        self, chunks: tuple[Chunk, ...], num_decodes: int = 0, decode_us: float = 0.0
    ) -> PrefillChoice:
        """As the real ones', but decodes never join."""
        return PrefillChoice(prefill_size(chunks), False, 0.0)

    def run(
        self, chunks: tuple[Chunk, ...], decodes: Decodes, bucket: PrefillBucket, pages: HostPageTable
    ) -> DeviceOutput:
        """As the real ones'."""
        batch = build_prefill(chunks, pages, self._runner.stager, decodes)
        return DeviceOutput(torch.full((len(batch.row_ids),), 7, dtype=torch.int32), None)


def context_tokens(num_pages: int) -> int:
    """The longest request that a pool can hold."""
    return min(4096, (num_pages - 1) * PAGE_SIZE)


def messages_of(num: int, output_tokens: int) -> list[bytes]:
    """The encoded messages of `num` requests behind short ones, as a server sends them; always the same."""
    encode = msgspec.msgpack.Encoder().encode
    rng = np.random.default_rng(0)
    messages = []
    for number in range(NUM_FIRST + num):
        is_first = number < NUM_FIRST
        num_prompt = FIRST_TOKENS if is_first else PROMPT_TOKENS
        prompt = rng.integers(3, VOCAB_SIZE, num_prompt).astype("<i4").tobytes()
        length = int(rng.integers(1, FIRST_TOKENS) if is_first else output_tokens * rng.uniform(0.5, 1.5)) + 1
        params = SamplingParams(max_tokens=length, ignore_eos=True, seed=number)
        messages.append(encode(AddRequest(number, prompt, params, call_id=f"call-{number}")))
    return messages


class NoWatch:
    """In the place of the watch: nothing. The scheduler writes no notes either."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.pace = self
        self.recorded_at_s = 0.0
        notes = [name for name in vars(Journal) if not name.startswith("_") and name != "take"]
        for name in notes:
            setattr(scheduler.journal, name, self.nothing)

    def nothing(self, *_: object) -> None:
        """Do nothing."""

    record = count_step = rest = nothing

    def close(self) -> None:
        """As the watch's."""


Load = SchedulerLoad | HostLoad


def ended_of(load: Load) -> int:
    """Requests of a watched load that have ended."""
    return load.watch.lives.num_ended if isinstance(load.watch, EngineWatch) else 0


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
    make: Callable[[Sequence[bytes], int, int, bool], Load],
    name: str,
    output_tokens: int,
    num_pages: int,
    num_waiting: int,
    num_steps: int,
    num_rounds: int,
) -> dict[str, Any]:
    """Run a load that `make` makes of messages, pages, waiting requests and whether it is watched; its row of
    the report."""
    num = 2 * NUM_ROWS * (num_steps + 700) // output_tokens + 2 * (NUM_ROWS + num_waiting)
    messages = messages_of(num, output_tokens)
    rounds: list[list[list[float]]] = []
    loads: list[Load] = []
    before = 0
    for number in range(num_rounds):
        made: dict[int, Load] = {}
        for turn in range(NUM_LOADS):  # memory that is taken first may be faster
            place = (turn + number) % NUM_LOADS
            made[place] = make(messages, num_pages, num_waiting, place == 0)
            made[place].add()
        loads = [made[place] for place in range(NUM_LOADS)]
        gc.freeze()  # as the engine does
        times_of(loads, WARM_UP_STEPS)
        before = ended_of(loads[0])
        rounds.append(times_of(loads, num_steps))
        gc.unfreeze()
        if number < num_rounds - 1:
            for load in loads:
                load.close()
    watched, *plain = (
        statistics.mean(statistics.median(step) for step in zip(*times, strict=True))
        for times in zip(*rounds, strict=True)
    )
    step_us = statistics.mean(plain)
    watching = loads[0].watch
    row: dict[str, Any] = {
        "step": "host" if isinstance(loads[0], HostLoad) else "scheduler",
        "load": name,
        "step_us": round(step_us, 1),
        "watch_us": round(watched - step_us, 2),
        "error_us": round(abs(plain[0] - plain[1]), 2),
        "share_percent": round(100 * (watched - step_us) / step_us, 2),
        "preemptions": loads[0].scheduler.stats.num_preemptions,
    }
    if isinstance(watching, EngineWatch):
        row["requests_per_step"] = round((ended_of(loads[0]) - before) / num_steps, 2)
        ask_ms, size = [], 0
        for _ in range(20):
            began_s = time.perf_counter()
            size = len(watching.answer(AskRequests(0, limit=100)))
            ask_ms.append((time.perf_counter() - began_s) * 1e3)
        row |= {"answer_of_100_ms": round(statistics.median(ask_ms), 2), "answer_bytes": size}
    for load in loads:
        load.close()
    print(json.dumps(row), flush=True)
    return row


@contextmanager
def engine_socket() -> Iterator[EngineSocket]:
    """An engine's socket; another process reads what is sent."""
    folder = make_ipc_dir()
    reader = multiprocessing.get_context("spawn").Process(target=read_all, args=(folder,), daemon=True)
    reader.start()
    socket = None
    try:
        socket = EngineSocket(folder)
        yield socket
    finally:
        if socket is not None:
            socket.close()
        reader.terminate()
        reader.join()
        shutil.rmtree(folder)


def read_all(ipc_dir: Path) -> None:
    """Read an engine's messages until the process is ended."""

    async def read() -> None:
        socket = ServerSocket(ipc_dir)
        while True:
            await socket.receive()

    asyncio.run(read())


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
    rows = [measure(SchedulerLoad, *load, args.steps, args.rounds) for load in loads]
    torch.set_num_threads(1)
    with engine_socket() as socket, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(TINY_MODEL))

        def make(messages: Sequence[bytes], num_pages: int, num_waiting: int, is_watched: bool) -> HostLoad:
            return HostLoad(messages, num_pages, num_waiting, is_watched, folder, socket)

        rows += [measure(make, *load, args.steps, args.rounds) for load in loads]
    if args.out:
        head = {"python": platform.python_version(), "machine": platform.machine(), "rows": NUM_ROWS}
        report = head | {"steps": args.steps, "rounds": args.rounds, "results": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
