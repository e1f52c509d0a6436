"""Does an engine leak or recompile? Runs thousands of random requests after a warm-up.

    python bench/gpu_soak.py --model llama-3.1-8b --dummy-weights --out soak.json
    python bench/gpu_soak.py --model smollm2-135m --device cpu --num-requests 50 --max-output-tokens 20

Lengths are uniform on a logarithmic scale, so short ones are common and the longest do occur. Sampling
parameters, shared prefixes, aborts and the number of open requests are random too. The warm-up runs the same
kinds of requests. It also runs every batch size with rules and log probabilities once, because the engine
records their graphs at first use.

The exit code is 1 if a request got a wrong number of tokens, if the engine compiled something or lacked a
graph, if GPU memory in use grew, or if the engine holds rows or pages at the end.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from soaks.requests import SPECIAL, Asked, RequestMix, random_requests, soak, with_length

from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.reports.plots import check_output, write_outputs
from minisgl.benchmark.reports.report import (
    Cell,
    LinesChart,
    Report,
    engine_arguments,
    format_metrics,
    make_report,
)
from minisgl.benchmark.settings import OutputSettings
from minisgl.config import EngineConfig, with_cache_dir
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.errors import MinisglError
from minisgl.ipc.questions import Status
from minisgl.progress import no_progress
from minisgl.weights.sources import default_cache_dir

SLACK_BYTES = 32 << 20
"""The caching allocator takes memory in pieces of 2 to 20 MiB; one piece more is no trend."""
NEVER = ("num_recompiles", "num_graph_misses", "num_broken_counts", "num_without_logits")
HELD = ("num_held_pages", "num_held_rows", "num_running", "num_waiting")
"""Of `Status`: what must not rise, and what must be 0 when nothing runs."""
SAMPLES = 40
"""Points of the curve of memory over requests."""


@dataclass(frozen=True, kw_only=True)
class SoakSettings:
    """How many requests, beside the `RequestMix`."""

    num_requests: int = 2000
    num_warm_up_requests: int = 200
    seed: int = 0


class Memory(NamedTuple):
    """Bytes of the GPU, 0 on a CPU."""

    allocated: int  # by torch's tensors
    reserved: int  # by torch's allocator
    used: int  # by all, graphs and kernels included

    @classmethod
    def now(cls, device: str) -> "Memory":
        if device != "cuda":
            return cls(0, 0, 0)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return cls(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free)


class Snapshot(NamedTuple):
    """An idle engine."""

    status: Status
    memory: Memory


def warm_up(
    engine: Engine, num_requests: int, mix: RequestMix, rng: np.random.Generator, vocab_size: int
) -> list[str]:
    """Run every kind of request, and steps with rules and log probabilities in every batch size."""
    problems = []
    max_rows = engine.config.max_running_requests
    if mix.special:
        for params in SPECIAL:
            # Four end with each step, and of the last eight one: the batch passes through all buckets.
            lengths = [1 + row // 4 for row in range(max_rows - 8)]
            lengths += [1 + max_rows // 4 + row for row in range(min(8, max_rows))]
            prompt = np.full(4, 7, dtype=np.int32)
            ramp = [Asked(prompt, with_length(params, length), False, None) for length in lengths]
            problems += soak(engine, ramp, rng, 2 * max_rows)
    requests = list(random_requests(rng, num_requests, mix, engine.max_context_tokens, vocab_size))
    return problems + soak(engine, requests, rng, 2 * max_rows)


def run(engine: Engine, settings: SoakSettings, mix: RequestMix, vocab_size: int) -> tuple[Report, list[str]]:
    """Warm up, soak, and compare; the report, and all that is not as it should be."""
    assert engine.config.device is not None
    device = engine.config.device
    rng = np.random.default_rng(settings.seed)
    problems = warm_up(engine, settings.num_warm_up_requests, mix, rng, vocab_size)
    engine.record_graphs()
    engine.flush_prefix_cache()
    before = Snapshot(engine.status(0), Memory.now(device))
    over_time: list[dict[str, Cell]] = [{"num_ended": 0, **_in_gib(before.memory)}]
    requests = list(random_requests(rng, settings.num_requests, mix, engine.max_context_tokens, vocab_size))
    every = max(1, len(requests) // SAMPLES)

    def note(num_ended: int) -> None:
        if num_ended % every == 0:
            over_time.append({"num_ended": num_ended, **_in_gib(Memory.now(device))})

    began = time.perf_counter()
    problems += soak(engine, requests, rng, 2 * engine.config.max_running_requests, on_ended=note)
    elapsed_s = time.perf_counter() - began
    engine.check_at_idle()
    engine.flush_prefix_cache()
    after = Snapshot(engine.status(0), Memory.now(device))
    problems += changes(before, after, engine.num_pages)
    metrics = {
        "elapsed_s": elapsed_s,
        "num_requests": len(requests),
        "num_prompt_tokens": sum(len(one.prompt) for one in requests),
        **{
            name: getattr(after.status, name) - getattr(before.status, name)
            for name in (
                "num_steps",
                "num_output_tokens",
                "num_cached_tokens",
                "num_preemptions",
                *NEVER,
            )
        },
        **{name: getattr(after.status, name) for name in HELD},
        "num_problems": len(problems),
        **{
            f"{name}_{when}_bytes": getattr(snapshot.memory, name)
            for name in Memory._fields
            for when, snapshot in (("before", before), ("after", after))
        },
    }
    report = make_report(
        "soak",
        arguments={"soak": asdict(settings) | asdict(mix), "engine": engine_arguments(engine.config)},
        metrics=metrics,
        tables={"over_time": over_time, "problems": [{"problem": problem} for problem in problems[:100]]},
        charts=[
            LinesChart(
                title=f"{engine.config.model}: GPU memory",
                table="over_time",
                x="num_ended",
                y=tuple(f"{name}_gib" for name in Memory._fields),
                x_label="requests that have ended",
                y_label="GiB",
            )
        ],
    )
    return report, problems


def changes(before: Snapshot, after: Snapshot, num_pages: int) -> list[str]:
    """What an engine that was used must not have changed: counters, and memory but for `SLACK_BYTES`."""
    problems = []
    for name in NEVER:
        grown = getattr(after.status, name) - getattr(before.status, name)
        if grown:
            problems.append(f"{name} rose by {grown}")
    held = {name: getattr(after.status, name) for name in HELD}
    problems += [f"{name} is {value} though nothing runs" for name, value in held.items() if value]
    if after.status.num_free_pages != num_pages:
        problems.append(f"{num_pages - after.status.num_free_pages} pages are missing")
    for name in Memory._fields:
        grown = getattr(after.memory, name) - getattr(before.memory, name)
        if grown > SLACK_BYTES:
            problems.append(f"{grown / 2**20:.0f} MiB more are {name}")
    return problems


def _in_gib(memory: Memory) -> dict[str, Cell]:
    return {f"{name}_gib": value / 2**30 for name, value in memory._asdict().items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--device", help="cuda or cpu; without it, cuda where there is one")
    parser.add_argument(
        "--dummy-weights", action="store_true", help="for a model's shape without a checkpoint"
    )
    parser.add_argument("--max-context-tokens", type=int)
    parser.add_argument("--num-pages", type=int)
    for field in (*fields(SoakSettings), *fields(RequestMix)):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)
    parser.add_argument("--out", help="file for the report")
    parser.add_argument("--commit", help="what is measured, for the report of a copy without .git")
    given = vars(parser.parse_args(argv))
    settings = SoakSettings(**{field.name: given.pop(field.name) for field in fields(SoakSettings)})
    mix = RequestMix(**{field.name: given.pop(field.name) for field in fields(RequestMix)})
    output = OutputSettings(out=given.pop("out"), commit=given.pop("commit"))
    config = EngineConfig(**given)
    try:
        check_output(output)
        config = with_cache_dir(config, default_cache_dir())
        with model_folder(config, cache_dir=None, progress=no_progress) as folder:
            engine = build_engine(config, folder, lambda stage, ms: None)
        try:
            report, problems = run(engine, settings, mix, engine.runner.model.vocab_size)
        finally:
            engine.close()
        print(format_metrics(report.metrics))
        print("\n".join(problems[:20]) or "nothing has changed")
        write_outputs(report, output, sys.stdout)
    except MinisglError as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
