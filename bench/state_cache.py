"""How often do prompts hit the cache of a model with linear attention, against one with full attention?

    python bench/state_cache.py --out bench/results/cpu/state-cache.json

A simulation: scheduler and cache are the real ones, a step takes the time that COST says, and no model runs.
So hit rates are real, and times compare the cases with each other only. Conversations are those of
`minisgl bench serve --dataset multi-turn`; a turn is asked some seconds after the answer before it. "Without
thoughts" is a template that leaves thoughts of earlier turns out, as Qwen's does. Lengths of Mooncake's trace
are divided by 8; its prompts repeat others up to whole blocks, and never an answer of this simulation. Last
come requests that arrive together.

"qwen3.6" has the pool and the snapshots that `minisgl plan` gives on an H200. The exit code is 1 if it hits
less than 0.97 times as often as full attention does with a pool of as many tokens; Mooncake's trace may.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minisgl.benchmark.load.datasets import Conversation, Lengths, Turn, multi_turn_prompts, read_dataset
from minisgl.benchmark.load.prompts import Draw, as_token_ids, codes_of
from minisgl.benchmark.reports.report import format_table, make_report, write_report
from minisgl.benchmark.steps.simulate import VOCAB_SIZE, InstantExecutor
from minisgl.kvcache.grouped_manager import Cache, GroupedCacheManager
from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulator import Arrival, Served, StepCost, simulate

PAGE_SIZE = 16
MAX_ROWS = 64
LEAST_OF_FULL = 0.97
ENDING_TOKENS = 2
"""Of a prompt, that a template leaves out in later turns: "<think>\\n"."""
MOONCAKE_SCALE = Fraction(1, 8)
TURNS = 3
TOGETHER = 8
LENGTHS = Lengths((100, 1024), (100, 1024))
COST = StepCost(
    decode_ms=4.0,
    per_decode_row_ms=0.18,
    per_context_token_ms=5e-6,
    prefill_ms=4.0,
    per_prompt_token_ms=0.015,
    per_attended_token_ms=4e-7,
    least_prefill_ms=17.0,
    per_state_copy_ms=0.035,
)
"""Of Qwen3.6-35B-A3B in bfloat16 on an H200, from bytes at 4 TB/s and FLOP at 400 TFLOP/s; not measured."""


class Case(NamedTuple):
    """A model's pool."""

    name: str
    pool_tokens: int
    num_snapshots: int | None = None  # None = full attention
    prefix_cache: bool = True


CASES = (
    Case("full attention, as many tokens", 1_918_704),
    Case("full attention, pool of qwen3-30b-a3b", 691_440),
    Case("qwen3.6", 1_918_704, 259),
    Case("qwen3.6, 64 snapshots", 1_918_704, 64),
    Case("qwen3.6, 0 snapshots", 1_918_704, 0),
    Case("qwen3.6, no prefix cache", 1_918_704, None, prefix_cache=False),
)


class Workload(NamedTuple):
    """Conversations, and when their turns come."""

    name: str
    conversations: Sequence[Conversation]
    starts_ms: Sequence[float]
    think_ms: float
    """Mean of an exponential distribution."""
    is_stripped: bool = False
    """The next prompt has another end of this one's, and only the second half of the answer."""
    has_bar: bool = True


def workloads(num: int, per_second: float, trace: Path | None) -> list[Workload]:
    """Multi-turn conversations with more and more time between the turns, and the trace."""
    conversations = multi_turn_prompts(num, LENGTHS, 0, TURNS)
    starts_ms = np.cumsum(np.random.default_rng(1).exponential(1e3 / per_second, num)).tolist()
    found = [
        Workload(f"multi-turn, {think_s} s between", conversations, starts_ms, 1e3 * think_s)
        for think_s in (0, 30, 120)
    ]
    found.append(Workload("the same without thoughts, 30 s", conversations, starts_ms, 3e4, is_stripped=True))
    if trace is not None:
        requests = read_dataset(trace, LENGTHS, 0, length_scale=MOONCAKE_SCALE)
        arrivals_ms = [1e3 * (one.arrival_s or 0.0) for one in requests]
        found.append(Workload("Mooncake, lengths / 8", requests, arrivals_ms, 0.0, has_bar=False))
    found.append(together("8 choices of 1,000 tokens", 1000, 0))
    found.append(together("8 prompts, 600 tokens alike, 400 not", 600, 400))
    return found


def together(name: str, num_alike: int, num_own: int) -> Workload:
    """Eight requests at once, every second, whose prompts begin alike."""
    conversations, starts_ms = [], []
    for number in range(TOGETHER * 32):
        group, member = divmod(number, TOGETHER)
        prompt = (Draw((7, group), num_alike), Draw((8, group, member), num_own))
        conversations.append(Conversation(turns=(Turn(prompt=prompt, num_output_tokens=200),)))
        starts_ms.append(1e3 * group)
    return Workload(name, conversations, starts_ms, 0.0)


