"""Do all attention backends agree on this GPU, and what does each cost?

    python bench/attention_backends.py --out attention-backends.json
    python bench/attention_backends.py triton flashinfer-fa2 --engine-only --model gemma-3-1b

First attention alone, 32 query and 8 KV heads of 128: prompts whole and in chunks, decode steps with and
without a CUDA graph, over random pages and lengths in a pool that is NaN where no token lies. Compared with
the torch backend in float32; bar: a relative error under 1e-2. Beside it the time of a decode step alone,
from a graph (64 rows of about 2000 tokens), the host's time to plan one, and whether planning waits for the
GPU, which it must not.

Then the engine with graphs, on four layers of a model's shape with random weights: log probabilities of
prompts, and greedy tokens. Bar: log probabilities within 0.1 of the torch backend's; tokens equal, or
different for the first time where the two likeliest are within 0.1. Exit code 1 where a bar is missed.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from minisgl.attention.backends import build_backend, select
from minisgl.attention.choice import AttentionEnvironment, available, choose
from minisgl.attention.flashinfer import AttentionShape
from minisgl.attention.interface import AttentionInputs, Backend
from minisgl.benchmark.model_configs import MODEL_CONFIGS
from minisgl.config import EngineConfig
from minisgl.engine.graphs.graph_recorder import GraphRecorder
from minisgl.engine.start.build import build_engine
from minisgl.engine.start.device import find_device_facts
from minisgl.engine.step.attention_planner import AttentionPlanner
from minisgl.engine.step.inputs import HostPageTable, Stager
from minisgl.ipc.messages import AddRequest
from minisgl.request import SamplingParams, TokenLogprobs
from minisgl.scheduler.plan import Chunk, PageUpdate, StepPlan

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
ERROR_BAR = 1e-2
LOGPROB_BAR = 0.1
SLEEP_CYCLES = 200_000_000  # about 0.1 s
MAX_WAIT_MS = 20.0


class Pool:
    """Rows of given lengths on random pages; NaN wherever no token lies, but for the scratch page."""

    def __init__(
        self, lengths: list[int], longest: int, window: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.lengths = lengths
        self.window = window
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        pages = (torch.randperm(sum(counts)) + 1).split(counts)
        shape = (sum(counts) + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.k_cache, self.v_cache = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        for cache in (self.k_cache, self.v_cache):
            cache[0] = 0.0
            for length, ids in zip(lengths, pages, strict=True):
                if length % PAGE_SIZE:
                    cache[ids[-1], length % PAGE_SIZE :] = float("nan")
        self.host_table = HostPageTable(len(lengths), -(-longest // PAGE_SIZE), PAGE_SIZE)
        updates = [PageUpdate(row, 0, ids.numpy().astype("<i4").tobytes()) for row, ids in enumerate(pages)]
        self.host_table.update(StepPlan(0, (), tuple(updates), (), (), ()))
        table = torch.zeros(len(lengths) + 1, -(-longest // PAGE_SIZE), dtype=torch.int32)
        for row, ids in enumerate(pages):
            table[row, : len(ids)] = ids
        self.table = table.to(device)

    def inputs(self, rows: list[int], new_tokens: list[int], *, is_decode: bool) -> AttentionInputs:
        device = self.table.device
        lengths = [self.lengths[row] for row in rows]
        return AttentionInputs(
            self.table,
            torch.tensor(rows, dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            torch.empty(0, device=device),
            torch.tensor([0, *new_tokens], device=device).cumsum(0).int(),
            max(new_tokens),
            is_decode,
        )


class Alone(NamedTuple):
    """One backend, without a model."""

    prefill_error: float
    decode_error: float
    decode_us: float  # of 64 rows, from a graph
    plan_us: dict[int, float]  # by rows; the host's
    plan_waits: bool


def relative_error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def exact_attention(pool: Pool, q: Tensor, inputs: AttentionInputs) -> Tensor:
    return select("torch")(
        q.float(), pool.k_cache.float(), pool.v_cache.float(), inputs, SCALE, pool.window, 0.0
    )


@torch.inference_mode()
def check_alone(
    name: str, pool: Pool, place: AttentionEnvironment, device: torch.device, dtype: torch.dtype
) -> Alone:
    """The backend over one pool."""
    rows = len(pool.lengths)
    stager = Stager(device)
    shape = AttentionShape(
        HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, SCALE, frozenset({pool.window}), dtype, device
    )
    backend = build_backend(
        choose(name, place),
        shape,
        lambda target, source: stager.overwrite(target, [source]),
        buckets=(4, rows),
        max_rows=rows,
        max_context_tokens=pool.table.shape[1] * PAGE_SIZE,
    )
    planner = AttentionPlanner(backend, pool.host_table)
    prefill_error = max(
        prefill(backend, planner, pool, chunk_rows, new_tokens, dtype)
        for chunk_rows, new_tokens in (
            ([0, 1, 2, 3], [pool.lengths[row] for row in range(4)]),
            ([3, 0, 5], [1, pool.lengths[0] // 3, 17]),
            ([2, 4], [1, 1]),
        )
    )
    everyone = list(range(rows))
    recorded = RecordedDecode(backend, planner, pool, rows, dtype)
    errors = [recorded.error(everyone), recorded.error(everyone[::-1]), recorded.error(everyone[: rows // 2])]
    if backend.plan_decode is not None:
        errors += [unrecorded_error(backend, planner, pool, everyone[:13], dtype)]
    plan_us = {n: plan_time_us(planner, pool, everyone[:n], n) for n in (4, rows)}
    recorded.load(everyone)
    return Alone(prefill_error, max(errors), recorded.time_us(), plan_us, plan_waits(planner, recorded, rows))


def prefill(
    backend: Backend,
    planner: AttentionPlanner,
    pool: Pool,
    rows: list[int],
    new: list[int],
    dtype: torch.dtype,
) -> float:
    """The last `new` tokens of each row's."""
    inputs = pool.inputs(rows, new, is_decode=False)
    q = torch.randn(sum(new), HEADS, HEAD_DIM, device=pool.table.device, dtype=dtype)
    planner.plan_prefill(
        tuple(
            Chunk(row, pool.lengths[row] - count, bytes(4 * count), True)
            for row, count in zip(rows, new, strict=True)
        )
    )
    return relative_error(
        backend.attend(q, pool.k_cache, pool.v_cache, inputs, SCALE, pool.window, 0.0),
        exact_attention(pool, q, inputs),
    )


