"""`minisgl bench serve`: puts load on an OpenAI-compatible server and measures the latencies its users see.

Promise: token counts are the server's own; a server that sends none is refused unless --tokens-from says
otherwise. Failed requests are counted by kind and enter no latency. The report contains a warning where the
client was the bottleneck. Torch-free.
"""

import asyncio
import gc
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from minisgl.benchmark.load.datasets import Dialogue, warm_up_prompts
from minisgl.benchmark.load.load_client import LoadClient, open_client
from minisgl.benchmark.load.load_run import Load, run_load
from minisgl.benchmark.load.serve_plan import Plan, make_plan
from minisgl.benchmark.load.serve_report import PointReport, make_serve_report, report_point
from minisgl.benchmark.load.sse import Usage
from minisgl.benchmark.reports.plots import check_output, write_outputs
from minisgl.benchmark.reports.report import Report, format_table
from minisgl.benchmark.settings import OutputSettings, ServeBenchSettings
from minisgl.errors import ConfigError
from minisgl.progress import Progress, ShownProgress, lines_on

PROBE_TOKENS = 2


def run_serve_bench(
    settings: ServeBenchSettings, output: OutputSettings, out: TextIO, *, cache_dir: Path | None = None
) -> int:
    """Measure, print, write and draw. Returns the exit code, which is 1 when a request failed.

    `cache_dir` is the folder of downloaded models, where --tokenizer is searched.

    Raises:
        ConfigError: a setting is impossible, or there is no such server.
    """
    check_output(output)
    plan = make_plan(settings, cache_dir)

    def save_report(report: Report) -> None:
        write_outputs(report, replace(output, plot=None), io.StringIO())

    with ShownProgress(lines_on()) as progress:
        report = asyncio.run(measure_serve(settings, plan, progress, out, save_report))
    write_outputs(report, output, out)
    return 1 if report.tables["errors"] else 0


async def measure_serve(
    settings: ServeBenchSettings,
    plan: Plan,
    progress: Progress,
    out: TextIO,
    save_report: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Warm up, then run every point; after each one, print it and call `save_report` with the report so far.

    Raises:
        ConfigError: no such server answers, or it refuses the fields that every request has.
    """
    async with open_client(plan.target) as client:
        if not client.target.model:
            client.target = replace(plan.target, model=await client.find_model())
        await _warm_up(client, settings, plan, progress)
        num = sum(len(one.turns) for one in plan.conversations)
        points: list[PointReport] = []
        # All objects made so far live on. Freezing them keeps the garbage collector from scanning them again.
        gc.collect()
        gc.freeze()
        try:
            for number, point in enumerate(plan.points):
                progress(point.name, 0, num, "requests")
                run = await run_load(
                    client,
                    plan.conversations,
                    point.load,
                    # Every point gets other tokens, so that the prefix cache has none from an earlier point.
                    new_dialogue=_dialogues(settings, plan, number),
                    think_time_s=settings.think_time_s,
                    assume_usage=plan.assume_usage,
                    on_answer=lambda done, name=point.name: progress(name, done, num, "requests"),
                )
                points.append(report_point(point, run, plan.slo))
                print(points[-1].text(), file=out, flush=True)
                save_report(make_serve_report(settings, plan, client.target.model, points))
        finally:
            gc.unfreeze()
    if len(points) > 1:
        shown = ("requests_per_s", "output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
        shown = (points[0].point.knob, *shown, "e2e_p50_ms", "num_errors")
        print(format_table([point.row for point in points], shown) + "\n", file=out)
    return make_serve_report(settings, plan, client.target.model, points)


async def _warm_up(client: LoadClient, settings: ServeBenchSettings, plan: Plan, progress: Progress) -> None:
    """Send one request, to check that server and settings fit, then --warmup requests."""
    first = warm_up_prompts(plan.conversations, 1)[0].turns[0]
    dialogue = _dialogues(settings, plan, -1)()
    assumed = Usage(0, PROBE_TOKENS) if plan.assume_usage else None
    probe = await client.send(client.target.body(dialogue.next_prompt(first), PROBE_TOKENS), assumed=assumed)
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
        on_answer=lambda done: progress("warm-up", done, len(others), "requests"),
    )
    failed = next((one.answer for one in run.sent if one.answer.error is not None), None)
    if failed is not None:
        raise ConfigError(f"a warm-up request failed: {failed.error} ({failed.error_message})")


def _dialogues(settings: ServeBenchSettings, plan: Plan, number: int) -> Callable[[], Dialogue]:
    return lambda: Dialogue(plan.form, (plan.prompt_seed, number), settings.vocab_size)
