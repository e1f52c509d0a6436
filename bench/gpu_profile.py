"""Where does the time of decode steps go on a GPU? Lists kernels and idle time.

    python bench/gpu_profile.py --model llama-3.1-8b --batches 1,8,64,256 --out profile.json
    python bench/gpu_profile.py --model qwen3-0.6b --batches 1 --top 20
    python bench/gpu_profile.py --model qwen3-32b --batches 64 --tp 2       # rank 0 of two

Rows decode at about 1024 tokens of context through the real engine, with random weights and prompts, while
torch's profiler records. For each batch, the report has the time of a step, the longest idle time of the GPU,
and each kernel's share of a step. The time of collectives includes the wait for other ranks.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.benchmark.model_configs import model_folder
from minisgl.config import EngineConfig, with_cache_dir
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.ipc.messages import AddRequest
from minisgl.progress import no_progress
from minisgl.request import SamplingParams
from minisgl.weights.sources import default_cache_dir

WARM_UP_STEPS = 10
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def gpu_events(path: Path) -> list[dict[str, Any]]:
    """What ran on the GPU, by start; times in microseconds."""
    events = [one for one in json.loads(path.read_text())["traceEvents"] if one.get("cat") in ON_GPU]
    return sorted(events, key=lambda one: one["ts"])


def idle_microseconds(events: list[dict[str, Any]]) -> list[float]:
    """Every stretch in which nothing ran."""
    gaps = []
    end = events[0]["ts"]
    for event in events:
        if event["ts"] > end:
            gaps.append(event["ts"] - end)
        end = max(end, event["ts"] + event["dur"])
    return gaps


def profile_decode(engine: Engine, batch: int, context: int, steps: int, top: int) -> dict[str, Any]:
    """Fill `batch` rows, let them decode, and read the profile of `steps` steps."""
    engine.flush_prefix_cache()
    generator = np.random.default_rng(batch)
    length = context - steps // 2 - WARM_UP_STEPS
    params = SamplingParams(temperature=0.0, max_tokens=2 * steps + 20 * WARM_UP_STEPS, ignore_eos=True)
    for row in range(batch):
        prompt = generator.integers(0, 10_000, length).astype("<i4").tobytes()
        engine.add(AddRequest(request_id=row, prompt_ids=prompt, params=params))
    decoding: set[int] = set()
    while len(decoding) < batch:
        decoding.update(one.request_id for one in engine.step())
    for _ in range(WARM_UP_STEPS):
        engine.step()
    path = engine.profiler.start(steps)
    for _ in range(steps):
        engine.step()
    for row in range(batch):
        engine.abort(row)
    while engine.has_work:
        engine.step()
    engine.profiler.close()  # waits for the file
    events = gpu_events(path)
    path.unlink()
    # The profiler's own start and end are not the engine's: a step's worth is left out on both sides.
    per_step = len(events) // steps
    events = events[per_step:-per_step]
    took: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        took[event["name"]].append(event["dur"])
    num_steps = steps - 2
    gaps = idle_microseconds(events)
    span = events[-1]["ts"] + events[-1]["dur"] - events[0]["ts"]
    kernels = sorted(
        (
            {
                "kernel": name[:70],
                "per_step": round(len(all_us) / num_steps, 1),
                "us": round(statistics.median(all_us), 2),
                "us_per_step": round(sum(all_us) / num_steps, 1),
            }
            for name, all_us in took.items()
        ),
        key=lambda one: -one["us_per_step"],
    )
    return {
        "batch": batch,
        "step_us": round(span / num_steps, 1),
        "busy_us_per_step": round((span - sum(gaps)) / num_steps, 1),
        "longest_idle_us": round(max(gaps), 1),
        "idle_over_5_us_per_step": round(sum(gap for gap in gaps if gap > 5) / num_steps, 1),
        "longest_idle_counts": dict(Counter(int(gap) for gap in sorted(gaps)[-200:]).most_common(8)),
        "kernels": kernels[:top],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tp", type=int, default=1, help="ranks, each with a GPU")
    parser.add_argument("--quantization", help="as minisgl serve takes it")
    parser.add_argument("--kv-dtype", help="as minisgl serve takes it")
    parser.add_argument("--top", type=int, default=14, help="kernels to list")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=arguments.model,
            dummy_weights=True,
            max_context_tokens=4096,
            profile_dir=folder,
            tp=arguments.tp,
            quantization=arguments.quantization,
            kv_dtype=arguments.kv_dtype,
        )
        config = with_cache_dir(config, default_cache_dir())
        with model_folder(config, cache_dir=None, progress=no_progress) as model:
            engine = build_engine(config, model, lambda stage, ms: None)
            engine.record_graphs()
        try:
            reports = [
                profile_decode(engine, int(batch), arguments.context, arguments.steps, arguments.top)
                for batch in arguments.batches.split(",")
            ]
        finally:
            engine.close()
    for report in reports:
        print({key: value for key, value in report.items() if key != "kernels"})
        for kernel in report["kernels"]:
            print("   {us_per_step:9.1f} us  {per_step:6.1f} x {us:8.2f}  {kernel}".format(**kernel))
    if arguments.out:
        arguments.out.write_text(json.dumps({"model": arguments.model, "batches": reports}, indent=1))


if __name__ == "__main__":
    main()
