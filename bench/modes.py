"""What is each switch of the engine worth? Compares compile modes, graphs and overlap.

    python bench/modes.py --model llama-3.1-8b --dummy-weights --out modes.json
    python bench/modes.py --model ~/.cache/minisgl/models/smollm2-135m --device cpu --modes off,no-graphs

For every mode, in one process: the start time (without imports; a second run finds a full compile cache), the
time to the first token after a prompt of 128 tokens on an idle engine, the times of decode and prefill steps,
output tokens per second of a batch of random requests, and GPU memory. The last column is a check: greedy
tokens must not change when all unowned keys and values are NaN. Else the exit code is 1.
"""

import argparse
import math
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.benchmark.kernels.kernel_timing import Ceilings
from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.reports.plots import write_outputs
from minisgl.benchmark.reports.report import Cell, format_table, make_report
from minisgl.benchmark.settings import OfflineBenchSettings, OutputSettings
from minisgl.benchmark.steps.offline import make_workload, measure_offline
from minisgl.benchmark.steps.step import Points, measure_steps
from minisgl.config import EngineConfig, with_cache_dir
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.ipc.messages import AddRequest
from minisgl.model_config.hf_folder.hf_config import read_model_config
from minisgl.progress import no_progress
from minisgl.request import SamplingParams
from minisgl.weights.sources import default_cache_dir

MODES: dict[str, dict[str, Any]] = {
    "layers": {"compile_mode": "layers"},
    "no-overlap": {"compile_mode": "layers", "overlap": False},
    "no-prefill-graphs": {"compile_mode": "layers", "max_graph_tokens": 0},
    "off": {"compile_mode": "off"},
    "no-graphs": {"max_graph_batch": 0, "max_graph_tokens": 0},
    "full": {"compile_mode": "full"},
}
"""What differs from the defaults; `full` last, because torch keeps its graphs' memory."""

NO_CEILINGS = Ceilings(1.0, 1.0)
"""What a step could reach is not asked here."""


def greedy_tokens(engine: Engine, num_requests: int = 8, max_tokens: int = 32) -> list[list[int]]:
    """The outputs of prompts of 20 to 300 tokens."""
    engine.flush_prefix_cache()
    generator = np.random.default_rng(0)
    tokens: list[list[int]] = [[] for _ in range(num_requests)]
    for index in range(num_requests):
        prompt = generator.integers(0, 1000, 20 + 40 * index).astype("<i4").tobytes()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add(AddRequest(request_id=index, prompt_ids=prompt, params=params))
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens


def unowned_memory_changes_nothing(engine: Engine) -> bool:
    """Whether greedy tokens are the same when every key and value starts as NaN."""
    before = greedy_tokens(engine)
    with torch.inference_mode():
        for attention in engine.runner.model.attention_layers():
            attention.k_cache.fill_(math.nan)
            attention.v_cache.fill_(math.nan)
    return greedy_tokens(engine) == before


def first_token_ms(engine: Engine, num_prompt_tokens: int = 128, rounds: int = 11) -> float:
    """From adding a request to an idle engine to its first token, the median."""
    generator = np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    times = []
    for round_number in range(rounds):
        prompt = generator.integers(0, 1000, num_prompt_tokens).astype("<i4").tobytes()
        begin = time.perf_counter()
        engine.add(AddRequest(request_id=round_number, prompt_ids=prompt, params=params))
        while not engine.step():
            pass
        times.append(1e3 * (time.perf_counter() - begin))
        while engine.has_work:
            engine.step()
    return statistics.median(times)


def measure_mode(
    name: str, config: EngineConfig, points: Points, workload: OfflineBenchSettings, folder: Path
) -> dict[str, Cell]:
    """One row of the table."""
    begin = time.perf_counter()
    engine = build_engine(config, folder, lambda stage, ms: None)
    start_s = time.perf_counter() - begin
    engine.record_graphs()
    try:
        ttft_ms = first_token_ms(engine)
        holds = unowned_memory_changes_nothing(engine)
        steps = measure_steps(engine, read_model_config(folder), points, NO_CEILINGS, no_progress)
        offline = measure_offline(engine, make_workload(workload, folder), workload, no_progress)
        status = engine.status(0)
    finally:
        engine.close()
    row: dict[str, Cell] = {"mode": name, "start_s": start_s, "ttft_128_ms": ttft_ms}
    row |= {f"decode_{one['batch']}_ms": one["wall_ms"] for one in steps.tables["decode"]}
    row |= {f"prefill_{one['new_tokens']}_ms": one["wall_ms"] for one in steps.tables["prefill"]}
    row["output_tokens_per_s"] = offline.metrics["output_tokens_per_s"]
    row["recompiles"], row["graph_misses"] = status.num_recompiles, status.num_graph_misses
    if torch.cuda.is_available():
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        row["gpu_gb"] = (total_bytes - free_bytes) / 1e9
    row["nan_changes_nothing"] = holds
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--modes", default=",".join(MODES), help=f"(default: {','.join(MODES)})")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefills", default="16,128,600,2048")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--num-requests", type=int, default=96)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-output-tokens", type=int, default=256)
    parser.add_argument("--num-pages", type=int, default=16384)
    parser.add_argument("--commit")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    base = EngineConfig(
        model=arguments.model,
        dummy_weights=arguments.dummy_weights,
        device=arguments.device,
        max_context_tokens=4096,
        num_pages=arguments.num_pages,
    )
    base = with_cache_dir(base, default_cache_dir())
    workload = OfflineBenchSettings(
        num_requests=arguments.num_requests,
        min_prompt_tokens=min(100, arguments.max_prompt_tokens),
        max_prompt_tokens=arguments.max_prompt_tokens,
        min_output_tokens=min(100, arguments.max_output_tokens),
        max_output_tokens=arguments.max_output_tokens,
    )
    batches = tuple(map(int, arguments.batches.split(",")))
    prefills = tuple(map(int, arguments.prefills.split(",")))
    points = Points(batches, (arguments.context,), prefills, (0,), arguments.steps)
    settings = {"model": arguments.model, "steps": arguments.steps, "num_requests": arguments.num_requests}
    rows = []
    with model_folder(base, cache_dir=None, progress=no_progress) as folder:
        for name in arguments.modes.split(","):
            row = measure_mode(name, replace(base, **MODES[name]), points, workload, folder)
            rows.append(row)
            print(format_table([row]), flush=True)
            # After every mode: an interruption loses only the one that runs.
            report = make_report("modes", arguments=settings, metrics={}, tables={"modes": rows})
            write_outputs(report, OutputSettings(out=arguments.out, commit=arguments.commit), sys.stdout)
    print(f"\n{format_table(rows)}")
    return 0 if all(row["nan_changes_nothing"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
