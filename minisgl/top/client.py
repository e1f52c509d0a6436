"""Asks a server what it does. A thread of its own does it, so that keys are never held up.

Promise: a server that does not answer is asked again for ever; what was known stays. Only an answer that says
that the caller may not look ends the program.
"""

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from minisgl.errors import ConfigError
from minisgl.server.watch.views import EnginesAnswer, HistoryAnswer, MomentsAnswer, RequestsAnswer
from minisgl.top.settings import TopSettings

TIMEOUT_S = 5.0
HISTORY_S = 60
MAX_REQUESTS = 300
MAX_ANSWER_BYTES = 1 << 25
Shape = TypeVar("Shape")


class Snapshot(NamedTuple):
    """What a server said at one moment."""

    engines: EnginesAnswer
    history: HistoryAnswer
    requests: RequestsAnswer
    moments: MomentsAnswer


class News(NamedTuple):
    """What the thread found."""

    snapshot: Snapshot | None
    """None = the server did not answer."""
    problem: str = ""
    refusal: ConfigError | None = None
    """The server is not one to watch, or does not let us."""
    done: str = ""
    """What a command did."""


class Client:
    """Looks at a server every `settings.interval_s`, and when `look` asks for it.

    Args:
        settings: of the command.
        tell: gets each `News`, in the client's thread.
    """

    def __init__(self, settings: TopSettings, tell: Callable[[News], None]) -> None:
        self._settings = settings
        self._tell = tell
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="top-client")

    def start(self) -> None:
        """Look now, and from now on."""
        self._thread.start()

    def abort(self, number: int, name: str) -> None:
        """End a request."""

        def send() -> None:
            try:
                answer = self._call(f"debug/requests/{name or number}/abort", method="POST")
                count = json.loads(answer)["aborted"]
                self._tell(News(None, done=f"ended {name or number}" if count else "it had ended already"))
            except (OSError, ConfigError, ValueError) as error:
                self._tell(News(None, done=f"not ended: {error}"))

        self._jobs.put(send)

    def close(self) -> None:
        """Stop looking. A question that is under way is not waited for."""
        self._jobs.put(None)

    def _run(self) -> None:
        next_at = time.monotonic()
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, next_at - time.monotonic()))
            except queue.Empty:
                self._tell(self._look())
                next_at = max(next_at + self._settings.interval_s, time.monotonic())
                continue
            if job is None:
                return
            job()
            next_at = time.monotonic()  # show what it changed

    def _look(self) -> News:
        try:
            return News(
                Snapshot(
                    self._read("debug/engines", EnginesAnswer),
                    self._read(f"debug/history?seconds={HISTORY_S}", HistoryAnswer),
                    self._read(f"debug/requests?limit={MAX_REQUESTS}", RequestsAnswer),
                    self._read("debug/moments", MomentsAnswer),
                )
            )
        except ConfigError as error:
            return News(None, refusal=error)
        except (OSError, ValueError) as error:
            return News(None, problem=_reason(error))

    def _read(self, path: str, shape: type[Shape]) -> Shape:
        body = self._call(path)
        try:
            return msgspec.json.decode(body, type=shape)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self._settings.url}/{path} does not answer as this version of minisgl does ({error}); "
                "use the `minisgl top` of the server's version"
            ) from None

    def _call(self, path: str, method: str = "GET") -> bytes:
        """The body of an answer.

        Raises:
            OSError: the server can't be reached, or is not ready.
            ConfigError: it is no minisgl, or refuses the key.
        """
        headers = {"Authorization": f"Bearer {self._settings.api_key}"} if self._settings.api_key else {}
        data = b"{}" if method == "POST" else None
        request = urllib.request.Request(f"{self._settings.url}/{path}", data, headers, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.read(MAX_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (401, 403):
                    needed = "an API key" if error.code == 401 else "the server's admin key"
                    raise ConfigError(f"{self._settings.url} needs {needed}; give it as --api-key") from None
                if error.code in (404, 405):
                    raise ConfigError(
                        f"{self._settings.url} has no {path.partition('?')[0]}; is it a minisgl server of "
                        "this version? --url names another"
                    ) from None
                raise OSError(f"it answers {error.code} {error.reason}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    return " ".join(str(error).split()) or type(error).__name__
