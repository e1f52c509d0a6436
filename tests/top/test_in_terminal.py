"""`minisgl top` under a pseudo-terminal, whose screen an independent terminal emulator keeps."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pyte
import pytest
from made_up import KEY, MadeUpServer, made_request

COLUMNS, LINES = 80, 24
LIMIT_S = 20.0


class Terminal:
    """A terminal of 80 columns with the command in it."""

    def __init__(self, *flags: str) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(inner)
        self._inner = inner
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "top", "--interval-s", "0.1", *flags],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)},
        )  # fmt: skip

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, check: Callable[[str], bool], what: str) -> str:
        """Read what the command writes until the screen is as wanted."""
        deadline = time.monotonic() + LIMIT_S
        while not check(self.text()):
            left = deadline - time.monotonic()
            assert left > 0, f"never {what}:\n{self.text()}"
            if select.select([self._fd], [], [], left)[0]:
                self._stream.feed(os.read(self._fd, 65536))
        return self.text()

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def state_after(self) -> list[object]:
        """The terminal's settings now."""
        return termios.tcgetattr(self._inner)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        os.close(self._fd)
        os.close(self._inner)


@pytest.fixture
def server() -> Iterator[MadeUpServer]:
    one = MadeUpServer([made_request(1), made_request(2, state="queued")], key=KEY).start()
    yield one
    one.stop()


@pytest.fixture
def terminal(server: MadeUpServer) -> Iterator[Terminal]:
    one = Terminal("--url", server.url, "--api-key", KEY)
    yield one
    one.close()


def test_the_screen_says_what_the_server_says_and_keys_work(server: MadeUpServer, terminal: Terminal) -> None:
    text = terminal.until(lambda text: "call-2" in text, "shown the requests")
    assert "made-up" in text
    assert "output 123 tok/s" in text
    server.requests = [made_request(3, total_ms=77.0)]
    terminal.until(lambda text: "call-3" in text and "call-2" not in text, "shown the new request")
    terminal.press(b"\x1b[B\r")
    terminal.until(lambda text: "helps: --memory-fraction" in text, "explained it")
    terminal.press(b"\rs")
    terminal.until(lambda text: "sort: time" in text, "sorted it")
    terminal.press(b"a")
    terminal.until(lambda text: "End call-3?" in text, "asked")
    terminal.press(b"y")
    terminal.until(lambda text: "ended call-3" in text, "said that it was ended")
    assert server.aborted == ["/debug/requests/call-3/abort"]
    terminal.press(b"q")
    assert terminal.process.wait(LIMIT_S) == 0
    assert terminal.state_after() == terminal.before


def test_two_engines_are_seen_together_and_one_by_one() -> None:
    requests = [made_request(1), made_request(2, state="queued")]
    server = MadeUpServer(requests, num_engines=2).start()
    terminal = Terminal("--url", server.url)
    try:
        text = terminal.until(lambda text: "call-1" in text and "call-2" in text, "shown both requests")
        assert "2 engines" in text
        assert "output 246 tok/s" in text
        terminal.press(b"ee")
        terminal.until(lambda text: "engine 1 of 2" in text and "call-1" not in text, "shown the second one")
        terminal.press(b"\x1b[Ba")
        terminal.until(lambda text: "End call-2?" in text, "asked")
        terminal.press(b"y")
        terminal.until(lambda text: "ended call-2" in text, "said that it was ended")
        assert server.aborted == ["/debug/requests/call-2/abort"]
        terminal.press(b"e")
        terminal.until(lambda text: "2 engines" in text and "call-1" in text, "shown all again")
    finally:
        terminal.close()
        server.stop()


def test_a_server_that_goes_and_comes_back(server: MadeUpServer, terminal: Terminal) -> None:
    terminal.until(lambda text: "call-2" in text, "shown the requests")
    server.stop()
    terminal.until(lambda text: "no answer" in text, "said that the server is away")
    assert "call-2" in terminal.text()
    server.start()
    terminal.until(lambda text: "no answer" not in text and "serving" in text, "come back")


def test_a_refused_key_is_a_users_error_and_the_terminal_is_as_before(server: MadeUpServer) -> None:
    one = Terminal("--url", server.url, "--api-key", "wrong")
    try:
        one.until(lambda text: "needs the server's admin key" in text.replace("\n", " "), "refused")
        assert one.process.wait(LIMIT_S) == 2
        assert one.state_after() == one.before
    finally:
        one.close()


def test_without_a_terminal_it_prints_once(server: MadeUpServer) -> None:
    command = [sys.executable, "-m", "minisgl", "top", "--url", server.url, "--api-key", KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "call-1" in done.stdout
    server.stop()
    gone = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    assert gone.returncode == 2
    assert "no server answers" in gone.stderr