def set_lengths(planner: AttentionPlanner, pool: Pool, rows: list[int]) -> None:
    """So that the next decode of these rows sees all their tokens."""
    planner.plan_prefill(
        tuple(Chunk(row, pool.lengths[row] - 2, bytes(4), True) for row in rows if pool.lengths[row] > 1)
    )


def unrecorded_error(
    backend: Backend, planner: AttentionPlanner, pool: Pool, rows: list[int], dtype: torch.dtype
) -> float:
    inputs = pool.inputs(rows, [1] * len(rows), is_decode=True)
    q = torch.randn(len(rows), HEADS, HEAD_DIM, device=pool.table.device, dtype=dtype)
    set_lengths(planner, pool, rows)
    planner.plan_decode(rows, len(rows))
    got = backend.attend(q, pool.k_cache, pool.v_cache, inputs, SCALE, pool.window, 0.0)
    return relative_error(got, exact_attention(pool, q, inputs))


class RecordedDecode:
    """A decode step's attention, recorded with padding and replayed on others, as the engine does."""

    def __init__(
        self, backend: Backend, planner: AttentionPlanner, pool: Pool, bucket: int, dtype: torch.dtype
    ) -> None:
        self._planner, self._pool, self._bucket = planner, pool, bucket
        device = pool.table.device
        self._padding = len(pool.lengths)
        self._q = torch.randn(bucket, HEADS, HEAD_DIM, device=device, dtype=dtype)
        self._row_ids = torch.full((bucket,), self._padding, dtype=torch.int32, device=device)
        self._context_len = torch.ones(bucket, dtype=torch.int32, device=device)
        row_start = torch.arange(bucket + 1, dtype=torch.int32, device=device)
        slots = torch.empty(0, device=device)
        inputs = AttentionInputs(
            pool.table, self._row_ids, self._context_len, slots, row_start, 1, is_decode=True
        )

        def run() -> Tensor:
            return backend.attend(self._q, pool.k_cache, pool.v_cache, inputs, SCALE, pool.window, 0.0)

        planner.plan_decode((), bucket)
        self._recorder = GraphRecorder() if device.type == "cuda" else None
        self._replay: Callable[[], Tensor] = run if self._recorder is None else self._recorder.record(run)

    def set_lengths(self, rows: list[int]) -> None:
        set_lengths(self._planner, self._pool, rows)

    def load(self, rows: list[int]) -> None:
        """What the next replay computes: all tokens of these rows."""
        self.set_lengths(rows)
        padded = rows + [self._padding] * (self._bucket - len(rows))
        lengths = [*self._pool.lengths, 1]
        self._row_ids.copy_(torch.tensor(padded, dtype=torch.int32))
        self._context_len.copy_(torch.tensor([lengths[row] for row in padded], dtype=torch.int32))
        self._q.normal_()
        self._planner.plan_decode(rows, self._bucket)

    def error(self, rows: list[int]) -> float:
        self.load(rows)
        got = self._replay()[: len(rows)]
        inputs = self._pool.inputs(rows, [1] * len(rows), is_decode=True)
        return relative_error(got, exact_attention(self._pool, self._q[: len(rows)], inputs))

    def replay(self) -> None:
        self._replay()

    def time_us(self, times: int = 30) -> float:
        """Median of single replays; the pool is several times larger than the L2 cache."""
        if self._pool.table.device.type != "cuda":
            return float("nan")
        durations = []
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._replay()
            end.record()
            end.synchronize()
            durations.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(durations)


