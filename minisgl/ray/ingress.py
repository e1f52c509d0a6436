"""The ingress: a replica on a CPU that runs minisgl's server and hands it the calls that Ray Serve gets.

Promise: the server is that of `minisgl serve --engine-listen`, so streams, request ids and errors are the
same as without Ray. One ingress holds a stream from its beginning to its end.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import time
from typing import NamedTuple

import aiohttp
import ray.util
from ray import serve

from minisgl.ipc.child_process import module_command
from minisgl.ray.child import Child
from minisgl.ray.forward import Forwarder
from minisgl.ray.whereabouts import Whereabouts

log = logging.getLogger(__name__)

NAME = "ingress"
START_S = 120.0
"""How long the server may take to listen; it may have to fetch a tokenizer."""
HEALTH_S = 5.0
EXIT_S = 15.0
"""How long the server may take to end, beyond its --drain-timeout-s."""
OWN_FLAGS = ["--host=127.0.0.1", "--port=0", "--keep-alive-timeout-s=3600"]
LISTENS = re.compile(r"^Listening on (http://\S+);")
LETS_IN = re.compile(r"^Engines connect to (tcp://\S+)$")


class IngressLimits(NamedTuple):
    """Limits of the calls of an ingress."""

    drain_s: float
    """How many seconds open calls may go on when the ingress ends."""
    most_held: int
    """Most calls that may wait for its first engine."""
    hold_s: float
    """How many seconds each may wait."""


@serve.deployment(
    name=NAME,
    num_replicas=1,
    max_ongoing_requests=1_000_000,  # the server has limits of its own, and says them better
    health_check_period_s=5,
    logging_config={"enable_access_log": False},  # --access-log does that; engines ask every second
)
@serve.ingress()
class Ingress:
    """Its options (resources, time to drain) are set by `minisgl.ray_serve.app`.

    Args:
        engines: the handle of the engines' deployment, by which Ray Serve knows that it belongs to this
            application. The engines come by themselves.
        flags: of `minisgl serve`.
        limits: of calls.

    Raises:
        RuntimeError: the server can't start; the message says why.
    """

    async def __init__(self, engines: object, flags: list[str], limits: IngressLimits) -> None:
        self._drain_s = limits.drain_s
        self._born = time.time()
        self._secret = secrets.token_hex(32)
        self._lines: dict[re.Pattern[str], str] = {}
        self._server = Child(module_command("minisgl.ray.server_child"), self._read)
        # Calls come through Ray Serve's proxy, so the server accepts every Host.
        hosts = [] if any(flag.startswith("--allowed-host") for flag in flags) else ["--allowed-host=*"]
        address = ray.util.get_node_ip_address()
        listen = "--engine-listen=tcp://" + (f"[{address}]:0" if ":" in address else f"{address}:0")
        self._server.tell({"flags": [*flags, *hosts, *OWN_FLAGS, listen], "secret": self._secret})
        try:
            await asyncio.wait_for(self._wait_for_server(), START_S)
        except BaseException:
            self._server.kill()
            raise
        self._forwarder = Forwarder(self._lines[LISTENS], limits.most_held, limits.hold_s)
        self._opening = asyncio.create_task(self._open_when_served())

    async def __serve_build_asgi_app__(self) -> Forwarder:
        """For Ray Serve: the application that answers HTTP calls."""
        return self._forwarder

    async def whereabouts(self) -> Whereabouts:
        """Where engines connect."""
        return Whereabouts(self._lines[LETS_IN], self._secret, self._born)

    async def server_pid(self) -> int:
        """The server's process id."""
        return self._server.pid

    async def check_health(self) -> None:
        """For Ray Serve, which replaces an ingress that raises.

        An ingress without engines is healthy: its calls wait for them.
        """
        if not self._server.is_alive:
            raise RuntimeError(f"the server of this ingress is gone: {self._server.why_ended()}")
        try:
            await self._forwarder.get("/health", HEALTH_S)
        except (OSError, asyncio.TimeoutError, aiohttp.ClientError) as error:
            raise RuntimeError(f"the server of this ingress does not answer: {error!r}") from None

    async def __del__(self) -> None:
        """For Ray Serve, which calls it when the calls that it knows of have ended: stop the server."""
        if not hasattr(self, "_forwarder"):  # it never started, so nothing is left to stop
            return
        self._opening.cancel()
        await self._server.stop(self._drain_s + EXIT_S)
        await self._forwarder.close()

    async def _open_when_served(self) -> None:
        """Let the waiting calls go on when an engine serves; the engine may come from an older ingress."""
        while True:
            with contextlib.suppress(OSError, asyncio.TimeoutError, aiohttp.ClientError):
                if (await self._forwarder.get("/health", HEALTH_S))[0] == 200:
                    self._forwarder.open()
                    return
            await asyncio.sleep(0.2)

    def _read(self, line: str) -> None:
        log.info("%s", line)
        for pattern in (LISTENS, LETS_IN):
            found = pattern.match(line)
            if found:
                self._lines[pattern] = found[1]

    async def _wait_for_server(self) -> None:
        while len(self._lines) < 2:
            if not self._server.is_alive:
                raise RuntimeError(f"minisgl serve can't start: {self._server.why_ended()}")
            await asyncio.sleep(0.05)
