"""Builds the HTTP server of one server process: everything between a listening socket and the engine link.

Promise: all server processes of a port are built the same way. Only the first one starts and stops the
engine, which is not done here.
"""

import gc
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from minisgl.config import EngineConfig, ServerConfig
from minisgl.errors import ConfigError, MinisglError
from minisgl.ipc.messages import StartupStage
from minisgl.server.admin import Admin
from minisgl.server.apis.models import ModelApi
from minisgl.server.apis.tokenize import TokenApi
from minisgl.server.app import all_routes, make_app
from minisgl.server.calls.completer import Completer
from minisgl.server.debug import Debug
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import Reader
from minisgl.server.http.callers import allowed_hosts
from minisgl.server.http.connections import Connections, connections_that_fit
from minisgl.server.http.listener import Listener
from minisgl.server.http.middleware import Gate, start_access_log
from minisgl.server.http.uploads import Uploads
from minisgl.server.keys.meter import Meters
from minisgl.server.keys.usage_log import UsageLog
from minisgl.server.keys.users import Users
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.page import is_page
from minisgl.server.processes.siblings import Siblings
from minisgl.server.reload.reloads import ReloadApi, Reloads
from minisgl.server.served_model import ServedModel, load_served_model, served_root
from minisgl.server.streams import Streams
from minisgl.server.text_threads import TextThreads
from minisgl.server.tracing.call_tracer import CallTracer, open_tracer
from minisgl.server.watch.refusals import Refusals
from minisgl.server.watch.routes import Watch
from minisgl.server.watch.ticker import Ticker

log = logging.getLogger(__name__)

BACKLOG = 16384
"""Connections that the kernel may hold until they are accepted; net.core.somaxconn may lower it. Beyond that
the kernel drops new connections, and clients wait or are reset."""
LAST_ANSWERS_S = 2.0
"""How long clients may take to read the end of their answer when the server stops."""


class HttpServerSettings(NamedTuple):
    """The arguments of `open_http_server`."""

    server: ServerConfig
    engine: EngineConfig
    model_name: str
    model_folder: Path
    ipc_dir: Path
    rank: int
    """Of this server process, below server.api_workers."""


class HttpServer:
    """A running HTTP server. `open_http_server` creates it, `close` ends it."""

    def __init__(
        self,
        model: ModelInUse,
        streams: Streams,
        siblings: Siblings,
        threads: TextThreads,
        runner: web.AppRunner,
        connections: Connections,
        listener: Listener,
        ticker: Ticker,
        users: Users,
        usage_log: UsageLog | None,
        tracer: CallTracer | None,
    ) -> None:
        self.model = model
        """What is served."""
        self.streams = streams
        self._siblings = siblings
        self._threads = threads
        self._runner = runner
        self._connections = connections
        self._listener = listener
        self._ticker = ticker
        self._users = users
        self._usage_log = usage_log
        self._tracer = tracer

    def reader(self, on_stage: Callable[[StartupStage], None]) -> Reader:
        """What takes in the messages of the engines; `on_stage` gets the stages of the start."""
        return Reader(
            self.streams.deliver,
            on_stage,
            lambda ready: self.streams.accept_requests(ready.max_context_tokens),
            self.streams.note_wait,
        )

    def reload(self) -> None:
        """Read the API key file again, and open the usage log by its name again."""
        self._users.reload()
        if self._usage_log is not None:
            self._usage_log.reopen()

    def refuse_requests(self, error: MinisglError) -> None:
        """Refuse new requests with `error` from now on, and those that wait for another model."""
        self.streams.refuse_requests(error)
        self.model.release()

    async def load_model(self, settings: HttpServerSettings) -> ServedModel:
        """The text side of the model of `settings`.

        Raises:
            ModelError: the folder has no usable tokenizer.
        """
        return await self._threads.run_in_long_thread(lambda: _load_model(settings))

    def serve(self, model: ServedModel, settings: HttpServerSettings) -> None:
        """Serve this model from now on. Call it while no call is prepared for another one."""
        self.streams.tokenizer = model.tokenizer
        self.model.release(model, (settings.server, settings.engine))

    async def num_open(self) -> int:
        """Open requests of all server processes that reply."""
        return sum(part.num_open_requests for part in await self._siblings.stats())

    async def make_spans(self) -> None:
        """Make the spans of the calls that have ended, while the engine still tells of them."""
        if self._tracer is not None:
            await self._tracer.send_pending()

    async def close(self) -> None:
        """Stop listening, and give clients `LAST_ANSWERS_S` to read the end of their answers."""
        await self._listener.close()
        await self._ticker.close()
        await self._runner.cleanup()
        if self._tracer is not None:
            await self._tracer.close()
        self._connections.close()
        await self._siblings.close()
        self._threads.close()
        if self._usage_log is not None:
            self._usage_log.close()


