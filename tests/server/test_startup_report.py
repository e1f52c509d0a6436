"""The start-up's last lines."""

import json
import shlex
import time
from pathlib import Path

import pytest

from minisgl.server.engines.startup_report import StartupClock, base_url, curl_line, waterfall

GOLDEN = Path(__file__).parent.parent / "data" / "smollm2_more_golden.json"
"""What the built-in model answers; tests/test_golden.py asks the engine."""


def test_the_waterfall_adds_up_to_the_wall_time() -> None:
    lines = waterfall({"a": 250.0, "b": 1500.0}, 2000.0).splitlines()
    seconds = {
        line.split("  ")[1].strip(): float(line.split()[-3 if "█" in line else -2]) for line in lines[1:]
    }
    assert seconds == {"a": 0.25, "b": 1.5, "unaccounted": 0.25, "total": 2.0}


def test_laps_leave_no_gap() -> None:
    clock = StartupClock(time.monotonic() - 1.0)
    clock.lap("first")
    clock.lap("second")
    assert clock.laps["first"] >= 1000.0
    assert sum(clock.laps.values()) <= clock.total_ms()


@pytest.mark.parametrize(
    ("host", "base"),
    [("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("myhost", "http://myhost:80")],
)
def test_the_curl_line_survives_a_shell(host: str, base: str) -> None:
    words = shlex.split(curl_line(base_url(host, 80), 'it\'s "mine"', chat=True))
    assert words[:2] == ["curl", f"{base}/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == 'it\'s "mine"'
    assert "/v1/completions" in curl_line(base_url(host, 80), "m", chat=False)


def test_the_curl_line_asks_what_the_built_in_model_answers_well() -> None:
    body = json.loads(shlex.split(curl_line("http://x", "smollm2-135m", chat=True))[-1])
    assert body["temperature"] == 0
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]
    (answer,) = [case for case in cases if case.get("messages") == body["messages"]]
    assert answer["text"] == "The capital of Japan is Tokyo."
    assert answer["min_margin"] > 0.5, "another processor's rounding could choose another token"
