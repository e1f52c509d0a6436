"""Says in plain English why a request waited and why the server was slow, and which setting helps.

Promise: pure functions of figures. Each sentence has its figures and, where one helps, its knob: a flag of
`minisgl serve`, or a field of the request.
"""

from collections.abc import Callable

import msgspec

from minisgl.lives import Life, Phase, Wait

MIN_CACHED_SHARE = 0.5
"""A request with this share of its prompt cached has waited for its own prefix."""


class Cause(msgspec.Struct, frozen=True):
    """A part of a request's life, with its reason."""

    reason: str
    """A `lives.WaitReason`, a `lives.PhaseKind`, "prefix", "client" or "refused"."""
    ms: float
    words: str
    knobs: list[str]
    """What to change, the most helpful first."""


class SlowClient(msgspec.Struct, frozen=True):
    """A call whose client does not read its answer."""

    id: str
    """The call's X-Request-Id."""
    unsent_bytes: int
    """Bytes that the server has written and the client's system has not taken."""
    unread_pieces: int
    """Pieces of the answer that wait behind them."""
    stalled_ms: float
    """Since the client last took something."""


def causes_of(life: Life, client: SlowClient | None = None) -> list[Cause]:
    """Where a request's time went, the longest part first, and last what it did by itself: decoding."""
    found: dict[str, Cause] = {}

    def add(reason: str, ms: float, say: Callable[[float], str], *knobs: str) -> None:
        """Of two causes with the same reason, `say` words the sum of both with the later one's figures."""
        if ms > 0:
            ms += found[reason].ms if reason in found else 0.0
            found[reason] = Cause(reason, round(ms, 3), say(ms), list(knobs))

    lost: Phase | None = None
    for phase in life.phases:
        end_ms = life.total_ms if phase.end_ms is None else phase.end_ms
        ms = end_ms - phase.begin_ms
        if phase.kind == "preempted" or (phase.kind == "prompt" and lost is not None):
            if phase.kind == "preempted":
                lost = phase
            assert lost is not None
            add("preempted", ms, lambda ms, lost=lost: _preempted(ms, lost, life), *MORE_PAGES)
        elif phase.waits:
            for wait in phase.waits:
                _add_wait(add, wait, life)
        elif phase.kind == "grammar":
            add("grammar", ms, _grammar, "response_format")
        elif phase.kind == "server":
            add("server", ms, lambda ms: _server(ms, life), "--api-workers")
        elif phase.kind == "earlier":
            add("earlier", ms, lambda ms: f"{duration(ms)} in an engine that has ended; its log says why")
        elif phase.kind == "restart":
            add("restart", ms, _restart, "--engine-restarts")
        elif phase.kind == "prompt":
            knobs = LARGER_STEPS if len(phase.chunks) > 1 else ("prompt",)
            add("prompt", ms, lambda ms, phase=phase: _prompt(ms, phase), *knobs)
        elif phase.kind == "folded":
            num = phase.figures.get("preemptions", 0)
            say = f"in which it was preempted {num} times; a higher --memory-fraction or --num-pages"
            add("folded", ms, lambda ms, say=say: f"{duration(ms)} {say}", *MORE_PAGES)
        elif phase.kind == "decoding":
            add("decoding", ms, lambda ms: _decoding(ms, life), "max_tokens")
    if client is not None:
        add("client", max(client.stalled_ms, 0.001), lambda ms: _client(ms, client), "--request-timeout-s")
    if life.error_code and not life.prompt_tokens:
        add("refused", max(life.total_ms, 0.001), lambda _: f"refused by the engine: {life.error_code}")
    return sorted(found.values(), key=lambda one: (one.reason == "decoding", -one.ms))


MORE_PAGES = ("--memory-fraction", "--num-pages", "--max-running-requests")
LARGER_STEPS = ("--mixed-step-tokens", "--max-step-tokens")


def _add_wait(add: Callable[..., None], wait: Wait, life: Life) -> None:
    figures = wait.figures
    if wait.reason == "step":
        add("step", wait.ms, _step, "--mixed-step-tokens")
    elif wait.reason == "rows":
        add("rows", wait.ms, lambda ms: _rows(ms, figures), "--max-running-requests")
    elif wait.reason == "share":
        add("share", wait.ms, _share, "--max-running-requests")
    elif wait.reason == "pages":
        add("pages", wait.ms, lambda ms: _pages(ms, figures), *MORE_PAGES)
    elif wait.reason == "rules":
        add("rules", wait.ms, _rules, "logit_bias", "allowed_token_ids")
    elif wait.reason == "priority":
        knobs = ("priority", "--max-running-requests")
        add("priority", wait.ms, lambda ms: _priority(ms, figures, life), *knobs)
    elif life.cached_tokens >= MIN_CACHED_SHARE * max(life.prompt_tokens, 1):
        add("prefix", wait.ms, lambda ms: _prefix(ms, life), *LARGER_STEPS)
    else:
        add("budget", wait.ms, lambda ms: _budget(ms, figures), "--chunk-tokens", *LARGER_STEPS)


def _step(ms: float) -> str:
    return (
        f"{duration(ms)} for the running step to end, as rows are given between two steps; a lower "
        "--mixed-step-tokens makes steps shorter"
    )


