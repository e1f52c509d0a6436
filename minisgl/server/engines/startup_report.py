"""What the user reads while the server starts: a line per stage, a waterfall, a command to try.

Promise: the waterfall's rows add up to the wall time; what no stage accounts for has a row of its own.
"""

import json
import shlex
import time
from collections.abc import Mapping

WIDTH = 44
BAR = 30


class StartupClock:
    """Laps of the server's own start-up, in milliseconds since `started_at` (time.monotonic())."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._lap_at = started_at
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What happened since the last lap was called `name`."""
        now = time.monotonic()
        self.laps[name] = 1000 * (now - self._lap_at)
        self._lap_at = now

    def total_ms(self) -> float:
        """Wall time until now."""
        return 1000 * (time.monotonic() - self._started_at)


def stage_line(name: str, duration_ms: float) -> str:
    """One stage is over."""
    return f"  {name:<{WIDTH}} {duration_ms / 1000:8.2f} s"


def waterfall(stages: Mapping[str, float], total_ms: float) -> str:
    """`stages` (name -> milliseconds, one after the other) under a heading, as lines with bars."""
    rows = {**stages, "unaccounted": total_ms - sum(stages.values())}
    lines = [f"Ready after {total_ms / 1000:.2f} s:"]
    begin = 0.0
    for name, duration_ms in rows.items():
        scale = BAR / total_ms if total_ms > 0 else 0.0
        left = min(BAR - 1, max(0, round(begin * scale)))
        length = min(BAR - left, max(1, round(duration_ms * scale)))
        lines.append(f"{stage_line(name, duration_ms)}  {' ' * left}{'█' * length}")
        begin += duration_ms
    lines.append(stage_line("total", total_ms))
    return "\n".join(lines)


def curl_line(url: str, model: str, chat: bool, needs_key: bool = False) -> str:
    """A command that works when pasted into a shell on this machine; a key stays the shell's variable."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    ask = {"messages": [{"role": "user", "content": "Hello!"}]} if chat else {"prompt": "Once upon a time"}
    body = shlex.quote(json.dumps({"model": model, **ask, "temperature": 0}))
    key = ' -H "Authorization: Bearer $MINISGL_API_KEY"' if needs_key else ""
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {body}"


def base_url(host: str, port: int, tls: bool = False) -> str:
    """Where a client on this machine finds a server that listens on `host`."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    name = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"{'https' if tls else 'http'}://{name}:{port}"
