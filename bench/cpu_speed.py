"""How fast is the built-in model on this CPU, beside transformers and beside another checkout of minisgl?

    python bench/cpu_speed.py --out bench/results/cpu/cpu-speed.json
    python bench/cpu_speed.py --against ../before --out bench/results/cpu/cpu-speed.json

All engines are started once and then take turns, one measurement each, so that a busy machine slows all of
them. Only ratios mean something there: each is the median over the rounds of the ratio within a round.

Bars, with the exit code 1 if one is missed: at batch 1, decode at twice the speed of transformers' bfloat16;
a prompt of 512 tokens in no more time; with --against, batch 8 and starts in no more than TOLERANCE more.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.benchmark.reports.report import Cell, format_table, make_report, write_report
from minisgl.weights.sources import resolve_model_folder

MODEL = "smollm2-135m"
HERE = Path(__file__).resolve().parent.parent
TOLERANCE = 1.05
LIMIT_S = 300.0


class Task(NamedTuple):
    """What is timed: the tokens behind the first one, or with `num_tokens` 1 the time to the first one."""

    batch: int
    prompt_tokens: int
    num_tokens: int
    temperature: float = 0.0


class Engine(NamedTuple):
    """How an engine is run."""

    name: str
    kind: str  # a key of KINDS
    dtype: str | None  # None = the engine's choice
    checkout: Path


TASKS = {
    "decode_ms": Task(1, 64, 65),
    "sampled_decode_ms": Task(1, 64, 65, temperature=1.0),
    "decode_8_ms": Task(8, 64, 33),
    "first_token_64_ms": Task(1, 64, 1),
    "first_token_512_ms": Task(1, 512, 1),
}
"""By the name of their result: milliseconds per step, or to the first token."""
TRANSFORMERS, OURS, SERVED = "transformers-bfloat16", "minisgl", "minisgl-serve"


class Bar(NamedTuple):
    """A ratio of two engines' times that must not be less than `least`."""

    name: str
    above: str
    below: str
    measure: str
    least: float


BARS = (
    Bar("decode_speed_over_transformers", TRANSFORMERS, OURS, "decode_ms", 2.0),
    Bar("prefill_speed_over_transformers", TRANSFORMERS, OURS, "first_token_512_ms", 1.0),
    Bar("decode_8_speed_over_before", f"{OURS}-before", OURS, "decode_8_ms", 1 / TOLERANCE),
    Bar("start_speed_over_before", f"{OURS}-before", OURS, "start_s", 1 / TOLERANCE),
    Bar("served_start_speed_over_before", f"{SERVED}-before", SERVED, "start_s", 1 / TOLERANCE),
)


class Transformers:
    """transformers' `generate` with its own cache."""

    def __init__(self, dtype: str | None) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            resolve_model_folder(MODEL), dtype=getattr(torch, dtype or "bfloat16")
        ).eval()

    def generate(self, prompts: list[list[int]], num_tokens: int, temperature: float) -> None:
        batch = self._torch.tensor(prompts)
        options = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        with self._torch.inference_mode():
            out = self._model.generate(
                batch,
                attention_mask=self._torch.ones_like(batch),
                max_new_tokens=num_tokens,
                do_sample=bool(temperature),
                eos_token_id=None,
                **options,
            )
        assert out.shape[1] == len(prompts[0]) + num_tokens