def plan_time_us(planner: AttentionPlanner, pool: Pool, rows: list[int], bucket: int) -> float:
    """The host's time to plan a decode step, GPU idle."""
    durations = []
    for _ in range(20):
        set_lengths(planner, pool, rows)
        synchronize(pool.table.device)
        begin = time.perf_counter()
        planner.plan_decode(rows, bucket)
        durations.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(durations)


def plan_waits(planner: AttentionPlanner, recorded: RecordedDecode, rows: int) -> bool:
    """Whether a step can't be planned and launched while the one before it runs."""
    if not torch.cuda.is_available():
        return False
    recorded.set_lengths(list(range(rows)))
    torch.cuda.synchronize()
    planner.plan_decode(range(rows), rows)  # the step that is in flight: its own tables are there already
    torch.cuda._sleep(SLEEP_CYCLES)
    recorded.replay()
    begin = time.perf_counter()
    planner.plan_decode(range(rows), rows)
    recorded.replay()
    waited_ms = (time.perf_counter() - begin) * 1e3
    torch.cuda.synchronize()
    return waited_ms > MAX_WAIT_MS


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Answer(NamedTuple):
    """What one request got."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[float]


class Served(NamedTuple):
    """An engine's answers next to those of the torch backend."""

    largest_logprob_error: float  # over all tokens of prompts
    equal: int  # requests with equal tokens
    close: int  # requests that differ, for the first time where the likeliest two are close
    wrong: int
    start_s: float


def serve(
    folder: Path, backend: str, settings: dict[str, Any], *, logprobs_of: int
) -> tuple[list[Answer], float]:
    """Greedy answers to prompts of many lengths that share beginnings, and how long the start took.

    Args:
        logprobs_of: every so many requests ask for log probabilities, whose rows are sampled once
            more behind the graph.
    """
    generator = np.random.default_rng(0)
    prefix = generator.integers(0, 10_000, 90)
    prompts = [
        np.concatenate([prefix[: 40 * (n % 3)], generator.integers(0, 10_000, 3 + 41 * n)]) for n in range(14)
    ]
    began = time.perf_counter()
    config = EngineConfig(model=str(folder), attention_backend=backend, **settings)
    engine = build_engine(config, folder, lambda stage, duration_ms: None)
    start_s = time.perf_counter() - began
    answers = []
    for number, prompt in enumerate(prompts):
        logprobs = 2 if number % logprobs_of == 0 else None
        greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24, logprobs=logprobs)
        for params in (replace(greedy, max_tokens=1, prompt_logprobs=1), greedy):
            engine.add(AddRequest(len(answers), prompt.astype("<i4").tobytes(), params))
            answers.append(Answer([], [], []))
    while engine.has_work:
        for output in engine.step():
            assert not output.error_message, output.error_message
            answer = answers[output.request_id]
            answer.token_ids.extend(output.token_ids)
            answer.logprobs.extend(output.logprobs or [])
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs.extend(one.logprob for one in output.prompt_logprobs.unpack())
    engine.close()
    return answers, start_s


