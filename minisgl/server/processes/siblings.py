"""Connects the server processes of one port, over unix sockets in their private directory.

Promise: statistics and aborts cover all server processes, whichever of them gets the call. A process that
does not answer within `SIBLING_TIMEOUT_S` is left out, with a warning in the log.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from minisgl.server.http.uploads import Uploads
from minisgl.server.stats import ServerStats
from minisgl.server.streams import Streams

log = logging.getLogger(__name__)

SIBLING_TIMEOUT_S = 2.0


class Siblings:
    """This process's link to the other server processes. Create, use and close it in one event loop."""

    def __init__(
        self, streams: Streams, uploads: Uploads, ipc_dir: Path, rank: int = 0, num_servers: int = 1
    ) -> None:
        self._streams = streams
        self._uploads = uploads
        self._ipc_dir = ipc_dir
        self._rank = rank
        self._others = [other for other in range(num_servers) if other != rank]
        self._runner: web.AppRunner | None = None
        self._offers: dict[str, Callable[[], bytes]] = {}
        self._work: dict[str, Callable[[bytes], Awaitable[bytes]]] = {}

    def offer(self, path: str, give: Callable[[], bytes]) -> None:
        """Give the other processes what `give` makes when they ask for `path`. Call it before `start`."""
        self._offers[path] = give

    def offer_work(self, path: str, do: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Do this when the other processes ask for it with `have_first`. Call it before `start`."""
        self._work[path] = do

    async def start(self) -> None:
        """Listen for calls of the other processes, if there are any."""
        if not self._others:
            return
        app = web.Application()
        app.router.add_get("/stats", self._give_stats)
        app.router.add_post("/abort", self._take_abort)
        for path in self._offers:
            app.router.add_get(path, self._give_offer)
        for path in self._work:
            app.router.add_post(path, self._do_work)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._path(self._rank))).start()

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def stats(self) -> list[ServerStats]:
        """The statistics of every process that answers, in the order of the ranks."""
        answers = await self._ask_all("GET", "/stats", None)
        parts = [(self._rank, self.own_stats())]
        parts += [(rank, msgspec.json.decode(data, type=ServerStats)) for rank, data in answers]
        return [stats for _, stats in sorted(parts, key=lambda part: part[0])]

    async def ask_all(self, path: str) -> list[bytes]:
        """What every process that answers offers at `path`, this one's first."""
        answers = await self._ask_all("GET", path, None)
        return [self._offers[path](), *(data for _, data in answers)]

    async def ask_first(self, path: str) -> bytes | None:
        """What the process of rank 0 offers at `path`; None = it does not answer."""
        if self._rank == 0:
            return self._offers[path]()
        answer = await self._ask(0, "GET", path, None)
        return None if answer is None else answer[1]

    async def have_first(self, path: str, body: bytes) -> bytes | None:
        """Have the process of rank 0 do what it offers as work, however long it takes; None = no answer."""
        if self._rank == 0:
            return await self._work[path](body)
        answer = await self._ask(0, "POST", path, body, limit_s=None)
        return None if answer is None else answer[1]

    async def abort(self, name: str | None, key: str | None = None) -> int:
        """End the calls of this name and API key (None = any) in all processes; returns how many requests."""
        answers = await self._ask_all("POST", "/abort", msgspec.json.encode((name, key)))
        return self._streams.abort_calls(name, key) + sum(msgspec.json.decode(data) for _, data in answers)

    def own_stats(self) -> ServerStats:
        """The statistics of this process."""
        stats = self._streams.stats
        stats.num_upload_bytes = self._uploads.num_bytes
        return stats

    def _path(self, rank: int) -> Path:
        return self._ipc_dir / f"server.{rank}"

    async def _give_offer(self, request: web.Request) -> web.Response:
        return web.Response(body=self._offers[request.path]())

    async def _do_work(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._work[request.path](await request.read()))

    async def _give_stats(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.own_stats()))

    async def _take_abort(self, request: web.Request) -> web.Response:
        name, key = msgspec.json.decode(await request.read(), type=tuple[str | None, str | None])
        return web.Response(body=msgspec.json.encode(self._streams.abort_calls(name, key)))

    async def _ask_all(self, method: str, path: str, body: bytes | None) -> Sequence[tuple[int, bytes]]:
        answers = await asyncio.gather(*[self._ask(rank, method, path, body) for rank in self._others])
        return [answer for answer in answers if answer is not None]

    async def _ask(
        self, rank: int, method: str, path: str, body: bytes | None, limit_s: float | None = SIBLING_TIMEOUT_S
    ) -> tuple[int, bytes] | None:
        timeout = aiohttp.ClientTimeout(total=limit_s)
        connector = aiohttp.UnixConnector(str(self._path(rank)))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(method, f"http://sibling{path}", data=body) as answer,
            ):
                return rank, await answer.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            log.warning("server process %d did not answer %s: %s", rank, path, error)
            return None