def make_cache(case: Case) -> Cache:
    num_pages = case.pool_tokens // PAGE_SIZE + 1
    if case.num_snapshots is None:
        return KVCacheManager(num_pages=num_pages, page_size=PAGE_SIZE, prefix_cache=case.prefix_cache)
    return GroupedCacheManager(
        num_places=num_pages,
        page_size=PAGE_SIZE,
        keeps_all=True,
        windows=(),
        num_snapshots=case.num_snapshots,
    )


def tokens_of(draws: Sequence[Draw]) -> np.ndarray:
    return as_token_ids(codes_of(draws, (0,)), VOCAB_SIZE).astype(np.int32)


def run(case: Case, workload: Workload) -> dict[str, Any]:
    """Serve all turns of a workload."""
    cache = make_cache(case)
    config = SchedulerConfig(
        max_rows=MAX_ROWS,
        max_step_tokens=8192,
        chunk_tokens=8192,
        mixed_step_tokens=1024,
        max_context_tokens=65536,
        vocab_size=VOCAB_SIZE,
        chunk_multiple=1 if case.num_snapshots is None else 64,
    )
    scheduler = Scheduler(config, cache)
    draw = np.random.default_rng(2)
    think_ms = draw.exponential(1.0, (len(workload.conversations), TURNS)) * workload.think_ms
    place_of: list[tuple[int, int]] = []  # conversation and turn of each request
    prompts: list[np.ndarray] = []

    def arrival(conversation: int, turn: int, before: np.ndarray, at_ms: float) -> Arrival:
        asked = workload.conversations[conversation].turns[turn]
        assert not isinstance(asked.prompt, str)
        prompt = np.concatenate([before, tokens_of(asked.prompt)])
        place_of.append((conversation, turn))
        prompts.append(prompt)
        params = SamplingParams(max_tokens=asked.num_output_tokens, ignore_eos=True, seed=0)
        return Arrival(at_ms, prompt, params)

    def next_turn(index: int, served: Served) -> Arrival | None:
        conversation, turn = place_of[index]
        if turn + 1 == len(workload.conversations[conversation].turns):
            return None
        before, answer = prompts[index], np.array(served.token_ids, np.int32)
        if workload.is_stripped:
            before, answer = before[:-ENDING_TOKENS], answer[len(answer) // 2 :]
        before = np.concatenate([before, answer])
        return arrival(
            conversation, turn + 1, before, served.finished_ms + float(think_ms[conversation, turn])
        )

    nothing = np.empty(0, np.int32)
    firsts = [arrival(place, 0, nothing, at_ms) for place, at_ms in enumerate(workload.starts_ms)]
    served = simulate(
        scheduler, InstantExecutor(MAX_ROWS), firsts, cost=COST, join_decodes=True, next_turn=next_turn
    )
    cache.check_invariants()
    first_ms = sorted(one.token_ms[0] - one.arrived_ms for one in served)
    stats = scheduler.stats
    return {
        "case": case.name,
        "workload": workload.name,
        "snapshots": case.num_snapshots,
        "prompt_tokens": stats.num_prompt_tokens,
        "hit_rate": round(stats.num_cached_tokens / stats.num_prompt_tokens, 4),
        "ttft_mean_ms": round(statistics.fmean(first_ms), 1),
        "ttft_p50_ms": round(first_ms[len(first_ms) // 2], 1),
        "ttft_p95_ms": round(first_ms[int(0.95 * len(first_ms))], 1),
        "minutes": round(max(one.finished_ms for one in served) / 6e4, 2),
        "steps": stats.num_steps,
    }


def main() -> int:
    """Run all cases; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=512)
    parser.add_argument("--per-second", type=float, default=1.5, help="conversations that begin")
    parser.add_argument("--only", default="", help="a part of the workloads' names")
    parser.add_argument("--trace", type=Path, help="Mooncake's")
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    rows: list[dict[str, Any]] = []
    is_good = True
    show: Callable[[Any], None] = lambda row: print(format_table([row]), flush=True)  # noqa: E731
    for workload in workloads(settings.conversations, settings.per_second, settings.trace):
        if settings.only not in workload.name:
            continue
        full = 0.0
        for case in CASES:
            row = run(case, workload)
            full = full or row["hit_rate"]
            row["of_full"] = round(row["hit_rate"] / full, 3)
            is_good &= row["of_full"] >= LEAST_OF_FULL or case.name != "qwen3.6" or not workload.has_bar
            rows.append(row)
            show(row)
    if settings.out is not None:
        arguments = {"conversations": settings.conversations, "per_second": settings.per_second}
        metrics = {
            f"of_full_{number}": row["of_full"]
            for number, row in enumerate(row for row in rows if row["case"] == "qwen3.6")
        }
        report = make_report("state-cache", arguments=arguments, metrics=metrics, tables={"cases": rows})
        write_report(settings.out, report)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