def _rows(ms: float, figures: dict[str, int]) -> str:
    return (
        f"{duration(ms)} for a row: all {figures.get('rows', 0)} were taken; a higher "
        "--max-running-requests, where memory is left"
    )


def _share(ms: float) -> str:
    return (
        f"{duration(ms)} for a row: its user's requests have half of them, and the last free one is kept "
        "for other users; a higher --max-running-requests, where memory is left"
    )


def _pages(ms: float, figures: dict[str, int]) -> str:
    needed, free, reserved = (figures.get(f"{name}_pages", 0) for name in ("needed", "free", "reserved"))
    held = 100 * figures.get("held_pages", 0) // max(figures.get("pages", 1), 1)
    holders = {1: "one request holds", 2: "two requests hold"}.get(figures.get("holders", 0), "others hold")
    others = f" ({reserved} more are kept for the {figures.get('running', 0)} running requests)"
    if figures.get("window"):
        return (
            f"{duration(ms)} for pages of the layers with a window of {figures['window']} tokens: {needed} "
            f"needed, {free} free{others if reserved else ''}; a higher --memory-fraction or --num-pages, or "
            "fewer --max-running-requests"
        )
    return (
        f"{duration(ms)} for pages: {needed} needed, {free} free{others if reserved else ''}, {holders} "
        f"{held} %; a higher --memory-fraction or --num-pages, or fewer --max-running-requests"
    )


def _budget(ms: float, figures: dict[str, int]) -> str:
    tokens, rest = figures.get("step_tokens", 0), figures.get("longest_rest_tokens")
    longest = f", and request {figures.get('longest')} had {rest} tokens left" if rest else ""
    return (
        f"{duration(ms)} for prompts in front: they took all {tokens} prompt tokens of a step{longest}; a "
        "lower --chunk-tokens shares the steps between prompts, a higher --mixed-step-tokens or "
        "--max-step-tokens needs fewer steps"
    )


def _prefix(ms: float, life: Life) -> str:
    return (
        f"{duration(ms)} while a prompt in front was computed, from which this request then read "
        f"{life.cached_tokens} of its {life.prompt_tokens} tokens; a higher --mixed-step-tokens or "
        "--max-step-tokens computes it in fewer steps"
    )


def _rules(ms: float) -> str:
    return (
        f"{duration(ms)} while the step wrote the logit rules of other requests; shorter lists of "
        "logit_bias and allowed_token_ids"
    )


def _priority(ms: float, figures: dict[str, int], life: Life) -> str:
    return (
        f"{duration(ms)} behind requests of priority {figures.get('priority_of_first', 0)}, as this one "
        f"has {life.priority}; a higher priority for it, or a higher --max-running-requests"
    )


def _preempted(ms: float, phase: Phase, life: Life) -> str:
    by, pages = phase.figures.get("by", -1), phase.figures.get("held_pages", 0)
    times = "once" if life.num_preemptions == 1 else f"{life.num_preemptions} times"
    if by == -1:
        why = "a page that it shared may have held NaN, so it was computed again alone"
    else:
        needs = "it needed a page" if by == life.number else f"request {by} needed a page"
        why = f"{needs} and none was free, so this one, the youngest, gave back its {pages}"
    return (
        f"{duration(ms)} preempted {times}, computing its tokens again included: {why}; a higher "
        "--memory-fraction or --num-pages, or fewer --max-running-requests"
    )


def _grammar(ms: float) -> str:
    return (
        f"{duration(ms)} until its grammar was compiled; the next request with the same response_format "
        "finds it ready, and a simpler one compiles faster"
    )


def _server(ms: float, life: Life) -> str:
    return (
        f"{duration(ms)} in the server process: reading, tokenizing {life.prompt_tokens} tokens, and the way "
        "to the engine, which reads between two steps; more --api-workers"
    )


def _restart(ms: float) -> str:
    return (
        f"{duration(ms)} while the engine, which had ended, was started again; its log says why it ended; "
        "--engine-restarts says how often it may be"
    )


def _prompt(ms: float, phase: Phase) -> str:
    is_one = len(phase.chunks) <= 1
    chunks = "one step" if is_one else f"{len(phase.chunks)} steps"
    advice = "a higher --mixed-step-tokens or --max-step-tokens needs fewer steps"
    if is_one:
        advice = "of a prompt that begins like an earlier one, less has to be computed"
    return (
        f"{duration(ms)} to compute {phase.figures.get('tokens', 0)} prompt tokens in {chunks}, "
        f"{phase.figures.get('cached_tokens', 0)} more were cached; {advice}"
    )


def _decoding(ms: float, life: Life) -> str:
    each = f", {duration(ms / life.output_tokens)} each" if life.output_tokens else ""
    return f"{duration(ms)} to generate {life.output_tokens} tokens{each}; max_tokens bounds them"


def _client(ms: float, client: SlowClient) -> str:
    return (
        f"the client reads slowly: {client.unsent_bytes} bytes unsent and {client.unread_pieces} pieces of "
        f"the answer behind them, for {duration(ms)}; it is cut off 10 s after --request-timeout-s"
    )


def duration(ms: float) -> str:
    """A time in the unit that suits it."""
    if ms >= 10_000:
        return f"{ms / 1e3:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
