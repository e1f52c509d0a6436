"""The answers of the routes that say what the server does and why.

Promise: fields are only added, never renamed; a figure that is unknown is null. All that engines tell is a
list of engines, of which there may be several later.
"""

from typing import Any, Literal

import msgspec

from minisgl.lives import Life, Moment
from minisgl.server.engines.ended_life import EndedLife
from minisgl.server.watch.history import Sample
from minisgl.server.watch.words import Cause, SlowClient

EngineState = Literal["starting", "serving", "silent", "restarting", "stopping", "dead"]
"""restarting: it has ended and is being started again; requests wait. silent: it has not answered for
`--heartbeat-timeout-s`. stopping: it goes on with open requests only."""


class MomentView(Moment, frozen=True, kw_only=True):
    """A moment with its words."""

    words: str
    knobs: list[str]


class RequestView(Life, frozen=True, kw_only=True):
    """A request with its words."""

    why: str
    """The first of `causes`; empty = nothing yet."""
    causes: list[Cause]
    """Where its time went: the longest part first, decoding last."""
    client: SlowClient | None
    """Set while its client does not read its answer."""


class EngineRequests(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    state: EngineState
    num_open: int
    num_ended: int
    """Since the start; the last 1000 are remembered."""
    requests: list[RequestView]
    """The newest first."""


class RequestsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """GET /debug/requests, and /debug/requests/{id}."""

    time: float
    """Unix time in seconds."""
    engines: list[EngineRequests]


class EngineMoments(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    state: EngineState
    moments: list[MomentView]
    """When steps or first tokens were slow, the oldest first."""


class MomentsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """GET /debug/moments."""

    time: float
    engines: list[EngineMoments]
    refused: list[MomentView]
    """When the server refused calls, the oldest first."""


class EngineHistory(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    state: EngineState
    columns: dict[str, list[float | None]]
    """A list for each field of `Sample`, one value per second, the oldest first."""


class HistoryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """GET /debug/history."""

    time: float
    interval_s: float
    engines: list[EngineHistory]


class ChosenSetting(msgspec.Struct, frozen=True):
    """A setting that the engine runs with, and why."""

    flag: str
    value: str
    why: str


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine runs with, and its newest figures."""

    id: int
    state: EngineState
    reason: str | None
    """Why new requests are refused; null = they are taken."""
    pid: int
    generation: int = 1
    """Of its life, from 1."""
    restarts: int = 0
    ended_lives: list[EndedLife] = []
    """The oldest first; up to 20."""
    silent_s: float
    """Since its last message."""
    device: str | None
    num_pages: int | None
    page_size: int | None
    max_rows: int | None
    max_context_tokens: int | None
    startup_ms: dict[str, float]
    """Stage -> milliseconds, in order."""
    choices: list[ChosenSetting]
    settings: dict[str, Any]
    """As the user gave them; null = left to the engine."""
    sample: Sample | None
    """The newest second of the history."""
    counters: dict[str, Any] | None
    """The engine's counters since its start (`ipc.questions.Status`)."""


class EnginesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """GET /debug/engines."""

    time: float
    version: str
    model: str
    engines: list[EngineView]


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    state: EngineState
    sample: Sample | None
    moments: list[MomentView]
    """New ones, and those that have grown; a number seen before replaces the former one."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The data of an event of GET /debug/events."""

    time: float
    engines: list[EngineEvent]
    refused: list[MomentView]
    """As `moments`."""


class Aborted(msgspec.Struct, frozen=True):
    """POST /debug/requests/{id}/abort."""

    aborted: int
    """Requests that were ended; 0 = no such call is open."""
