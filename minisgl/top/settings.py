"""The settings of `minisgl top`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TopSettings:
    """Which server to watch, and how."""

    url: str = "http://127.0.0.1:8000"
    """URL of the server, without a path."""
    api_key: str | None = None
    """Sent as the bearer token: the server's admin key where it has one."""
    interval_s: float = 1.0
    """Seconds between two looks at the server."""
