"""The spans of a call: the call itself, and the queue, prefill and decode of each of its choices.

Promise: numbers, names and ids only, no text and no tokens. Names of attributes are those of OpenTelemetry's
conventions for GenAI and HTTP where these have one; the others begin with `minisgl.`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minisgl.lives import Life, Phase
from minisgl.server.http.middleware import CLIENT_LEFT

Attributes = dict[str, str | int | float | bool | list[str]]

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/generate": "text_completion",
}
"""The routes that have spans, and what they do by the names of the conventions."""
BEFORE_QUEUE = ("earlier", "restart", "server")
"""The phases of a life before its engine had the request."""
MAX_CHOICES = 16
"""So many choices of a call have spans of their own."""


class EndedCall(NamedTuple):
    """A call that has been answered, refused or left. Times are Unix times in seconds."""

    route: str
    method: str
    model: str
    request_id: str
    status: int
    error_code: str
    """Empty = it did not fail."""
    began_s: float
    ended_s: float
    first_token_s: float | None
    """After `began_s`."""
    is_streamed: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: Mapping[int, str]
    """By choice; those that have ended."""
    numbers: range
    """The engine's numbers of its choices; empty = nothing was sent."""
    parent: Mapping[str, str]
    """The headers `traceparent` and `tracestate`, if the call had them."""

    @property
    def told_numbers(self) -> range:
        """The numbers of the choices that get spans."""
        return self.numbers[:MAX_CHOICES]


class SpanData(NamedTuple):
    """A span. Times are Unix times in seconds."""

    name: str
    begin_s: float
    end_s: float
    attributes: Attributes
    error: str = ""
    """The code of the error that it ended with; empty = none."""
    events: Sequence[tuple[str, float, Attributes]] = ()
    """Name, time and attributes."""


def span_of_call(call: EndedCall) -> SpanData:
    """The span of the call itself."""
    operation = OPERATIONS[call.route]
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "minisgl",
        "gen_ai.request.model": call.model,
        "http.request.method": call.method,
        "http.route": call.route,
        "http.response.status_code": call.status,
        "minisgl.request_id": call.request_id,
    }
    if call.numbers:
        attributes["gen_ai.request.stream"] = call.is_streamed
        attributes["gen_ai.usage.input_tokens"] = call.num_prompt_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = call.num_cached_tokens
        attributes["gen_ai.usage.output_tokens"] = call.num_output_tokens
    if len(call.numbers) > 1:
        attributes["gen_ai.request.choice.count"] = len(call.numbers)
    if call.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = call.first_token_s
    reasons = [call.finish_reasons[choice] for choice in sorted(call.finish_reasons) if choice < MAX_CHOICES]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    error = call.error_code
    if not error and call.status >= 400 and call.status != CLIENT_LEFT:  # a client may leave
        error = str(call.status)
    return SpanData(f"{operation} {call.model}", call.began_s, call.ended_s, attributes, error)


def spans_of_life(life: Life, choice: int) -> list[SpanData]:
    """The spans "queue", "prefill" and "decode" of a choice, as far as it came.

    Each phase of the life belongs to the span in which it begins, so waits after a preemption stand in
    "prefill" or "decode". A failed request's last span has its error.
    """
    row_ms = next((phase.begin_ms for phase in life.phases if phase.kind == "prompt"), None)
    token_ms = life.first_token_ms
    queue_ms = next((one.begin_ms for one in life.phases if one.kind not in BEFORE_QUEUE), life.total_ms)
    bounds = [("queue", queue_ms)]
    if row_ms is not None:
        bounds.append(("prefill", row_ms))
    if row_ms is not None and token_ms is not None:
        bounds.append(("decode", token_ms))
    ends = [begin_ms for _, begin_ms in bounds[1:]] + [life.total_ms]
    spans: list[SpanData] = []
    for (name, begin_ms), end_ms in zip(bounds, ends, strict=True):
        is_last = len(spans) == len(bounds) - 1
        own = [
            phase
            for phase in life.phases
            if phase.kind not in BEFORE_QUEUE
            and begin_ms <= phase.begin_ms
            and (is_last or phase.begin_ms < end_ms)
        ]
        attributes: Attributes = {"minisgl.choice": choice, "minisgl.request_number": life.number}
        attributes |= _waits(own)
        if name == "queue":
            attributes["minisgl.priority"] = life.priority
        elif name == "prefill":
            attributes["minisgl.prompt_tokens"] = life.prompt_tokens
            attributes["minisgl.cached_tokens"] = life.cached_tokens
            attributes["minisgl.chunks"] = sum(len(phase.chunks) for phase in own)
        else:
            attributes["minisgl.output_tokens"] = life.output_tokens
        if name != "queue":
            attributes["minisgl.preemptions"] = sum(map(_num_preemptions, own))
        if is_last:
            attributes["minisgl.end"] = life.end or "open"
        spans.append(
            SpanData(
                name,
                life.arrived_at + begin_ms / 1e3,
                life.arrived_at + end_ms / 1e3,
                attributes,
                (life.error_code or "error") if is_last and life.end == "error" else "",
                [_preemption(life, phase) for phase in own if _num_preemptions(phase)],
            )
        )
    return spans


def _num_preemptions(phase: Phase) -> int:
    if phase.kind == "folded":
        return phase.figures.get("preemptions", 0)
    return int(phase.kind == "preempted")


def _preemption(life: Life, phase: Phase) -> tuple[str, float, Attributes]:
    figures: Attributes = {f"minisgl.{name}": value for name, value in phase.figures.items()}
    return ("preempted", life.arrived_at + phase.begin_ms / 1e3, figures)


def _waits(phases: Sequence[Phase]) -> Attributes:
    """Milliseconds that were waited for a grammar, and for a row by reason."""
    sums: dict[str, float] = {}
    for phase in phases:
        if phase.kind == "grammar" and phase.end_ms is not None:
            sums["grammar"] = sums.get("grammar", 0.0) + phase.end_ms - phase.begin_ms
        for wait in phase.waits:
            sums[wait.reason] = sums.get(wait.reason, 0.0) + wait.ms
    return {f"minisgl.wait.{reason}_ms": round(ms, 3) for reason, ms in sums.items()}
