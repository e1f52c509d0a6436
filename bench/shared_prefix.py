"""How long does a burst of requests with one prefix take until each has its first token?

    python bench/shared_prefix.py --model llama-3.1-8b --out shared-prefix.json
    python bench/shared_prefix.py --simulate

Each workload arrives at once: one prompt n times, as `n` of a completion, and chats with one system prompt.
Times are medians over fresh prompts. With --simulate the scheduler runs without a model, and a step takes a
made-up time.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl.benchmark.model_configs import model_folder
from minisgl.config import EngineConfig, with_cache_dir
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.ipc.messages import AddRequest
from minisgl.kvcache.manager import KVCacheManager
from minisgl.progress import no_progress
from minisgl.request import SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulator import Arrival, FakeExecutor, FakeModel, simulate
from minisgl.weights.sources import default_cache_dir

SHARED_TOKENS = 1000
OWN_TOKENS = 50
VOCAB_SIZE = 30_000  # of the ids that prompts are made of
ROUNDS = 7


class Workload(NamedTuple):
    name: str
    num_requests: int
    own_tokens: int


WORKLOADS = (
    Workload("n = 1", 1, 0),
    Workload("n = 8", 8, 0),
    Workload("1 chat", 1, OWN_TOKENS),
    Workload("64 chats with one system prompt", 64, OWN_TOKENS),
)


def prompts_of(workload: Workload, seed: int) -> list[np.ndarray]:
    """int32 [tokens] each."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB_SIZE, SHARED_TOKENS, dtype=np.int32)
    return [
        np.concatenate([shared, rng.integers(0, VOCAB_SIZE, workload.own_tokens, dtype=np.int32)])
        for _ in range(workload.num_requests)
    ]


def params_of(number: int) -> SamplingParams:
    return SamplingParams(max_tokens=1, ignore_eos=True, seed=number)


def serve(engine: Engine, prompts: list[np.ndarray]) -> tuple[float, int]:
    """Milliseconds until all have their token, and prompt tokens that were computed."""
    before = engine.status(0)
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(AddRequest(number, prompt.tobytes(), params_of(number)))
    while engine.has_work:
        engine.step()
    duration_ms = (time.perf_counter() - begin) * 1e3
    after = engine.status(0)
    found = after.num_cached_tokens - before.num_cached_tokens
    return duration_ms, after.num_prompt_tokens - before.num_prompt_tokens - found


def serve_simulated(prompts: list[np.ndarray]) -> tuple[float, int]:
    """The same by the scheduler alone, in virtual milliseconds."""
    page_size, num_pages, max_rows = 16, 8192, 256
    cache = KVCacheManager(num_pages=num_pages, page_size=page_size)
    config = SchedulerConfig(
        max_rows=max_rows,
        max_step_tokens=8192,
        chunk_tokens=8192,
        mixed_step_tokens=1024,
        max_context_tokens=8192,
        vocab_size=VOCAB_SIZE,
    )
    scheduler = Scheduler(config, cache)
    model = FakeModel(vocab_size=VOCAB_SIZE, eos_token_id=0)
    executor = FakeExecutor(model, num_pages=num_pages, page_size=page_size, max_rows=max_rows)
    arrivals = [Arrival(0.0, prompt, params_of(number)) for number, prompt in enumerate(prompts)]
    served = simulate(scheduler, executor, arrivals)
    stats = scheduler.stats
    return max(one.finished_ms for one in served), stats.num_prompt_tokens - stats.num_cached_tokens


def measure(engine: Engine | None) -> list[dict[str, Any]]:
    """One entry for each workload; without an engine in simulation."""
    found = []
    for workload in WORKLOADS:
        runs = []
        for round_number in range(ROUNDS if engine else 1):
            prompts = prompts_of(workload, round_number)
            if engine is None:
                runs.append(serve_simulated(prompts))
                continue
            engine.flush_prefix_cache()
            runs.append(serve(engine, prompts))
        entry = {
            "workload": workload.name,
            "prompt_tokens": workload.num_requests * (SHARED_TOKENS + workload.own_tokens),
            "computed_tokens": runs[-1][1],
            "first_tokens_ms": round(statistics.median(duration_ms for duration_ms, _ in runs), 2),
        }
        print(entry, flush=True)
        found.append(entry)
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Bursts of requests with one prefix.")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--simulate", action="store_true", help="the scheduler alone, without a model")
    parser.add_argument("--commit", default="", help="what is measured, for the report")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"commit": arguments.commit}
    if arguments.simulate:
        report |= {"command": "python bench/shared_prefix.py --simulate", "workloads": measure(None)}
    else:
        config = with_cache_dir(EngineConfig(model=arguments.model, dummy_weights=True), default_cache_dir())
        with model_folder(config, cache_dir=None, progress=no_progress) as folder:
            engine = build_engine(config, folder, lambda stage, duration_ms: None)
        try:
            engine.record_graphs()
            serve(engine, prompts_of(WORKLOADS[-1], ROUNDS))  # warm up
            report |= {
                "command": f"python bench/shared_prefix.py --model {arguments.model}",
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                "torch": torch.__version__,
                "workloads": measure(engine),
            }
        finally:
            engine.close()
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
