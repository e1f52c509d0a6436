"""`minisgl bench serve`: load on an OpenAI-compatible server, and what its users would see of it.

Promise: tokens are the server's own counts, a server without them is refused; failed requests are counted by
kind and are in no latency; when the client was the bottleneck, the report says so. Torch-free.
"""

import asyncio
import gc
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from minisgl.benchmark.datasets import Dialogue, warm_up_prompts
from minisgl.benchmark.load_client import LoadClient, open_client
from minisgl.benchmark.load_run import Load, run_load
from minisgl.benchmark.plots import check_output, deliver
from minisgl.benchmark.report import Report, format_table, live_progress
from minisgl.benchmark.serve_plan import Plan, make_plan
from minisgl.benchmark.serve_report import PointReport, make_serve_report, report_point
from minisgl.benchmark.settings import OutputSettings, ServeBenchSettings
from minisgl.benchmark.sse import Usage
from minisgl.errors import ConfigError
from minisgl.weights.progress import Progress

PROBE_TOKENS = 2


def run_serve_bench(
    settings: ServeBenchSettings, output: OutputSettings, out: TextIO, *, cache_dir: Path | None = None
) -> int:
    """Measure, print, write and draw; returns the exit code: 1 when a request failed.

    `cache_dir` is where --tokenizer is looked for.

    Raises:
        ConfigError: a setting is impossible, or there is no such server.
    """
    check_output(output)
    plan = make_plan(settings, cache_dir)

    def keep(report: Report) -> None:
        deliver(report, replace(output, plot=None), io.StringIO())

    report = asyncio.run(measure_serve(settings, plan, live_progress(), out, keep))
    deliver(report, output, out)
    return 1 if report.tables["errors"] else 0


async def measure_serve(
    settings: ServeBenchSettings,
    plan: Plan,
    progress: Progress,
    out: TextIO,
    keep: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Warm up, then run every point; prints each as it ends, and gives `keep` the report so far.

    Raises:
        ConfigError: there is no such server, or it refuses what every request has in common.
    """
    async with open_client(plan.target) as client:
        if not client.target.model:
            client.target = replace(plan.target, model=await client.find_model())
        await _warm_up(client, settings, plan, progress)
        num = sum(len(one.turns) for one in plan.conversations)
        points: list[PointReport] = []
        # What is there by now lives on; looking through it again and again would cost time while measuring.
        gc.collect()
        gc.freeze()
        try:
            for number, point in enumerate(plan.points):
                run = await run_load(
                    client,
                    plan.conversations,
                    point.load,
                    # Other tokens at every point, or the prefix cache would know them from the one before.
                    new_dialogue=_dialogues(settings, plan, number),
                    think_time_s=settings.think_time_s,
                    assume_usage=plan.assume_usage,
                    on_answer=lambda done, name=point.name: progress(name, done, num),
                )
                points.append(report_point(point, run, plan.slo))
                print(points[-1].text(), file=out, flush=True)
                keep(make_serve_report(settings, plan, client.target.model, points))
        finally:
            gc.unfreeze()
    if len(points) > 1:
        shown = ("requests_per_s", "output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
        shown = (points[0].point.knob, *shown, "e2e_p50_ms", "num_errors")
        print(format_table([point.row for point in points], shown) + "\n", file=out)
    return make_serve_report(settings, plan, client.target.model, points)


async def _warm_up(client: LoadClient, settings: ServeBenchSettings, plan: Plan, progress: Progress) -> None:
    """Ask once, to see that server and settings go together, then as often as --warmup says."""
    first = warm_up_prompts(plan.conversations, 1)[0].turns[0]
    dialogue = _dialogues(settings, plan, -1)()
    assumed = Usage(0, PROBE_TOKENS) if plan.assume_usage else None
    probe = await client.send(client.target.body(dialogue.ask(first), PROBE_TOKENS), assumed=assumed)
    if probe.error == "no_usage":
        raise ConfigError(
            f"{plan.target.url} sends no usage at the end of a stream, although stream_options.include_usage "
            "asks for it; without it tokens can't be counted, only chunks, which are something else; "
            "--tokens-from asked takes the server at its word"
        )
    if probe.error == "connect":
        raise ConfigError(f"no server answers at {plan.target.url} ({probe.error_message}); see --url")
    if probe.error is not None:
        refused = probe.error in ("http_400", "http_404", "http_422")
        raise ConfigError(
            f"{plan.target.url}{plan.target.path} failed at the first request: {probe.error} "
            f"({probe.error_message})"
            + ("; see --no-ignore-eos, --prompt-form, --vocab-size, --served-model-name" if refused else "")
        )
    others = warm_up_prompts(plan.conversations, settings.warmup)
    run = await run_load(
        client,
        others,
        Load([0.0] * len(others), None),
        new_dialogue=_dialogues(settings, plan, -2),
        assume_usage=plan.assume_usage,
        on_answer=lambda done: progress("warm-up", done, len(others)),
    )
    failed = next((one.answer for one in run.sent if one.answer.error is not None), None)
    if failed is not None:
        raise ConfigError(f"a warm-up request failed: {failed.error} ({failed.error_message})")


def _dialogues(settings: ServeBenchSettings, plan: Plan, number: int) -> Callable[[], Dialogue]:
    return lambda: Dialogue(plan.form, (plan.prompt_seed, number), settings.vocab_size)
