"""Times single steps of an engine: decode, prefill, and both in one step.

Promise: a step is timed as a server runs it, with the next step always queued behind it.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from minisgl.benchmark.kernels.kernel_timing import Ceilings
from minisgl.benchmark.reports.report import Cell
from minisgl.benchmark.steps.step_floor import Work, costs_of, expected_experts_hit, experts_hit
from minisgl.engine.engine import Engine
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.step.inputs import build_prefill
from minisgl.engine.step.steps import DecodeStep, prefill_step
from minisgl.kvcache.pool_figures import pool_figures
from minisgl.model_config.config import ModelConfig
from minisgl.parallel.sizes import rank_sizes
from minisgl.scheduler.plan import Chunk, PageUpdate, RowInit, StepPlan

WARM_UP_STEPS = 3
ROUTED_STEPS = 3
"""Decode steps in which the experts that get a token are counted."""
PROFILED_STEPS = 20


class Times(NamedTuple):
    """The times of one point's steps."""

    wall_ms: list[float]
    device_ms: list[float] | None  # between CUDA events


class StepMeasurements:
    """Measures points and keeps their results; points that do not fit go into the table "left_out".

    Attributes:
        num_unmeasured_compilations: compilations outside the measured steps.
    """

    def __init__(self, engine: Engine, model_config: ModelConfig, steps: int, ceilings: Ceilings) -> None:
        self.samples: dict[str, list[float]] = {}
        self.tables: dict[str, list[dict[str, Cell]]] = {
            "decode": [],
            "prefill": [],
            "mixed": [],
            "left_out": [],
        }
        self.num_unmeasured_compilations = 0
        self._engine = engine
        self._model_config = model_config
        self._steps = steps
        self._ceilings = ceilings
        self._costs = costs_of(engine.runner, rank_sizes(model_config, engine.config.tp))
        self._rng = np.random.default_rng(0)

    def decode(self, batch: int, context: int) -> None:
        """Time decode steps of `batch` rows, whose lengths grow by one token a step and average `context`.

        If `context` is too short for that, the rows begin with two tokens.
        """
        engine = self._engine
        profiled_steps = PROFILED_STEPS if engine.config.tp > 1 and engine.config.device == "cuda" else 0
        start = max(2, context - self._steps // 2)
        num_tokens = start + self._steps + WARM_UP_STEPS + ROUTED_STEPS + profiled_steps + 1
        if not _fits(engine, batch, start, num_tokens):
            self._leave_out(f"decode {batch} x {context}")
            return
        place_rows(engine, batch, start, num_tokens)
        rows = tuple(range(batch))
        plan = StepPlan(0, (), (), rows, (), rows)
        times = time_steps(engine, plan, self._steps)
        hit = self._experts_hit(batch, batch, partial(_decode_uncompiled, engine.runner, rows))
        work = self._costs.decode(batch, start + WARM_UP_STEPS + self._steps / 2, hit)
        row = {"batch": batch, "context": context, **_row(times, work, self._ceilings, hit)}
        row["output_tokens_per_s"] = 1e3 * batch / statistics.median(times.wall_ms)
        if profiled_steps:
            row["collectives"] = _share_of_collectives(engine, plan, profiled_steps)
        self._keep("decode", row, f"decode_{batch}x{context}_ms", times)

    def prefill(self, num_tokens: int, prefix: int) -> None:
        """Time prefill steps of `num_tokens` tokens after a prefix of `prefix` tokens."""
        engine = self._engine
        if num_tokens > engine.config.chunk_tokens or not _fits(engine, 1, prefix + 1, prefix + num_tokens):
            self._leave_out(f"prefill {num_tokens} on {prefix}")
            return
        place_rows(engine, 1, prefix + 1, prefix + num_tokens)
        plan = StepPlan(0, (), (), (), (self._chunk(0, prefix, num_tokens),), (0,))
        times = time_steps(engine, plan, self._num_prompt_steps)
        hit = self._experts_hit(num_tokens, 1, partial(_prefill_uncompiled, engine.runner, plan.chunks))
        row = {"new_tokens": num_tokens, "prefix": prefix}
        row |= _row(times, self._costs.prefill(num_tokens, prefix, hit), self._ceilings, hit)
        row["prompt_tokens_per_s"] = 1e3 * num_tokens / statistics.median(times.wall_ms)
        self._keep("prefill", row, f"prefill_{num_tokens}on{prefix}_ms", times)

    def mixed(self, batch: int, context: int, num_tokens: int) -> None:
        """Time steps that decode `batch` rows of `context` tokens and prefill a prompt of `num_tokens`."""
        engine = self._engine
        room = max(context + self._num_prompt_steps + WARM_UP_STEPS + 2, num_tokens)
        too_many = num_tokens > engine.config.chunk_tokens
        too_many = too_many or batch + num_tokens > engine.config.max_step_tokens
        if too_many or not _fits(engine, batch + 1, context, room):
            self._leave_out(f"mixed {batch} x {context} + {num_tokens}")
            return
        place_rows(engine, batch + 1, context, room)
        chunks = (self._chunk(batch, 0, num_tokens),)
        rows = tuple(range(batch))
        plan = StepPlan(0, (), (), rows, chunks, (*rows, batch), decode_lengths=(context + 1,) * batch)
        times = time_steps(engine, plan, self._num_prompt_steps)
        engine.collect(last := engine.launch(plan))
        row = {"batch": batch, "context": context, "new_tokens": num_tokens, "joined": last.graphs.joined}
        row |= {"graph_tokens": last.graphs.prefill_tokens, **_medians(times)}
        self._keep("mixed", row, f"mixed_{batch}x{context}+{num_tokens}_ms", times)

    @property
    def _num_prompt_steps(self) -> int:
        return max(3, self._steps // 3)

    def _chunk(self, row: int, prefix: int, num_tokens: int) -> Chunk:
        token_ids = self._rng.integers(0, self._model_config.vocab_size, num_tokens).astype("<i4")
        return Chunk(row, prefix, token_ids.tobytes(), True)

    def _keep(self, table: str, row: dict[str, Cell], name: str, times: Times) -> None:
        self.tables[table].append(row)
        self.samples[name] = times.wall_ms

    def _leave_out(self, point: str) -> None:
        self.tables["left_out"].append({"point": point})

    def _experts_hit(self, num_tokens: int, num_at_last: int, run: Callable[[], None]) -> float:
        """Experts of a layer that get a token in an uncompiled step, the mean over layers.

        Other ranks take no part in such a step, so with several ranks this is the expected number of
        random routing.

        Args:
            num_at_last: tokens that go through the last layer's experts.
        """
        engine = self._engine
        if engine.config.tp > 1:
            return expected_experts_hit(self._model_config, num_tokens, num_at_last)
        before = engine.status(0).num_recompiles
        hit = experts_hit(engine.runner, run)
        self.num_unmeasured_compilations += engine.status(0).num_recompiles - before
        return hit


def _row(times: Times, work: Work, ceilings: Ceilings, hit: float) -> dict[str, Cell]:
    floor_ms = work.floor_ms(ceilings)
    return {
        **({"experts_hit": hit} if hit else {}),
        **_medians(times),
        "floor_ms": floor_ms,
        "fraction": floor_ms / statistics.median(times.wall_ms),
        "limit": work.limit(ceilings),
    }


def _medians(times: Times) -> dict[str, Cell]:
    return {
        "wall_ms": statistics.median(times.wall_ms),
        "device_ms": statistics.median(times.device_ms) if times.device_ms else None,
    }


@torch.inference_mode()
def _decode_uncompiled(runner: ModelRunner, rows: tuple[int, ...]) -> None:
    row_ids = torch.tensor(rows, dtype=torch.int32, device=runner.rows.page_table.device)
    step = DecodeStep(runner.model, runner.rows)
    for _ in range(ROUTED_STEPS):
        runner.planner.plan_decode(rows, len(rows))
        step(row_ids)


@torch.inference_mode()
def _prefill_uncompiled(runner: ModelRunner, chunks: tuple[Chunk, ...]) -> None:
    runner.planner.plan_prefill(chunks)
    prefill_step(runner.model, runner.rows, build_prefill(chunks, runner.pages, runner.stager))


def _fits(engine: Engine, num_rows: int, num_present: int, num_tokens: int) -> bool:
    """Whether `place_rows` finds room in the context and the pools."""
    usable = [figures.usable for figures in pool_figures(engine.cache)]
    needed = [last - first for first, last in _page_ranges(engine, num_present, num_tokens)]
    fits = all(num_rows * pages <= there for pages, there in zip(needed, usable, strict=True))
    return num_tokens <= engine.max_context_tokens and fits


def _page_ranges(engine: Engine, num_present: int, num_tokens: int) -> list[tuple[int, int]]:
    """For each group of layers, the first page index that a row needs whose token `num_present` - 1 is
    computed next, and the end of its pages for `num_tokens` tokens."""
    size = engine.config.page_size
    firsts = [
        max(0, num_present - figures.window) // size if figures.window else 0
        for figures in pool_figures(engine.cache)
    ]
    return [(first, -(-num_tokens // size)) for first in firsts]


def place_rows(engine: Engine, num_rows: int, num_present: int, num_tokens: int) -> None:
    """Give each of rows 0..num_rows-1 its own pages for `num_tokens` tokens, and set its length to
    `num_present`. The last present token is computed; the others are whatever the pool contains."""
    ranges = _page_ranges(engine, num_present, num_tokens)

    def pages_of(row: int) -> tuple[PageUpdate, ...]:
        updates = []
        for group, (first, end) in enumerate(ranges):
            page_ids = np.arange(1, 1 + end - first, dtype="<i4") + row * (end - first)
            updates.append(PageUpdate(row, first, page_ids.tobytes(), group))
        return tuple(updates)

    max_chunks = engine.config.max_step_tokens
    for begin in range(0, num_rows, max_chunks):
        rows = range(begin, min(begin + max_chunks, num_rows))
        chunks = [
            Chunk(row, num_present - 1, np.array([row + 1], dtype="<i4").tobytes(), True) for row in rows
        ]
        plan = StepPlan(
            step_id=0,
            row_inits=tuple(RowInit(row, 0.0, 0, 1.0, 0.0, row) for row in rows),
            page_updates=tuple(update for row in rows for update in pages_of(row)),
            decode_rows=(),
            chunks=tuple(chunks),
            sampled_rows=tuple(rows),
        )
        engine.collect(engine.launch(plan))


def time_steps(engine: Engine, plan: StepPlan, steps: int) -> Times:
    """Launch the plan `steps` times, with one step always queued behind the running step."""
    on_gpu = engine.runner.rows.page_table.device.type == "cuda"
    for _ in range(WARM_UP_STEPS):
        engine.collect(engine.launch(plan))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)] if on_gpu else []
    wall_ms = []
    if not on_gpu:  # on a CPU, a launch runs the whole step
        for _ in range(steps):
            begin = time.perf_counter()
            engine.collect(engine.launch(plan))
            wall_ms.append(1e3 * (time.perf_counter() - begin))
        return Times(wall_ms, None)
    pending = engine.launch(plan)
    events[0].record()
    last = time.perf_counter()
    for step in range(steps):
        launched = engine.launch(plan)
        events[step + 1].record()
        engine.collect(pending)
        pending = launched
        now = time.perf_counter()
        wall_ms.append(1e3 * (now - last))
        last = now
    engine.collect(pending)
    torch.cuda.synchronize()
    return Times(wall_ms, [events[i].elapsed_time(events[i + 1]) for i in range(steps)])


def _share_of_collectives(engine: Engine, plan: StepPlan, steps: int) -> float:
    """The share of collectives in rank 0's kernel time, by torch's profiler, with the wait for other ranks.

    A kernel that sums over ranks and normalises counts as a collective.
    """
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda]) as profile:
        for _ in range(steps):
            engine.collect(engine.launch(plan))
        torch.cuda.synchronize()
    times = [
        (event.key.lower(), event.self_device_time_total)
        for event in profile.key_averages()
        if event.device_type.name == "CUDA"
    ]
    collectives = sum(us for name, us in times if "nccl" in name or "all_reduce" in name)
    return collectives / max(1.0, sum(us for _, us in times))
