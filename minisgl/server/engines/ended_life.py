"""The record of an engine's life that has ended, for /debug/engines."""

import msgspec


class EndedLife(msgspec.Struct, frozen=True, kw_only=True):
    """A life of an engine that has ended. Times are Unix times in seconds."""

    generation: int
    pid: int
    ended_at: float
    reason: str
    back_at: float | None = None
    """When the next life took requests; null = not yet."""