class Offline:
    """minisgl's `LLM`."""

    def __init__(self, dtype: str | None) -> None:
        from minisgl import LLM, SamplingParams

        self._llm, self._params = LLM(MODEL, device="cpu", dtype=dtype), SamplingParams

    def generate(self, prompts: list[list[int]], num_tokens: int, temperature: float) -> None:
        params = self._params(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
        done = self._llm.generate(prompts, params)
        assert all(len(completion.token_ids) == num_tokens for completion in done)


class Served:
    """`minisgl serve`, asked over HTTP. Several prompts go in one call, so they decode together."""

    def __init__(self, dtype: str | None) -> None:
        flags = ["--port", "0", "--device", "cpu", *(["--dtype", dtype] if dtype else [])]
        self._server = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", "--model", MODEL, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._server.stdout is not None
        curl = next(line for line in self._server.stdout if line.startswith("curl "))
        self._url = "http://" + curl.split("http://")[1].split("/v1/")[0]

    def generate(self, prompts: list[list[int]], num_tokens: int, temperature: float) -> None:
        body = {
            "model": MODEL,
            "prompt": prompts,
            "max_tokens": num_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            self._url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
        assert events[-1]["usage"]["completion_tokens"] == num_tokens * len(prompts)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


KINDS: dict[str, Any] = {"transformers": Transformers, "offline": Offline, "served": Served}


def work(kind: str, dtype: str | None) -> None:
    """A worker process: one line per measurement in, its seconds out. It ends with its input."""
    engine = KINDS[kind](dtype)
    engine.generate([[1, 2, 3, 4]], 1, 0.0)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        engine.generate(asked["prompts"], asked["num_tokens"], asked["temperature"])
        print(time.perf_counter() - began, flush=True)
    if isinstance(engine, Served):
        engine.close()


class Worker:
    """The parent's end of a worker process. `start_s` = from its creation to its first token."""

    def __init__(self, engine: Engine) -> None:
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", engine.kind, engine.dtype or ""],
            env=os.environ | {"PYTHONPATH": str(engine.checkout)},
            cwd=engine.checkout,  # where `python -m minisgl` looks first
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        if self._out.readline() != "ready\n":
            raise RuntimeError(f"{engine.name} did not start")
        self.start_s = time.perf_counter() - began

    def seconds(self, prompts: list[list[int]], num_tokens: int, temperature: float) -> float:
        """How long these prompts and so many tokens behind each take."""
        asked = {"prompts": prompts, "num_tokens": num_tokens, "temperature": temperature}
        print(json.dumps(asked), file=self._in, flush=True)
        return float(self._out.readline())

    def measure(self, task: Task, seed: int) -> float:
        """Milliseconds per step behind the first token, or to it."""

        def timed(num_tokens: int, prompts_seed: str) -> float:
            # Other prompts each time, so that no engine finds them cached.
            pick = random.Random(prompts_seed)
            prompts = [
                [pick.randrange(100, 40_000) for _ in range(task.prompt_tokens)] for _ in range(task.batch)
            ]
            return 1e3 * self.seconds(prompts, num_tokens, task.temperature)

        first_ms = timed(1, f"{seed} first")
        if task.num_tokens == 1:
            return min(first_ms, timed(1, f"{seed} again"))
        return (timed(task.num_tokens, f"{seed} all") - first_ms) / (task.num_tokens - 1)

    def close(self) -> None:
        self._in.close()
        self._process.wait()


@contextlib.contextmanager
def started(engines: list[Engine]) -> Iterator[dict[str, Worker]]:
    """A worker for each engine, by its name."""
    with contextlib.ExitStack() as stack:
        workers = {}
        for engine in engines:
            workers[engine.name] = Worker(engine)
            stack.callback(workers[engine.name].close)
        yield workers


def measure_starts(engines: list[Engine], rounds: int, samples: dict[str, list[float]]) -> None:
    """Starts to the first token, in turns, of engines that do not run at the same time."""
    for _ in range(rounds):
        for engine in engines:
            with started([engine]) as workers:
                samples.setdefault(f"{engine.name} start_s", []).append(workers[engine.name].start_s)


def measure_tasks(
    engines: list[Engine], tasks: dict[str, Task], rounds: int, samples: dict[str, list[float]]
) -> None:
    with started(engines) as workers:
        for number in range(-1, rounds):  # the first round warms up
            for name, task in tasks.items():
                order = list(workers.items())
                for engine, worker in order if number % 2 else reversed(order):
                    took = worker.measure(task, number)
                    if number >= 0:
                        samples.setdefault(f"{engine} {name}", []).append(took)
            print(f"round {number + 1} of {rounds}, load {os.getloadavg()[0]:.1f}", flush=True)


def ratio(samples: dict[str, list[float]], above: str, below: str, measure: str) -> float | None:
    """The median over the rounds of one engine's time over another's."""
    pairs = [samples.get(f"{engine} {measure}", []) for engine in (above, below)]
    if not all(pairs):
        return None
    return round(statistics.median(a / b for a, b in zip(*pairs, strict=True)), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--starts", type=int, default=5, help="starts of each engine; 0 = none")
    parser.add_argument("--against", type=Path, help="another checkout of minisgl, measured as 'before'")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--only", nargs="+", metavar="ENGINE", help="some engines, by name")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work[0], arguments.work[1] or None)
        return 0
    engines = [
        Engine(TRANSFORMERS, "transformers", "bfloat16", HERE),
        Engine("transformers-float32", "transformers", "float32", HERE),
        Engine(OURS, "offline", None, HERE),
        Engine(SERVED, "served", None, HERE),
    ]
    if arguments.against:
        engines.append(Engine(f"{OURS}-before", "offline", None, arguments.against.resolve()))
        engines.append(Engine(f"{SERVED}-before", "served", None, arguments.against.resolve()))
    engines = [engine for engine in engines if not arguments.only or engine.name in arguments.only]
    tasks = {name: TASKS[name] for name in arguments.tasks}
    samples: dict[str, list[float]] = {}
    measure_tasks(engines, tasks, arguments.rounds, samples)
    measure_starts(engines, arguments.starts, samples)

    measures = [*tasks, *(["start_s"] if arguments.starts else [])]
    rows: list[dict[str, Cell]] = [
        {
            "engine": engine.name,
            **{name: round(statistics.median(samples[f"{engine.name} {name}"]), 2) for name in measures},
        }
        for engine in engines
    ]
    ratios: list[dict[str, Cell]] = [
        {"ratio": f"{above} / {below}", **{name: ratio(samples, above, below, name) for name in measures}}
        for above, below in (
            (TRANSFORMERS, OURS),
            (TRANSFORMERS, SERVED),
            ("transformers-float32", OURS),
            (f"{OURS}-before", OURS),
            (f"{SERVED}-before", SERVED),
            (TRANSFORMERS, f"{OURS}-before"),
        )
        if f"{above} {measures[0]}" in samples and f"{below} {measures[0]}" in samples
    ]
    print(format_table(rows), format_table(ratios), sep="\n")
    if arguments.out:
        report = make_report(
            "cpu-speed",
            arguments={"model": MODEL, "rounds": arguments.rounds, "load_average": os.getloadavg()[0]},
            metrics={bar.name: ratio(samples, bar.above, bar.below, bar.measure) for bar in BARS},
            tables={"medians": rows, "ratios": ratios},
            samples=samples,
        )
        write_report(arguments.out, report)
    return int(missed(samples))


def missed(samples: dict[str, list[float]]) -> bool:
    """Whether a bar is missed; says which."""
    fell_short = False
    for bar in BARS:
        found = ratio(samples, bar.above, bar.below, bar.measure)
        if found is not None and found < bar.least:
            print(f"missed: {bar.name} is {found}, and should be {bar.least:.2f} or more")
            fell_short = True
    return fell_short


if __name__ == "__main__":
    sys.exit(main())
