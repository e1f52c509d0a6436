"""Says in plain English what a slow moment was, or why requests were refused, and which setting helps.

Promise: pure functions of figures. A knob is a flag of `minisgl serve`, or a field of the request.
"""

from collections import defaultdict

import msgspec

from minisgl.lives import Moment
from minisgl.server.watch.words import LARGER_STEPS, MORE_PAGES, duration


class Advice(msgspec.Struct, frozen=True):
    """What a moment's reason means."""

    words: str
    knobs: list[str]


def advice_on(moment: Moment) -> Advice:
    """What made the server slow at a moment, or why it refused requests, and what helps."""
    figures = moment.figures
    if moment.kind == "refused":
        why, knobs = REFUSALS.get(moment.reason, (f"the error {moment.reason}", ()))
        times = "a request was" if moment.count == 1 else f"{moment.count} requests were"
        return Advice(f"{times} refused: {why}", list(knobs))
    if moment.kind == "first_token":
        why, knobs = FIRST_TOKENS.get(moment.reason, (f"for the reason {moment.reason}", ()))
        times = "a first token took" if moment.count == 1 else f"{moment.count} first tokens took up to"
        usual = f", usually {duration(moment.usual_ms)}" if moment.usual_ms else ""
        part = f"{duration(figures.get('reason_ms', 0.0))} of it {why}"
        return Advice(f"{times} {duration(moment.worst_ms)}{usual}: {part}", list(knobs))
    why, knobs = STEPS.get(moment.reason, ("", ()))
    times = "a step took" if moment.count == 1 else f"{moment.count} steps took up to"
    usual = f", usually {duration(moment.usual_ms)}" if moment.usual_ms else ""
    figures = figures | {"device_ms": figures.get("launch_ms", 0.0) + figures.get("wait_ms", 0.0)}
    shown = defaultdict(lambda: "some", {name: f"{value:.0f}" for name, value in figures.items()})
    shown["help"] = f"; {_or(knobs)}" if knobs else ""
    words = why.format_map(shown)
    return Advice(f"{times} {duration(moment.worst_ms)}{usual}: {words}", list(knobs))


STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "recompile": ("code was compiled for a new shape; please report it", ("--strict-compile",)),
    "graph_recording": ("a CUDA graph was recorded; this ends some seconds after the start", ()),
    "graph_miss": ("its {decodes} rows had no CUDA graph{help}", ("--max-graph-batch",)),
    "gc": ("Python collected garbage for {gc_ms} ms", ()),
    "grammar": (
        "the masks of grammars took {masks_ms} ms; simpler schemas are faster",
        ("response_format",),
    ),
    "prompt": (
        "it computed {prompt_tokens} prompt tokens beside {decodes} decodes; lower values of "
        "--mixed-step-tokens or --chunk-tokens bound the pause",
        ("--mixed-step-tokens", "--chunk-tokens"),
    ),
    "preemption": ("requests were preempted, as the pool had no page left{help}", MORE_PAGES),
    "messages": (
        "the engine took in messages and sent outputs for {other_ms} ms; smaller calls (n, prompts) help",
        ("n",),
    ),
    "planning": ("planning took {plan_ms} ms, as when many requests come at once{help}", ("n",)),
    "profile": ("torch's profiler was on", ()),
    "device": (
        "launching it and waiting for the device took {device_ms} ms, for which nothing in the plan is a "
        "reason; something else may use the device or the processor, or the device's clock fell",
        (),
    ),
}
"""By `lives.StepReason`."""

FIRST_TOKENS: dict[str, tuple[str, tuple[str, ...]]] = {
    "step": ("waiting for the running step", ("--mixed-step-tokens",)),
    "rows": ("waiting for a row; a higher --max-running-requests", ("--max-running-requests",)),
    "share": (
        "waiting for a row while its user had half of them; a higher --max-running-requests",
        ("--max-running-requests",),
    ),
    "pages": ("waiting for pages; a higher --memory-fraction or --num-pages", MORE_PAGES),
    "budget": (
        "waiting for prompts in front; a lower --chunk-tokens shares the steps between prompts",
        ("--chunk-tokens", *LARGER_STEPS),
    ),
    "rules": ("waiting for the logit rules of others; shorter lists", ("logit_bias", "allowed_token_ids")),
    "priority": ("waiting behind requests of a higher priority", ("priority", "--max-running-requests")),
    "grammar": (
        "while its grammar was compiled; the next request with the same response_format finds it ready",
        ("response_format",),
    ),
    "restart": ("while the engine was started again; its log says why it ended", ("--engine-restarts",)),
    "earlier": ("in an engine that has ended; its log says why", ()),
    "server": ("on its way through the server process; more --api-workers", ("--api-workers",)),
    "prompt": ("computing its prompt; a higher --mixed-step-tokens needs fewer steps", LARGER_STEPS),
    "preempted": ("preempted; a higher --memory-fraction or --num-pages", MORE_PAGES),
}
"""By what took the most of the time."""

REFUSALS: dict[str, tuple[str, tuple[str, ...]]] = {
    "too_many_requests": (
        "the queue was full; a higher --max-queued-requests lets more wait, a higher --max-running-requests "
        "runs more at once",
        ("--max-queued-requests", "--max-running-requests"),
    ),
    "too_many_tokens": (
        "too many prompt tokens waited for an answer; a higher --max-queued-tokens",
        ("--max-queued-tokens",),
    ),
    "too_many_connections": (
        "too many connections were open; raise the limit on open files (ulimit -Hn)",
        ("ulimit -Hn",),
    ),
    "too_many_streams": ("too many streams of /debug/events were open; close those that nobody reads", ()),
    "too_many_uploads": (
        "too many bytes of bodies were being read; a higher --max-upload-bytes",
        ("--max-upload-bytes",),
    ),
    "too_many_grammars": (
        "too many grammars waited to be compiled; reuse the same schema, which is compiled once",
        ("response_format",),
    ),
    "loading": (
        "the engine was starting; wait until /health/ready answers 200 (--startup-timeout-s is its limit)",
        ("/health/ready", "--startup-timeout-s"),
    ),
    "shutting_down": (
        "the server was stopping; open requests may go on for --drain-timeout-s, new ones go elsewhere",
        ("--drain-timeout-s",),
    ),
    "out_of_memory": ("no memory was left for penalties and biases; a lower --memory-fraction", MORE_PAGES),
    "engine_dead": ("the engine had died; its log says why", ()),
}
"""By the error's code."""


def _or(knobs: tuple[str, ...]) -> str:
    """A hint at knobs, of which there is one at least."""
    return "see " + ", ".join(knobs[:-1]) + (" or " if len(knobs) > 1 else "") + knobs[len(knobs) - 1]