async def open_http_server(
    settings: HttpServerSettings, engines: Engines, reloads: Reloads, sock: socket.socket
) -> HttpServer:
    """Load tokenizer and chat template, and listen on `sock`. Requests are refused until the engine is ready.

    Raises:
        ModelError: the model folder has no usable tokenizer.
        ConfigError: the TLS files, the API key file or the usage log can't be used, or --otlp-endpoint lacks
            its packages.
    """
    server, rank = settings.server, settings.rank
    tls = tls_context(server)
    users = read_users(server)
    usage_log = UsageLog(Path(server.usage_log)) if server.usage_log else None
    if server.access_log:
        start_access_log()
    threads = TextThreads()
    served = await threads.run_in_long_thread(lambda: _load_model(settings))
    streams = Streams(
        engines.send,
        served.tokenizer,
        _share(server.max_queued_requests, server.api_workers, rank),
        server.request_timeout_s,
        max_queued_tokens=server.max_queued_tokens
        and _share(server.max_queued_tokens, server.api_workers, rank),
        users_share=lambda: users.are_several,
        rank=rank,
        seed=settings.engine.seed,
    )
    model = ModelInUse(served, (server, settings.engine), streams.check_room, server.request_timeout_s)
    tracer = open_tracer(server.otlp_endpoint, model, engines, rank)
    meters = Meters(streams.stats, usage_log)
    connections = Connections(connections_that_fit(), server.keep_alive_timeout_s)
    uploads = Uploads(server.max_body_bytes, server.max_upload_bytes, server.upload_timeout_s)
    siblings = Siblings(streams, uploads, settings.ipc_dir, rank, server.api_workers)
    refusals = Refusals(rank)
    watch = Watch(
        model,
        streams,
        engines,
        siblings,
        refusals,
        rank,
    )
    app = make_app(
        all_routes(
            Completer(model, streams, threads, uploads, server.request_timeout_s, meters),
            TokenApi(model, streams, uploads, threads),
            ModelApi(model, streams),
            Admin(model, streams, engines, siblings, uploads),
            ReloadApi(model, siblings, uploads, reloads),
            Debug(engines),
            watch,
        ),
        model,
        Gate(
            server.api_key,
            server.admin_key,
            server.cors_origin,
            allowed_hosts(server),
            server.access_log,
            streams.stats.responses,
            is_full=lambda: connections.is_full,
            on_refusal=refusals.add,
            needs_no_key=is_page,
            users=users,
            on_end=None if tracer is None else tracer.ended,
        ),
    )
    connections.install(app)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=LAST_ANSWERS_S,
        keepalive_timeout=server.keep_alive_timeout_s,
        access_log=None,
        logger=_http_log(),
    )
    await runner.setup()
    await siblings.start()
    watch.ticker.start()
    if tracer is not None:
        tracer.start()
    assert runner.server is not None  # made by setup
    listener = Listener(sock, connections, runner.server, tls, server.keep_alive_timeout_s)
    # All of this lives as long as the process. Unfrozen, each full collection would hold the event loop 20 to
    # 40 ms, and a call with many choices is enough to start one.
    gc.collect()
    gc.freeze()
    return HttpServer(
        model,
        streams,
        siblings,
        threads,
        runner,
        connections,
        listener,
        watch.ticker,
        users,
        usage_log,
        tracer,
    )


def _load_model(settings: HttpServerSettings) -> ServedModel:
    server = settings.server
    return load_served_model(
        settings.model_folder,
        settings.model_name,
        server.sampling_defaults,
        root=served_root(settings.engine.model, settings.model_folder),
        chat_template=server.chat_template,
        tool_parser=server.tool_parser,
        reasoning_parser=server.reasoning_parser,
        special_tokens_in_content=server.special_tokens_in_content,
    )


def read_users(server: ServerConfig) -> Users:
    """The users of --api-keys-file.

    Raises:
        ConfigError: the file can't be used.
    """
    file = Path(server.api_keys_file) if server.api_keys_file else None
    return Users(file, server.api_key, server.admin_key)


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """The TLS context from --tls-cert and --tls-key; None if they are not given.

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
    """This process's share of a limit. The shares add up to the limit, but each is at least 1."""
    return max(1, whole // num_servers + (rank < whole % num_servers))


def _http_log() -> logging.Logger:
    """The logger for aiohttp. It drops errors that a client's malformed request caused."""
    http_log = logging.getLogger("minisgl.server.http")

    def is_ours(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            log.debug("a client's request can't be read: %s", str(error).replace("\n", " "))
            return False
        return True

    http_log.filters[:] = [is_ours]
    return http_log
