"""Questions of a server process to the engine, and the answers: messages as those of `messages.py`.

Promise: the engine answers each question between two steps, to the process that asked, with its `sequence`.
"""

from typing import Annotated

import msgspec

MAX_PROFILED_STEPS = 1000
"""A trace of more steps is too large for trace viewers."""
ProfiledSteps = Annotated[int, msgspec.Meta(ge=1, le=MAX_PROFILED_STEPS)]


class Ping(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Server -> engine: a heartbeat. The engine's own loop answers with `Status`."""

    sequence: int
    server: int = 0
    """Rank of the asking server process, which gets the answer."""


class FlushCache(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Server -> engine: evict every cached page that no request uses. The answer is `CacheFlushed`."""

    sequence: int
    server: int = 0


class AskTimeline(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Server -> engine: send the last steps' timeline. The answer is a `DebugAnswer` with a JSON trace."""

    sequence: int
    server: int = 0


class AskProfile(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Server -> engine: profile the next steps. A `DebugAnswer` with the file's path comes at once."""

    sequence: int
    server: int = 0
    num_steps: ProfiledSteps = 1


class AskRequests(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Server -> engine: tell of requests. The answer is a `DebugAnswer` with a `lives.LivesAnswer`."""

    sequence: int
    server: int = 0
    state: str = ""
    """A `lives.State`, or "open", "waiting" or "running"; empty = all."""
    id: str = ""
    """Only the requests of the call with this id."""
    number: int = -1
    """Only the request with this number."""
    limit: int = 100
    """Most requests in the answer, the newest first."""
    ended_after: float = 0.0
    """Only requests that are open, or ended after this Unix time."""
    skip: int = 0
    """Leave out this many of the newest."""
    numbers: tuple[int, ...] = ()
    """Only the requests with these numbers, and no moments; empty = all."""


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
    """Decode steps without a recorded graph; 0 in a healthy service. Prefills that have none by design (large
    ones, many short chunks) do not count."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_broken_counts: int = 0
    """Times the page counts did not add up while no request ran; 0 unless there is a bug."""
    num_held_pages: int = 0
    """Pages that requests hold; 0 while no request runs."""
    num_held_rows: int = 0
    """Rows of the device tables that requests hold; 0 while no request runs."""
    num_without_logits: int = 0
    """Requests that ended because the model gave no finite logits; 0 with a sound checkpoint and dtype."""
    num_without_token: int = 0
    """Requests that ended because their own rules banned every token."""
    step_counts: list[int] = []
    """Steps by length: a bucket for each of `lives.STEP_BOUNDS_MS`, and one for longer ones."""
    step_part_s: list[float] = []
    """Seconds of all steps by `lives.STEP_PARTS`."""
    gc_s: float = 0.0
    """Seconds that Python's garbage collection took."""
    num_ended: int = 0
    """Requests that have ended, refused ones included."""
    num_moments: int = 0
    """Slow moments (`lives.Moment`)."""
    request_counts: list[list[int]] = []
    """For each of `lives.REQUEST_PARTS`, requests by its length: a bucket for each of
    `lives.REQUEST_BOUNDS_S`, and one for longer ones."""
    request_part_s: list[float] = []
    """Seconds of all requests by `lives.REQUEST_PARTS`."""
    window_pages: list[list[int]] = []
    """Of each further group of layers: its window, and its usable, free and held pages. The other numbers of
    pages are those of the first group."""


class CacheFlushed(msgspec.Struct, tag=21, array_like=True, frozen=True):
    """Engine -> server: the answer to `FlushCache`."""

    sequence: int
    num_pages: int
    """Pages that the flush freed."""


class DebugAnswer(msgspec.Struct, tag=22, array_like=True, frozen=True):
    """Engine -> server: the answer to `AskTimeline`, `AskProfile` and `AskRequests`."""

    sequence: int
    body: bytes
    error: str = ""
    """Why the call failed, and what to do; empty = it succeeded."""


Question = Ping | FlushCache | AskTimeline | AskProfile | AskRequests
QuestionAnswer = Status | CacheFlushed | DebugAnswer
