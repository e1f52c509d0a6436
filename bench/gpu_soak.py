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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

import numpy as np
import torch

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
from minisgl.ipc.messages import AddRequest
from minisgl.ipc.questions import Status
from minisgl.progress import no_progress
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.weights.sources import default_cache_dir

SLACK_BYTES = 32 << 20
"""The caching allocator takes memory in pieces of 2 to 20 MiB; one piece more is no trend."""
NEVER = ("num_recompiles", "num_graph_misses", "num_broken_counts", "num_without_logits")
HELD = ("num_held_pages", "num_held_rows", "num_running", "num_waiting")
"""Of `Status`: what must not rise, and what must be 0 when nothing runs."""
STRETCH = 50
"""Requests."""
SAMPLES = 40
"""Points of the curve of memory over requests."""
SPECIAL = (
    SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, seed=1),
    SamplingParams(logprobs=3, seed=2),
    SamplingParams(logit_bias={5: 3.0}, logprobs=0, seed=3),
)
"""One request of each kind of step that is recorded when it is first needed."""


@dataclass(frozen=True, kw_only=True)
class SoakSettings:
    """What is asked of the engine."""

    num_requests: int = 2000
    num_warm_up_requests: int = 200
    max_prompt_tokens: int = 4096
    max_output_tokens: int = 512
    special: float = 0.2
    """Share of requests with penalties, biases or log probabilities, in one of ten stretches: all rows beside
    them take their kind of step, and the plain ones are to be seen too."""
    aborted: float = 0.02
    """Share of requests whose client leaves after some tokens."""
    shared: float = 0.2
    """Share of prompts that begin as an earlier one does."""
    seed: int = 0


class Asked(NamedTuple):
    """One request, and when its client leaves."""

    prompt: np.ndarray  # int32 [tokens]
    params: SamplingParams
    streamed: bool
    leaves_after: int | None  # tokens


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


