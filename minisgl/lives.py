"""What is told of requests and slow moments: the shapes that the engine fills and the server answers with.

Promise: numbers, names and request ids only, no text and no tokens. Fields are only added, never renamed.
Times in a life are milliseconds since the request arrived; `arrived_at` and `at` are Unix times in seconds.
"""

from typing import Literal

import msgspec

WaitReason = Literal["step", "rows", "share", "pages", "budget", "rules", "priority"]
"""Why a request gets no row. Those behind the first in the queue have the reason of the first.

step: the running step must end first, or the step has admitted as many as it may. rows: all rows are taken.
share: its user has half of the rows, and the last free one is kept for others. pages: its pages do not fit
beside those that the running requests still need. budget: other prompts take all prompt tokens of the steps.
rules: the step writes the logit rules of other requests. priority: the first in the queue has a higher
priority.
"""
PhaseKind = Literal[
    "earlier", "restart", "server", "grammar", "queued", "prompt", "decoding", "preempted", "folded"
]
"""earlier: in an engine that has ended since. restart: until the engine ran again and got the request.
server: on its way through the server process to the engine. grammar: its grammar is being compiled.
queued: waits for a row. prompt: its tokens are computed, chunk by chunk. decoding: from its first token on.
preempted: it lost row and pages, and waits again. folded: several phases told as one, in a life of very many.
"""
State = Literal["restart", "grammar", "queued", "prompt", "decoding", "preempted", "ended"]
StepReason = Literal[
    "recompile", "graph_recording", "graph_miss", "gc", "grammar", "prompt", "preemption", "messages",
    "planning", "profile", "device",
]  # fmt: skip
"""What most likely made a step slow; `docs/seeing.md` says how each is recognised."""
MAX_ENDED = 1000
"""How many ended requests the engine remembers."""
MAX_MOMENTS = 100
"""How many slow moments each process remembers."""
STEP_BOUNDS_MS = tuple(round(0.25 * 1.4**power, 3) for power in range(33))
"""Upper bounds of the buckets that count steps by their length, 0.25 ms to 12 s; one more bucket follows."""
REQUEST_BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0,
    500.0, 1000.0,
)  # fmt: skip
"""Upper bounds of the buckets that count requests by the length of a part; one more bucket follows."""
REQUEST_PARTS = ("queue", "prefill", "decode", "inference")
"""The parts of a request in the engine. queue: until its first row. prefill: from there to its first token.
decode: from there to its end. inference: prefill and decode. Waits after a preemption belong to the part in
which they begin."""
STEP_PARTS = ("plan", "launch", "masks", "wait", "apply", "other")
"""The parts of a step on the host; other: taking messages, sending outputs, recording graphs."""


class Wait(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a waiting time, by its reason."""

    reason: WaitReason
    ms: float
    figures: dict[str, int] = {}
    """What explains the reason, when it was last given; see `docs/seeing.md`."""


class Phase(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a request's life. Each begins where the one before it ends."""

    kind: PhaseKind
    begin_ms: float
    end_ms: float | None = None
    """None = it goes on."""
    waits: list[Wait] = []
    """Of "queued" and "preempted": their time by reason. The sum is the phase's length."""
    chunks: list[tuple[float, int]] = []
    """Of "prompt": (end in ms, tokens) of each chunk; of very many, neighbours are one."""
    figures: dict[str, int] = {}


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """A request from its arrival to its end, or until now."""

    number: int
    """The engine's id of the request; each choice of a call has its own."""
    id: str
    """The call's X-Request-Id, which is part of the answer's id; empty = unknown."""
    state: State
    arrived_at: float
    total_ms: float
    """From its arrival to its end, or until now."""
    first_token_ms: float | None
    """Of a request from an engine that has ended: the first since."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    output_tokens: int
    priority: int
    num_preemptions: int
    ahead: int | None
    """Requests before it in the queue; None = it is not in the queue."""
    end: str | None
    """stop, length, abort or error; None = it is open."""
    error_code: str
    phases: list[Phase]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A time when the server was slow, or refused requests. Neighbours with the same reason are one."""

    number: int
    """Counts up; a larger one is newer."""
    kind: Literal["step", "first_token", "refused"]
    reason: str
    """Of "step" a `StepReason`; of "first_token" the longest wait or phase; of "refused" the error's code."""
    at: float
    until: float
    count: int
    worst_ms: float
    usual_ms: float
    """The running median at that time; 0 = none."""
    figures: dict[str, float]
    """Of the worst."""


class LivesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's answer to a question about requests."""

    requests: list[Life]
    """The newest first."""
    num_open: int
    num_ended: int
    """Since the start; the last `MAX_ENDED` are remembered."""
    moments: list[Moment]
    """The oldest first."""
