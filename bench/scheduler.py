"""What does the scheduler cost? Times plan and apply of a steady decode step by batch, length and tree size.

python bench/scheduler.py --out scheduler.json
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler

PAGE_SIZE = 16


def steady_step_ms(num_rows: int, prompt_tokens: int, tree_pages: int, steps: int) -> tuple[float, float]:
    """(median, 95th percentile) milliseconds of plan + apply + take_outputs, one step in flight."""
    pages = num_rows * (-(-(prompt_tokens + steps) // PAGE_SIZE) + 2) + tree_pages + 64
    cache = KVCacheManager(num_pages=pages, page_size=PAGE_SIZE)
    config = SchedulerConfig(
        max_rows=num_rows,
        max_step_tokens=1 << 20,
        chunk_tokens=1 << 20,
        mixed_step_tokens=1 << 20,
        max_context_tokens=prompt_tokens + steps + 64,
        vocab_size=1 << 17,
        eos_token_ids=(2,),
    )
    rng = np.random.default_rng(0)
    for _ in range(tree_pages // 64):  # 64 pages for each finished request of the past
        tokens = rng.integers(3, 1 << 17, 64 * PAGE_SIZE).astype(np.int32)
        lease = cache.admit(tokens)
        cache.grow(lease, len(tokens))
        cache.release(lease, tokens, len(tokens))
    scheduler = Scheduler(config, cache)
    for request_id in range(num_rows):
        prompt = rng.integers(3, 1 << 17, prompt_tokens).astype(np.int32)
        scheduler.add(request_id, prompt, SamplingParams(ignore_eos=True))
    launched = []
    while not launched or len(launched[-1].decode_rows) < num_rows:
        plan = scheduler.plan()
        assert plan is not None
        launched.append(plan)
    for plan in launched[:-1]:
        scheduler.apply(plan, [7] * len(plan.sampled_rows))
    scheduler.take_outputs()
    pending, tokens, times = launched[-1], [7] * num_rows, []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.plan()
        scheduler.apply(pending, tokens)
        num_outputs = len(scheduler.take_outputs())
        times.append((time.perf_counter() - started) * 1e3)
        assert plan is not None
        assert num_outputs == len(plan.decode_rows) == num_rows
        pending = plan
    return statistics.median(times), sorted(times)[int(0.95 * len(times))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for num_rows, prompt_tokens, tree_pages in [
        (1, 1000, 0),
        (64, 1000, 0),
        (256, 100, 0),
        (256, 1000, 0),
        (256, 8000, 0),
        (256, 1000, 10_000),
        (256, 1000, 100_000),
    ]:
        median, p95 = steady_step_ms(num_rows, prompt_tokens, tree_pages, args.steps)
        results.append(
            {
                "rows": num_rows,
                "prompt_tokens": prompt_tokens,
                "tree_pages": tree_pages,
                "median_ms": round(median, 4),
                "p95_ms": round(p95, 4),
            }
        )
        print(
            f"{num_rows:4d} rows of {prompt_tokens:5d} tokens, {tree_pages:6d} pages in the tree: "
            f"median {median:.3f} ms, p95 {p95:.3f} ms",
            flush=True,
        )
    if args.out:
        report = {"python": platform.python_version(), "machine": platform.machine(), "results": results}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
