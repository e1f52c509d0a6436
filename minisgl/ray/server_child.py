"""The server behind an ingress: the module `minisgl.ray.server_child`, started by `minisgl/ray/ingress.py`.

It reads one line of JSON from stdin, a `ServerOrder`, and then runs `minisgl serve`. API keys and the engine
secret come on stdin, because other users can read command lines. When stdin ends, the parent has, and so does
this process, in good order.
"""

import os
import signal
import sys
import threading
import time

import msgspec

from minisgl.cli import main
from minisgl.commands.flags import fields_of
from minisgl.config import EngineConfig
from minisgl.ray.settings import OF_BOTH

END_S = 30.0
"""How long the server may take to end."""


class ServerOrder(msgspec.Struct, frozen=True):
    """How to start the server."""

    flags: list[str]
    """Of `minisgl serve`."""
    secret: str
    """The engine secret."""


def run() -> int:
    """Serve until SIGTERM; returns the exit code."""
    # Unbuffered, so that nothing holds a lock on it when the process exits.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        order = msgspec.json.decode(stdin.readline(), type=ServerOrder)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    # Environment variables of settings that only engines have must not reach the server.
    engine_variables = {field.variable for field in fields_of(EngineConfig) if field.name not in OF_BOTH}
    environ = {name: value for name, value in os.environ.items() if name not in engine_variables}
    return main(["serve", *order.flags], {**environ, "MINISGL_ENGINE_SECRET": order.secret})


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # the connections of open calls have ended with the parent
    time.sleep(END_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(run())
