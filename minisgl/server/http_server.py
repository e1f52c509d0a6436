"""One server process's HTTP side: everything between a listening socket and the link to the engine.

Promise: all server processes of a port are built here alike; only the first one starts and ends the engine.
"""

import logging
import socket
import ssl
from pathlib import Path
from typing import NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from minisgl.config import EngineConfig, ServerConfig
from minisgl.errors import ConfigError
from minisgl.server.admin import Admin
from minisgl.server.app import Api, make_app
from minisgl.server.debug import Debug
from minisgl.server.engine_link import EngineLink
from minisgl.server.frontend import Frontend
from minisgl.server.middleware import Gate, start_access_log
from minisgl.server.served_model import ServedModel, load_served_model
from minisgl.server.siblings import Siblings
from minisgl.server.text_threads import TextThreads
from minisgl.server.tokens import TokenApi
from minisgl.server.uploads import Uploads

log = logging.getLogger(__name__)

BACKLOG = 16384
"""Connections the kernel may hold until they are taken, as far as net.core.somaxconn lets it: beyond that it
drops what comes, and clients wait or are reset."""
LAST_ANSWERS_S = 2.0
"""How long clients may take to read the end of their answer when the server stops."""


class FrontSettings(NamedTuple):
    """What a server process is made from."""

    server: ServerConfig
    engine: EngineConfig
    model_name: str
    model_folder: Path
    ipc_dir: Path
    rank: int
    """Of this server process, below server.api_workers."""
    engine_pid: int


class Front:
    """A process that answers HTTP. Made by `open_front`, ended by `close`."""

    def __init__(
        self,
        model: ServedModel,
        frontend: Frontend,
        siblings: Siblings,
        threads: TextThreads,
        runner: web.AppRunner,
    ) -> None:
        self.model = model
        self.frontend = frontend
        self._siblings = siblings
        self._threads = threads
        self._runner = runner

    async def num_open(self) -> int:
        """Open requests of all server processes that answer."""
        return sum(part.num_open_requests for part in await self._siblings.stats())

    async def close(self) -> None:
        """Stop listening, after clients had `LAST_ANSWERS_S` to read."""
        await self._runner.cleanup()
        await self._siblings.close()
        self._threads.close()


async def open_front(settings: FrontSettings, link: EngineLink, listener: socket.socket) -> Front:
    """Load the model's text side and listen on `listener`; requests are refused until the engine is ready.

    Raises:
        ModelError: the folder has no usable tokenizer.
        ConfigError: the TLS files can't be used.
    """
    server, rank = settings.server, settings.rank
    tls = tls_context(server)
    if server.access_log:
        start_access_log()
    threads = TextThreads()
    model = await threads.run_aside(
        lambda: load_served_model(settings.model_folder, settings.model_name, server.sampling_defaults)
    )
    frontend = Frontend(
        link.send,
        model.tokenizer,
        _share(server.max_queued_requests, server.api_workers, rank),
        server.request_timeout_s,
        max_queued_tokens=server.max_queued_tokens
        and _share(server.max_queued_tokens, server.api_workers, rank),
        rank=rank,
    )
    uploads = Uploads(server.max_body_bytes, server.max_upload_bytes, server.upload_timeout_s)
    siblings = Siblings(frontend, uploads, settings.ipc_dir, rank, server.api_workers)
    app = make_app(
        Api(model, frontend, threads, uploads, server.request_timeout_s),
        TokenApi(model, frontend, uploads, threads),
        Admin(model, frontend, link, siblings, uploads, (server, settings.engine), settings.engine_pid),
        Gate(server.api_key, server.cors_origin, server.access_log, frontend.stats.responses),
        server.max_body_bytes,
    )
    Debug(link).add_routes(app)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=LAST_ANSWERS_S,
        access_log=None,
        logger=_http_log(),
    )
    await runner.setup()
    await siblings.start()
    await web.SockSite(runner, listener, ssl_context=tls, backlog=BACKLOG).start()
    return Front(model, frontend, siblings, threads, runner)


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """What --tls-cert and --tls-key make; None without them.

    Raises:
        ConfigError: the files can't be read, or do not belong together.
    """
    if server.tls_cert is None or server.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(server.tls_cert, server.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-cert {server.tls_cert} with --tls-key {server.tls_key} can't be used: "
            f"{error.strerror or error}"
        ) from None
    return context


def _share(whole: int, num_servers: int, rank: int) -> int:
    """This process's part of a limit; the parts add up to it, but each is at least 1."""
    return max(1, whole // num_servers + (rank < whole % num_servers))


def _http_log() -> logging.Logger:
    """The HTTP library's log, in which what a client got wrong is no error of ours."""
    http_log = logging.getLogger("minisgl.server.http")

    def is_ours(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            log.debug("a client's request can't be read: %s", str(error).replace("\n", " "))
            return False
        return True

    http_log.filters[:] = [is_ours]
    return http_log
