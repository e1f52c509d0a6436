"""The child process of a replica, without Ray: what it is told, what it says, and how it ends."""

import asyncio
import os
import signal
import sys
import threading

import pytest

from minisgl.ray.child import Child

ECHO = "import sys\nfor line in sys.stdin: print('heard', line, end='', flush=True)"
ENDS_AT_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print('here', flush=True)
time.sleep(60)
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('here', flush=True)
time.sleep(60)
"""
LIMIT_S = 20.0


class Heard:
    """The first line of a child."""

    def __init__(self) -> None:
        self.line = ""
        self._has_come = threading.Event()

    def take(self, line: str) -> None:
        self.line = line
        self._has_come.set()

    def wait(self) -> str:
        assert self._has_come.wait(LIMIT_S)
        return self.line


def start(code: str) -> tuple[Child, Heard]:
    heard = Heard()
    return Child([sys.executable, "-c", code], heard.take), heard


def test_it_hears_lines_of_json_and_its_lines_are_heard() -> None:
    child, heard = start(ECHO)
    child.tell({"server": "tcp://10.0.0.1:1"})
    assert heard.wait() == 'heard {"server":"tcp://10.0.0.1:1"}'
    child.kill()
    child.tell({})  # nobody hears it, and nothing happens


def test_the_line_of_a_users_mistake_says_why_it_ended(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; sys.stderr.write('minisgl: error: no such model\\nbye\\n'); sys.exit(2)"
    child, _ = start(code)
    assert child.why_ended() == "it ended with exit code 2: minisgl: error: no such model"
    assert not child.is_alive
    assert "bye" in capfd.readouterr().err


def test_a_signal_says_why_it_ended() -> None:
    child, heard = start(DEAF)
    heard.wait()
    os.kill(child.pid, signal.SIGKILL)
    assert child.why_ended() == "signal 9 has ended it"


def test_it_is_asked_to_end_and_killed_if_it_does_not() -> None:
    polite, heard = start(ENDS_AT_SIGTERM)
    heard.wait()
    asyncio.run(polite.stop(LIMIT_S))
    assert polite.why_ended() == "it ended with exit code 0: it said nothing"
    deaf, heard = start(DEAF)
    heard.wait()
    asyncio.run(deaf.stop(0.0))
    assert deaf.why_ended() == "signal 9 has ended it"
