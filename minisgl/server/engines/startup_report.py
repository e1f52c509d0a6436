"""The output of a starting server: a line per stage, a waterfall, a curl command to try.

Promise: the waterfall's rows add up to the wall time. Time that belongs to no stage has its own row.
"""

import json
import shlex
import time
from collections.abc import Mapping

QUESTION = "What is the capital of Japan?"
"""The built-in model answers it correctly, in one sentence. Its best token is ahead by a logit of at least
0.96, so that bfloat16 gives the same answer on every processor (for France it is 0.1)."""
TEXT = "The capital of Japan is"
NAME_WIDTH = 44
BAR_WIDTH = 30


class StartupClock:
    """Stages of the server's own start-up, in milliseconds, from `started_at` (time.monotonic()) on."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._lap_at = started_at
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End the current stage, call it `name`, and begin the next stage."""
        now = time.monotonic()
        self.laps[name] = 1000 * (now - self._lap_at)
        self._lap_at = now

    def total_ms(self) -> float:
        """Wall time until now."""
        return 1000 * (time.monotonic() - self._started_at)


def stage_line(name: str, duration_ms: float) -> str:
    """The line for a stage that has ended."""
    return f"  {name:<{NAME_WIDTH}} {duration_ms / 1000:8.2f} s"


def waterfall(stages: Mapping[str, float], total_ms: float) -> str:
    """A chart with one line and bar per stage. `stages`: name -> milliseconds, in order of time."""
    rows = {**stages, "unaccounted": total_ms - sum(stages.values())}
    lines = [f"Ready after {total_ms / 1000:.2f} s:"]
    begin = 0.0
    for name, duration_ms in rows.items():
        scale = BAR_WIDTH / total_ms if total_ms > 0 else 0.0
        left = min(BAR_WIDTH - 1, max(0, round(begin * scale)))
        length = min(BAR_WIDTH - left, max(1, round(duration_ms * scale)))
        lines.append(f"{stage_line(name, duration_ms)}  {' ' * left}{'█' * length}")
        begin += duration_ms
    lines.append(stage_line("total", total_ms))
    return "\n".join(lines)


def curl_line(url: str, model: str, chat: bool, needs_key: bool = False) -> str:
    """A command to paste into a shell on this machine. It takes the API key from a shell variable."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    ask = {"messages": [{"role": "user", "content": QUESTION}]} if chat else {"prompt": TEXT}
    body = shlex.quote(json.dumps({"model": model, **ask, "temperature": 0}))
    key = ' -H "Authorization: Bearer $MINISGL_API_KEY"' if needs_key else ""
    return f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {body}"


def base_url(host: str, port: int, tls: bool = False) -> str:
    """The URL by which a client on this machine reaches a server that listens on `host`."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    name = f"[{name}]" if ":" in name and not name.startswith("[") else name
    return f"{'https' if tls else 'http'}://{name}:{port}"
