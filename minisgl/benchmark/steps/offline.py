"""`minisgl bench offline`: measures the throughput of one engine on a batch of requests, without a server.

Promise: the benchmark counts the tokens that the engine returns, and the count must equal the engine's own.
Warm-up is not measured. Each round begins with an empty prefix cache. Prompts and outputs are token ids, so
no time is spent on text.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from msgspec.structs import replace

from minisgl.benchmark.model_configs import model_folder
from minisgl.benchmark.reports.plots import check_output, write_outputs
from minisgl.benchmark.reports.report import (
    CdfChart,
    Cell,
    LinesChart,
    Report,
    engine_arguments,
    format_metrics,
    format_table,
    make_report,
)
from minisgl.benchmark.settings import OfflineBenchSettings, OutputSettings
from minisgl.benchmark.steps.compile_mode import without_fallback
from minisgl.benchmark.steps.workload import (
    Item,
    Message,
    check_offline_settings,
    prompts_workload,
    random_workload,
)
from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.start.build import build_engine
from minisgl.engine.start.gc_freeze import pause_then_freeze_gc
from minisgl.errors import ConfigError, MinisglError, RequestError
from minisgl.ipc.messages import AddRequest
from minisgl.ipc.questions import Status
from minisgl.progress import Progress, ShownProgress, lines_on, no_progress
from minisgl.request import FinishReason, SamplingParams
from minisgl.seeds import request_seed

WARM_UP_REQUESTS = 8
WARM_UP_TOKENS = 4
SHOWN = (
    "round",
    "elapsed_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "num_steps",
    "num_preemptions",
    "num_recompiles",
)
"""Columns of the table of rounds on the terminal; the report contains more."""
BINS = 100
"""Points of the throughput curve over time."""


class Round(NamedTuple):
    """One pass through the workload."""

    elapsed_s: float
    num_output_tokens: int  # as received
    step_s: list[float]  # wall time of each call of Engine.step
    step_tokens: list[int]  # tokens received from each of these calls
    output_lengths: list[int]  # by request
    before: Status
    after: Status

    def increase_of(self, name: str) -> int:
        """How much one of the engine's counters rose during the round."""
        return getattr(self.after, name) - getattr(self.before, name)


def run_offline_bench(
    settings: OfflineBenchSettings,
    engine_config: EngineConfig,
    output: OutputSettings,
    out: TextIO,
    *,
    cache_dir: Path | None = None,
) -> int:
    """Measure, print, write and draw; returns the exit code.

    Raises:
        ConfigError: a setting is impossible, or the workload does not fit the engine.
        ModelError: the model can't be loaded.
    """
    check_offline_settings(settings)
    check_output(output)
    with ShownProgress(lines_on()) as progress:
        with model_folder(engine_config, cache_dir=cache_dir, progress=progress) as folder:
            items = make_workload(settings, folder)
            engine_config = without_fallback(engine_config, folder)
            begin = time.perf_counter()
            with pause_then_freeze_gc():
                engine = build_engine(engine_config, folder, lambda stage, ms: progress(stage, 1, 1))
            start_s = time.perf_counter() - begin
        try:
            engine.record_graphs()
            report = measure_offline(engine, items, settings, progress)
        finally:
            engine.close()
    report = replace(report, metrics=report.metrics | {"start_s": start_s})
    print(format_table(report.tables["rounds"], SHOWN), file=out)
    print(f"\n{format_metrics(report.metrics)}", file=out)
    write_outputs(report, output, out)
    return 0