def compare(got: list[Answer], expected: list[Answer], start_s: float) -> Served:
    largest = 0.0
    equal = near = wrong = 0
    for ours, theirs in zip(got, expected, strict=True):
        if theirs.prompt_logprobs:
            pairs = zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
            largest = max(largest, *(abs(a - b) for a, b in pairs))
        differing = [a != b for a, b in zip(ours.token_ids, theirs.token_ids, strict=True)]
        if not any(differing):
            equal += 1
        else:
            best, second = theirs.logprobs[differing.index(True)].top_logprobs[:2]
            is_near = best - second < LOGPROB_BAR
            near, wrong = near + is_near, wrong + (not is_near)
    return Served(largest, equal, near, wrong, start_s)


def four_layers(name: str, folder: Path) -> Path:
    """A config alone; its windows are shorter than the prompts, and every second layer has none."""
    raw = MODEL_CONFIGS[name] | {"num_hidden_layers": 4}
    if raw.get("sliding_window"):
        raw["sliding_window"] = 100
    if "sliding_window_pattern" in raw:
        raw["sliding_window_pattern"] = 2
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Do all attention backends agree on this GPU, and what does each cost?"
    )
    parser.add_argument("backends", nargs="*", help="auto: all that run here, and triton,flashinfer")
    parser.add_argument("--model", default="llama-3.1-8b", help="of minisgl/benchmark/model_configs.py")
    parser.add_argument("--engine-only", action="store_true")
    parser.add_argument("--alone-only", action="store_true")
    parser.add_argument("--window", type=int, default=0, help="tokens that each sees, of attention alone")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    facts = find_device_facts()
    device = torch.device("cuda" if facts.has_cuda else "cpu")
    dtype = torch.bfloat16 if facts.has_cuda else torch.float32
    heads = (HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
    kind = str(dtype).removeprefix("torch.")
    place = AttentionEnvironment(device.type, facts.compute_capability, facts.flashinfer, kind, *heads)
    names = arguments.backends
    if not names:  # one of those that are the same kernels
        exact = {choose(name, place): name for name in reversed(available(place)) if name != "torch"}
        names = [*reversed(exact.values()), *(["triton,flashinfer"] if facts.flashinfer else [])]
    longest = 2048 if facts.has_cuda else 64
    lengths = torch.randint(longest - 100 if facts.has_cuda else 40, longest, (64 if facts.has_cuda else 16,))
    pool = Pool([longest - PAGE_SIZE, 5, *lengths.tolist()[2:]], longest, arguments.window, device, dtype)

    report: dict[str, dict[str, Any]] = {name: {"exact": str(choose(name, place))} for name in names}
    failed = False
    if not arguments.engine_only:
        print(f"{'attention alone':<30}{'prefill':>10}{'decode':>10}{'us':>8}  plan us (rows)     plan waits")
        for name in names:
            found = check_alone(name, pool, place, device, dtype)
            wrong = not max(found.prefill_error, found.decode_error) < ERROR_BAR or found.plan_waits
            failed |= wrong
            report[name] |= found._asdict()
            planned = ", ".join(f"{us:.0f} ({rows})" for rows, us in found.plan_us.items())
            print(
                f"{name:<30}{found.prefill_error:>10.1e}{found.decode_error:>10.1e}{found.decode_us:>8.1f}"
                f"  {planned:<18} {found.plan_waits} {'MISSED' if wrong else ''}",
                flush=True,
            )
    del pool
    if not arguments.alone_only:
        settings: dict[str, Any] = {"dummy_weights": True, "max_context_tokens": 1024, "num_pages": 1500}
        settings |= {"max_running_requests": 24, "compile_mode": "off"}
        if not facts.has_cuda:
            settings |= {"max_context_tokens": 700, "num_pages": 300}
        print(f"{'engine':<30}{'logprob error':>14}{'equal':>8}{'close':>8}{'wrong':>8}{'start s':>9}")
        with tempfile.TemporaryDirectory() as made:
            folder = four_layers(arguments.model, Path(made))
            expected, _ = serve(folder, "torch", settings, logprobs_of=1)
            for name in names:
                answers, start_s = serve(folder, name, settings, logprobs_of=2)
                served = compare(answers, expected, start_s)
                missed = not served.largest_logprob_error < LOGPROB_BAR or served.wrong > 0
                failed |= missed
                report[name] |= served._asdict()
                print(
                    f"{name:<30}{served.largest_logprob_error:>14.4f}{served.equal:>8}{served.close:>8}"
                    f"{served.wrong:>8}{served.start_s:>9.1f} {'MISSED' if missed else ''}",
                    flush=True,
                )
    if arguments.out:
        Path(arguments.out).write_text(json.dumps({"gpu": facts.cuda_name, "backends": report}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