def random_requests(
    rng: np.random.Generator, num_requests: int, settings: SoakSettings, context: int, vocab_size: int
) -> Iterator[Asked]:
    """Requests that fit `context` tokens."""
    earlier: list[np.ndarray] = []
    longest_output = min(settings.max_output_tokens, context // 2)
    longest_prompt = min(settings.max_prompt_tokens, context - longest_output)
    for index in range(num_requests):
        num_prompt, num_output = _log_uniform(rng, longest_prompt), _log_uniform(rng, longest_output)
        prompt = rng.integers(0, vocab_size, num_prompt).astype(np.int32)
        if earlier and rng.random() < settings.shared:
            beginning = earlier[int(rng.integers(len(earlier)))][: num_prompt - 1]
            prompt[: len(beginning)] = beginning
        earlier = [*earlier[-31:], prompt]
        leaves = rng.random() < settings.aborted
        yield Asked(
            prompt,
            _random_params(
                rng, num_output, settings.special if index // STRETCH % 10 == 2 else 0.0, vocab_size
            ),
            bool(rng.random() < 0.5),
            int(rng.integers(0, num_output)) if leaves else None,
        )


def soak(
    engine: Engine,
    requests: Sequence[Asked],
    rng: np.random.Generator,
    on_ended: Callable[[int], None] = lambda num_ended: None,
) -> list[str]:
    """Run the requests, from one to twice as many at once as the engine has rows; what went wrong."""
    most_open = 2 * engine.config.max_running_requests
    problems: list[str] = []
    received: dict[int, int] = {}
    next_request = num_ended = 0
    target = most_open
    while next_request < len(requests) or received:
        while next_request < len(requests) and len(received) < target:
            one = requests[next_request]
            prompt_ids = one.prompt.astype("<i4").tobytes()
            engine.add(AddRequest(next_request, prompt_ids, one.params, streamed=one.streamed))
            received[next_request] = 0
            next_request += 1
        for output in engine.step():
            asked = requests[output.request_id]
            received[output.request_id] += len(output.token_ids)
            if output.finish_reason is None:
                if asked.leaves_after is not None and received[output.request_id] >= asked.leaves_after:
                    engine.abort(output.request_id)
                continue
            problems += _problems_of(output, asked, received.pop(output.request_id))
            num_ended += 1
            on_ended(num_ended)
            if rng.random() < 0.02:
                target = int(rng.integers(1, most_open + 1))
    return problems


def warm_up(engine: Engine, settings: SoakSettings, rng: np.random.Generator, vocab_size: int) -> list[str]:
    """Run every kind of request, and steps with rules and log probabilities in every batch size."""
    problems = []
    max_rows = engine.config.max_running_requests
    if settings.special:
        for params in SPECIAL:
            # Four end with each step, and of the last eight one: the batch passes through all buckets.
            lengths = [1 + row // 4 for row in range(max_rows - 8)]
            lengths += [1 + max_rows // 4 + row for row in range(min(8, max_rows))]
            prompt = np.full(4, 7, dtype=np.int32)
            ramp = [Asked(prompt, _with_length(params, length), False, None) for length in lengths]
            problems += soak(engine, ramp, rng)
    requests = random_requests(
        rng, settings.num_warm_up_requests, settings, engine.max_context_tokens, vocab_size
    )
    return problems + soak(engine, list(requests), rng)


def run(engine: Engine, settings: SoakSettings, vocab_size: int) -> tuple[Report, list[str]]:
    """Warm up, soak, and compare; the report, and all that is not as it should be."""
    assert engine.config.device is not None
    device = engine.config.device
    rng = np.random.default_rng(settings.seed)
    problems = warm_up(engine, settings, rng, vocab_size)
    engine.record_graphs()
    engine.flush_prefix_cache()
    before = Snapshot(engine.status(0), Memory.now(device))
    over_time: list[dict[str, Cell]] = [{"num_ended": 0, **_in_gib(before.memory)}]
    requests = list(
        random_requests(rng, settings.num_requests, settings, engine.max_context_tokens, vocab_size)
    )
    every = max(1, len(requests) // SAMPLES)

    def note(num_ended: int) -> None:
        if num_ended % every == 0:
            over_time.append({"num_ended": num_ended, **_in_gib(Memory.now(device))})

    began = time.perf_counter()
    problems += soak(engine, requests, rng, note)
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
        arguments={"soak": asdict(settings), "engine": engine_arguments(engine.config)},
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


def _problems_of(output: RequestOutput, asked: Asked, num_received: int) -> list[str]:
    """What is wrong with a request that has ended."""
    wanted = asked.params.max_tokens or 0
    expected = {FinishReason.LENGTH: num_received == wanted}
    if asked.params.stop_token_ids:
        expected[FinishReason.STOP] = 1 <= num_received <= wanted
    if asked.leaves_after is not None:
        expected[FinishReason.ABORT] = asked.leaves_after <= num_received <= wanted
    if output.finish_reason is not None and expected.get(output.finish_reason):
        return []
    return [
        f"request {output.request_id} of {wanted} tokens got {num_received} and ended by "
        f"{output.finish_reason}: {output.error_message}"
    ]


def _random_params(
    rng: np.random.Generator, num_tokens: int, special: float, vocab_size: int
) -> SamplingParams:
    """`special`: how likely it is one of `SPECIAL`."""
    if rng.random() < special:
        return _with_length(SPECIAL[int(rng.integers(len(SPECIAL)))], num_tokens)
    return SamplingParams(
        max_tokens=num_tokens,
        ignore_eos=True,
        temperature=float(rng.choice([0.0, 0.6, 1.0])),
        top_k=int(rng.choice([0, 1, 40])),
        top_p=float(rng.choice([1.0, 0.9])),
        min_p=float(rng.choice([0.0, 0.05])),
        seed=int(rng.integers(1 << 62)),
        stop_token_ids=(int(rng.integers(vocab_size)),) if rng.random() < 0.1 else (),
    )


def _with_length(params: SamplingParams, num_tokens: int) -> SamplingParams:
    given = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**given | {"max_tokens": num_tokens, "ignore_eos": True})


def _log_uniform(rng: np.random.Generator, largest: int) -> int:
    """A whole number from 1 to `largest`, each order of magnitude as likely as the next."""
    return int(np.exp(rng.uniform(0.0, np.log(largest + 1))))


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
    for field in fields(SoakSettings):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default)
    parser.add_argument("--out", help="file for the report")
    parser.add_argument("--commit", help="what is measured, for the report of a copy without .git")
    given = vars(parser.parse_args(argv))
    settings = SoakSettings(**{field.name: given.pop(field.name) for field in fields(SoakSettings)})
    output = OutputSettings(out=given.pop("out"), commit=given.pop("commit"))
    config = EngineConfig(**given)
    try:
        check_output(output)
        config = with_cache_dir(config, default_cache_dir())
        with model_folder(config, cache_dir=None, progress=no_progress) as folder:
            engine = build_engine(config, folder, lambda stage, ms: None)
        try:
            report, problems = run(engine, settings, engine.runner.model.vocab_size)
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
