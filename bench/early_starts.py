"""Up to how many rows do early starts pay? One engine on a GPU records its larger decode graphs with them and
without, in turn, and compares the times of steps, of a batch of requests, and every token.

    python bench/early_starts.py --model llama-3.1-8b --out early-starts.json

The limits that are compared are rows of the largest step whose kernels start early
(`minisgl/engine/early_starts.py`); steps of up to the smaller limit stay as they are.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.settings import OfflineBenchSettings
from minisgl.benchmark.step_measure import place_rows, time_steps
from minisgl.benchmark.workload import Item, random_workload
from minisgl.config import EngineConfig, with_cache_dir
from minisgl.engine.build import build_engine
from minisgl.engine.compiled import CapturedSteps
from minisgl.engine.engine import Engine
from minisgl.messages import AddRequest
from minisgl.request import SamplingParams
from minisgl.scheduler.plan import StepPlan
from minisgl.weights.progress import no_progress
from minisgl.weights.sources import default_cache_dir

CONTEXT = 1024
STEPS = 24
TEMPERATURE = 0.6


@torch.inference_mode()
def record_again(engine: Engine, above: int, limit: int) -> None:
    """Record the graphs of more than `above` rows, those of up to `limit` with early starts."""
    decode = engine.runner.decode_graphs
    assert decode is not None, "decode was not recorded"
    captured = decode._graphs
    assert isinstance(captured, CapturedSteps), "graph trees record mode full"
    captured._early_rows = limit
    for bucket in decode._buckets:
        if bucket > above:
            decode._record(bucket)
    decode._batches.clear()  # the new graphs have other row ids


def serve(engine: Engine, items: list[Item]) -> tuple[float, list[list[int]]]:
    """Seconds, and each request's tokens."""
    engine.flush_prefix_cache()
    tokens: list[list[int]] = [[] for _ in items]
    begin = time.perf_counter()
    for number, item in enumerate(items):
        params = SamplingParams(
            temperature=TEMPERATURE, max_tokens=item.max_tokens, ignore_eos=True, seed=number
        )
        prompt = np.asarray(item.prompt_ids, dtype="<i4").tobytes()
        engine.add(AddRequest(number, prompt, params, streamed=False))
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return time.perf_counter() - begin, tokens


def steps_ms(engine: Engine, batch: int) -> float:
    """Median of steps of so many rows."""
    place_rows(engine, batch, CONTEXT, CONTEXT + 3 * STEPS)
    rows = tuple(range(batch))
    return statistics.median(time_steps(engine, StepPlan(0, (), (), rows, (), rows), STEPS).wall_ms)


def compare(
    engine: Engine, items: list[Item], limits: list[int], batches: list[int], rounds: int
) -> list[dict[str, Any]]:
    """One entry for each turn of each limit."""
    serve(engine, items[:8])
    reference: list[list[int]] | None = None
    found = []
    for _ in range(rounds):
        for limit in limits:
            record_again(engine, min(limits), limit)
            seconds, tokens = serve(engine, items)
            reference = reference or tokens
            equal = sum(ours == theirs for ours, theirs in zip(tokens, reference, strict=True))
            entry: dict[str, Any] = {"early_rows": limit, "requests_s": seconds, "equal_answers": equal}
            entry["steps_ms"] = {str(batch): steps_ms(engine, batch) for batch in batches}
            print(entry, flush=True)
            found.append(entry)
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Decode steps with early starts up to several sizes.")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--limits", default="64,256")
    parser.add_argument("--batches", default="80,96,128,160,192,256")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("CUDA graphs need a GPU, and there is none")
    config = EngineConfig(model=arguments.model, dummy_weights=True)
    config = with_cache_dir(config, default_cache_dir())
    with model_folder(config, cache_dir=None, progress=no_progress) as folder:
        engine = build_engine(config, folder, lambda stage, duration_ms: None)
    try:
        engine.record_graphs()
        items = random_workload(OfflineBenchSettings(num_requests=arguments.num_requests))
        limits, batches = (
            [int(n) for n in text.split(",")] for text in (arguments.limits, arguments.batches)
        )
        found = compare(engine, items, limits, batches, arguments.rounds)
    finally:
        engine.close()
    report = {
        "command": f"python bench/early_starts.py --model {arguments.model}",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "turns": found,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