def make_workload(settings: OfflineBenchSettings, folder: Path) -> list[Item]:
    """The requests that the settings describe. The tokenizer in `folder` encodes real prompts.

    Raises:
        ConfigError: the file of prompts can't be used.
        ModelError: the model has no tokenizer.
    """
    if settings.prompts is None:
        return random_workload(settings)
    # Imported here: random prompts need no tokenizer library.
    from minisgl.text.chat_template import ChatTemplate
    from minisgl.text.messages import normalize_messages
    from minisgl.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)

    def encode(prompt: str | list[Message]) -> list[int]:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt, True)
        try:
            text = template.render(normalize_messages(prompt), add_generation_prompt=True)
        except RequestError:
            if len(prompt) > 1:
                raise
            return tokenizer.encode(str(prompt[0]["content"]), True)  # a base model has no chat template
        return tokenizer.encode(text, False)

    return prompts_workload(Path(settings.prompts).expanduser(), settings, encode)


def measure_offline(
    engine: Engine, items: Sequence[Item], settings: OfflineBenchSettings, progress: Progress
) -> Report:
    """Warm up, then run the workload `settings.rounds` times.

    Raises:
        ConfigError: a request does not fit the engine's context.
        MinisglError: tokens were lost or counted twice, which is a bug of ours.
    """
    longest = max(len(item.prompt_ids) + item.max_tokens for item in items)
    if longest > engine.max_context_tokens:
        raise ConfigError(
            f"the longest request has {longest} tokens, this engine takes {engine.max_context_tokens}; lower "
            "--max-prompt-tokens or --max-output-tokens, or see --max-context-tokens and --num-pages"
        )
    ignore_eos = settings.prompts is None if settings.ignore_eos is None else settings.ignore_eos
    params = [
        SamplingParams(
            temperature=settings.temperature,
            max_tokens=item.max_tokens,
            ignore_eos=ignore_eos,
            seed=request_seed(settings.workload_seed, number),
        )
        for number, item in enumerate(items)
    ]
    short = SamplingParams(
        temperature=settings.temperature, max_tokens=WARM_UP_TOKENS, ignore_eos=True, seed=0
    )
    few = items[:WARM_UP_REQUESTS]
    _run(engine, few, [short] * len(few), settings, no_progress, "warm-up")
    rounds = [
        _run(engine, items, params, settings, progress, f"round {number} of {settings.rounds}")
        for number in range(1, settings.rounds + 1)
    ]
    for one in rounds:
        if one.num_output_tokens != one.increase_of("num_output_tokens"):
            raise MinisglError(
                f"{one.num_output_tokens} tokens were received and the engine counted "
                f"{one.increase_of('num_output_tokens')}; please report this"
            )
    return _report(engine, items, settings, rounds)


def _run(
    engine: Engine,
    items: Sequence[Item],
    params: Sequence[SamplingParams],
    settings: OfflineBenchSettings,
    progress: Progress,
    name: str,
) -> Round:
    """One pass through the workload, from an empty prefix cache."""
    engine.flush_prefix_cache()
    before = engine.status(0)
    requests = [
        AddRequest(
            request_id=i,
            prompt_ids=np.asarray(item.prompt_ids, "<i4").tobytes(),
            params=own,
            streamed=settings.streamed,
        )
        for i, (item, own) in enumerate(zip(items, params, strict=True))
    ]
    num_wanted = sum(item.max_tokens for item in items)
    lengths = [0] * len(items)
    num_received = 0
    step_s: list[float] = []
    step_tokens: list[int] = []
    begin = last = time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        step_s.append(now - last)
        last = now
        received = sum(len(one.token_ids) for one in outputs)
        for one in outputs:
            lengths[one.request_id] += len(one.token_ids)
        step_tokens.append(received)
        num_received += received
        refused = next((one for one in outputs if one.finish_reason is FinishReason.ERROR), None)
        if refused is not None:
            raise MinisglError(f"request {refused.request_id} was refused: {refused.error_message}")
        progress(name, num_received, num_wanted, "tokens")
    if num_received < num_wanted:  # some requests ended before max_tokens
        progress(name, num_wanted, num_wanted, "tokens")
    return Round(last - begin, num_received, step_s, step_tokens, lengths, before, engine.status(0))


