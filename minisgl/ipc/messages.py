"""The wire between the server processes and the engine process: msgspec msgpack of tagged structs.

Promise: plain data only (no pickle, no tensors). Structs are positional: fields are only ever
appended, with defaults, so old and new can talk.
"""

from typing import Annotated

import msgspec

from minisgl.request import RequestOutput, SamplingParams

IDS_PER_SERVER = 1 << 40
"""Server process r hands out the request ids from r * IDS_PER_SERVER on, so that no two are equal."""
MAX_PROFILED_STEPS = 1000
"""A trace of more is too large to be opened, and writing it would stop the engine for long."""
ProfiledSteps = Annotated[int, msgspec.Meta(ge=1, le=MAX_PROFILED_STEPS)]


class AddRequest(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Server -> engine: start this request. The engine answers every one, refusals included."""

    request_id: int
    prompt_ids: bytes
    """Token ids as little-endian int32."""
    params: SamplingParams
    priority: int = 0
    """Larger runs sooner."""
    streamed: bool = True
    """Somebody reads its tokens as they come: `mixed_step_tokens` bounds the pauses between them."""


class AbortRequest(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Server -> engine: nobody listens any more. The final output says ABORT; ended ids are ignored."""

    request_id: int


class Ping(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Server -> engine: are you alive? Answered by `Status` from the engine's own loop."""

    sequence: int
    server: int = 0
    """Rank of the server process that asks and gets the answer."""


class Shutdown(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Server -> engine: stop now, cleanly."""


class FlushCache(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Server -> engine: drop every cached page that no running request uses. Answered by `CacheFlushed`."""

    sequence: int
    server: int = 0


class AskTimeline(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Server -> engine: what did the last steps do? Answered by `DebugAnswer` with a trace as JSON."""

    sequence: int
    server: int = 0


class AskProfile(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Server -> engine: profile your next steps. Answered at once by `DebugAnswer` with the file's path."""

    sequence: int
    server: int = 0
    num_steps: ProfiledSteps = 1


class Ready(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """Engine -> server, once: start-up is over, requests are welcome."""

    max_context_tokens: int
    """Longest prompt + output of one request: the least of the model's, the flag's and the pool's."""
    num_pages: int
    page_size: int
    max_rows: int
    device: str
    startup_ms: dict[str, float]
    """Stage -> milliseconds, in order; they add up to the engine's start-up time."""


class StartupStage(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """Engine -> server, while starting: a stage is over (also proof of life before `Ready`)."""

    name: str
    duration_ms: float


class StepOutput(msgspec.Struct, tag=18, array_like=True, frozen=True):
    """Engine -> server: everything one step gave, in one message."""

    outputs: list[RequestOutput]


class Status(msgspec.Struct, tag=19, array_like=True, frozen=True):
    """Engine -> server: the answer to `Ping`."""

    sequence: int
    num_steps: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_free_pages: int = 0
    num_cached_pages: int = 0
    num_preemptions: int = 0
    num_recompiles: int = 0
    """Compilations after warm-up; 0 in a healthy service."""
    num_graph_misses: int = 0
    """Decode steps that found no recorded graph; 0 in a healthy service. Prefills that have none by design
    (large ones, many short chunks) are not among them."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_broken_counts: int = 0
    """Times the pages did not add up while nothing ran; 0 unless there is a bug."""
    num_held_pages: int = 0
    """Pages that requests hold; 0 when nothing runs."""
    num_held_rows: int = 0
    """Rows of the device tables that requests hold; 0 when nothing runs."""


class Fatal(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """Engine -> server, the last message: start-up or a step failed, and what the user should do."""

    message: str


class CacheFlushed(msgspec.Struct, tag=21, array_like=True, frozen=True):
    """Engine -> server: the answer to `FlushCache`."""

    sequence: int
    num_pages: int
    """Pages that are free because of it."""


class DebugAnswer(msgspec.Struct, tag=22, array_like=True, frozen=True):
    """Engine -> server: the answer to `AskTimeline` and `AskProfile`."""

    sequence: int
    body: bytes
    error: str = ""
    """Why it could not be done, and what to do; empty = it could."""


ToEngine = AddRequest | AbortRequest | Ping | Shutdown | FlushCache | AskTimeline | AskProfile
ToServer = Ready | StartupStage | StepOutput | Status | Fatal | CacheFlushed | DebugAnswer