def _report(
    engine: Engine, items: Sequence[Item], settings: OfflineBenchSettings, rounds: Sequence[Round]
) -> Report:
    num_prompt_tokens = sum(len(item.prompt_ids) for item in items)
    samples: dict[str, list[float]] = {
        "elapsed_s": [one.elapsed_s for one in rounds],
        "output_tokens_per_s": [one.num_output_tokens / one.elapsed_s for one in rounds],
        "prompt_tokens_per_s": [num_prompt_tokens / one.elapsed_s for one in rounds],
        "total_tokens_per_s": [(num_prompt_tokens + one.num_output_tokens) / one.elapsed_s for one in rounds],
        "requests_per_s": [len(items) / one.elapsed_s for one in rounds],
    }
    table: list[dict[str, Cell]] = [
        {
            "round": number,
            **{name: values[number - 1] for name, values in samples.items()},
            "num_output_tokens": one.num_output_tokens,
            "num_steps": one.increase_of("num_steps"),
            "num_preemptions": one.increase_of("num_preemptions"),
            "num_cached_tokens": one.increase_of("num_cached_tokens"),
            "num_graph_misses": one.increase_of("num_graph_misses"),
            "num_recompiles": one.increase_of("num_recompiles"),
        }
        for number, one in enumerate(rounds, 1)
    ]
    step_ms = [1e3 * duration for one in rounds for duration in one.step_s]
    last = rounds[-1]
    metrics: dict[str, Any] = {
        **{name: float(np.mean(values)) for name, values in samples.items()},
        "step_p50_ms": float(np.percentile(step_ms, 50)),
        "step_p99_ms": float(np.percentile(step_ms, 99)),
        "num_requests": len(items),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": last.num_output_tokens,
        "num_steps": last.increase_of("num_steps"),
        "num_preemptions": last.increase_of("num_preemptions"),
        "num_cached_tokens": last.increase_of("num_cached_tokens"),
        "prefix_hit_rate": last.increase_of("num_cached_tokens") / num_prompt_tokens,
        "num_graph_misses": sum(one.increase_of("num_graph_misses") for one in rounds),
        "num_recompiles": sum(one.increase_of("num_recompiles") for one in rounds),
        "num_pages": engine.num_pages,
        "gpu_memory_bytes": _gpu_memory_bytes(engine.config.device),
    }
    return make_report(
        "offline",
        arguments={"workload": asdict(settings), "engine": engine_arguments(engine.config)},
        metrics=metrics,
        tables={
            "rounds": table,
            "over_time": _over_time(last),
            "requests": [
                {"num_prompt_tokens": len(item.prompt_ids), "num_output_tokens": num_tokens}
                for item, num_tokens in zip(items, last.output_lengths, strict=True)
            ],
        },
        samples={**samples, "step_ms": step_ms},
        charts=[
            LinesChart(
                title=f"{engine.config.model}: output tokens per second, last round",
                table="over_time",
                x="time_s",
                y=("output_tokens_per_s",),
                x_label="seconds since the start",
                y_label="tokens/s",
            ),
            CdfChart(title="Wall time of a step", samples=("step_ms",), x_label="milliseconds", log_x=True),
        ],
    )


def _over_time(one: Round) -> list[dict[str, Cell]]:
    """Output tokens per second in bins of equal time."""
    ends = np.cumsum(one.step_s)
    num_bins = min(BINS, len(ends))
    counts, edges = np.histogram(ends, bins=num_bins, range=(0.0, float(ends[-1])), weights=one.step_tokens)
    width = float(edges[1] - edges[0])
    return [
        {"time_s": float(edge) + width / 2, "output_tokens_per_s": float(count) / width}
        for edge, count in zip(edges[:-1], counts, strict=True)
    ]


def _gpu_memory_bytes(device: str | None) -> int | None:
    """GPU memory in use, by this process and all others."""
    if device != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free
