"""From configuration to a running server and back: start, watch, drain, stop.

Promise: `run_server` returns only when the engine's process is gone, the sockets' directory is removed
and every client has had an answer; every wait on the way has a limit.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from minisgl.config import EngineConfig, ServerConfig, check_engine_config, check_server_config
from minisgl.errors import ConfigError, EngineDeadError, RequestError
from minisgl.messages import Ready, StartupStage
from minisgl.server.app import Api, make_app
from minisgl.server.engine_link import EngineLink
from minisgl.server.frontend import Frontend
from minisgl.server.served_model import ServedModel, load_served_model, served_name
from minisgl.server.startup_report import StartupClock, base_url, curl_line, stage_line, waterfall
from minisgl.server.uploads import Uploads
from minisgl.transport import make_ipc_dir

log = logging.getLogger(__name__)

WORKER = ("-m", "minisgl.engine.worker")
EXIT_STOPPED = 0
EXIT_ENGINE_DIED = 1
EXIT_INTERRUPTED = 130
LAST_ANSWERS_S = 2.0
"""How long clients may take to read the end of their answer when the server stops."""
TEXT_THREADS = 2
OTHER_FILES = 64
"""Open files beside the connections of requests: sockets, logs, libraries."""


def run_server(
    server: ServerConfig,
    engine: EngineConfig,
    model_folder: Path,
    *,
    worker_command: list[str] | None = None,
    started_at: float,
) -> int:
    """Serve `model_folder` until a signal or the engine's end; returns the process's exit code.

    Args:
        worker_command: what to start as the engine, for tests; None = minisgl's own.
        started_at: `time.monotonic()` when the program began, for the start-up report.

    Raises:
        ConfigError: the port can't be had, or a setting is out of range, both before anything is started.
        ModelError: the folder has no usable tokenizer.
    """
    check_server_config(server)
    check_engine_config(engine)
    allow_open_files(server.max_queued_requests + OTHER_FILES)
    clock = StartupClock(started_at)
    clock.lap("server: imports, arguments")
    listener = _bind(server.host, server.port)
    ipc_dir: Path | None = None
    try:
        ipc_dir = make_ipc_dir()
        first_line = json.dumps(
            {
                "engine": dataclasses.asdict(engine),
                "model_folder": str(model_folder),
                "ipc_dir": str(ipc_dir),
                "log_level": server.log_level,
            },
            allow_nan=False,
        ).encode()
        service = Service(
            server=server,
            model_name=served_name(server.served_model_name, engine.model),
            model_folder=model_folder,
            listener=listener,
            command=worker_command or [sys.executable, *WORKER],
            first_line=first_line,
            ipc_dir=ipc_dir,
            clock=clock,
        )
        return asyncio.run(_serve(service))
    finally:
        listener.close()
        if ipc_dir is not None:
            shutil.rmtree(ipc_dir, ignore_errors=True)


def allow_open_files(wanted: int) -> None:
    """Raise this process's limit to what the system lets it have; a warning where that is below `wanted`."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < wanted:
        log.warning(
            "the system allows this process %d open files, fewer than the %d that --max-queued-requests may "
            "take; raise the hard limit (ulimit -Hn), or lower the flag",
            most,
            wanted,
        )


class Service(NamedTuple):
    """What the event loop starts from."""

    server: ServerConfig
    model_name: str
    model_folder: Path
    listener: socket.socket  # bound and listening
    command: list[str]  # the engine's
    first_line: bytes  # what the engine reads first
    ipc_dir: Path
    clock: StartupClock


class Signals:
    """SIGTERM and the first SIGINT ask to stop, a further SIGINT to stop now."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.stop_now = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _interrupt(self) -> None:
        if self.stop.is_set():
            self.stop_now.set()
        self.stop.set()


async def _serve(service: Service) -> int:
    """Everything between the bound port and the exit code."""
    server, loop = service.server, asyncio.get_running_loop()
    signals = Signals()
    executor = ThreadPoolExecutor(TEXT_THREADS, "text")
    link = EngineLink(service.command, service.first_line, service.ipc_dir)
    try:
        service.clock.lap("server: port, sockets, engine process")
        # While the engine starts: this is not on the way to readiness.
        model = await loop.run_in_executor(
            executor, load_served_model, service.model_folder, service.model_name
        )
        frontend = Frontend(link.send, model.tokenizer, server.max_queued_requests, server.request_timeout_s)
        link.listen(frontend.take, _print_stage)
        api = Api(
            model,
            frontend,
            executor,
            Uploads(server.max_body_bytes, server.max_upload_bytes, server.upload_timeout_s),
            lambda: _health(server, frontend, link),
            server.request_timeout_s,
        )
        runner = web.AppRunner(
            make_app(api, server.max_body_bytes),
            handler_cancellation=True,
            shutdown_timeout=LAST_ANSWERS_S,
            access_log=None,
            logger=_http_log(),
        )
        await runner.setup()
        try:
            await web.SockSite(runner, service.listener).start()
            return await _supervise(service, model, frontend, link, signals)
        finally:
            await runner.cleanup()
    finally:
        await link.close()
        executor.shutdown(wait=False, cancel_futures=True)


async def _supervise(
    service: Service, model: ServedModel, frontend: Frontend, link: EngineLink, signals: Signals
) -> int:
    """Wait for the engine, for its end, for a signal; then see to it that every request has its answer."""
    server = service.server
    host, port = service.listener.getsockname()[:2]
    _say(f"Listening on {base_url(host, port)}; loading {model.name}")
    await _first_of(link.ready, link.died, signals.stop.wait(), timeout_s=server.startup_timeout_s)
    if link.ready.done() and not link.died.done():
        ready = link.ready.result()
        frontend.welcome(ready.max_context_tokens)
        link.watch(server.heartbeat_timeout_s)
        _say(waterfall({**service.clock.laps, **_named(ready)}, service.clock.total_ms()))
        _say(f"Serving {model.name} on {ready.device}, up to {ready.max_context_tokens} tokens a request:")
        _say(curl_line(host, port, model.name, chat=model.template.usable))
        await _first_of(link.died, signals.stop.wait(), timeout_s=None)
    elif not link.died.done() and not signals.stop.is_set():
        return _fail(
            frontend, f"it was not ready after {server.startup_timeout_s:g} s (see --startup-timeout-s)"
        )
    if not link.died.done():
        if await _drain(server, frontend, link, signals):
            return EXIT_STOPPED
        if not link.died.done():
            return EXIT_INTERRUPTED
    return _fail(frontend, link.died.result())


async def _drain(server: ServerConfig, frontend: Frontend, link: EngineLink, signals: Signals) -> bool:
    """Let the open requests end, then stop the engine; False if it died meanwhile or we may not wait."""
    refusal = RequestError(503, "shutting_down", "the server is shutting down")
    frontend.refuse(refusal)
    if not link.ready.done():
        return True  # nothing runs yet, and an engine that loads does not listen
    log.info("stopping: %d open requests may go on for %g s", frontend.num_open, server.drain_timeout_s)
    await _first_of(
        frontend.wait_until_empty(), link.died, signals.stop_now.wait(), timeout_s=server.drain_timeout_s
    )
    if link.died.done():
        return False
    frontend.fail_all(refusal)
    if not signals.stop_now.is_set():
        await _first_of(link.stop(), signals.stop_now.wait(), timeout_s=None)
    return not signals.stop_now.is_set()


def _fail(frontend: Frontend, reason: str) -> int:
    """The engine is gone: every open stream hears it."""
    log.error("the engine died: %s", reason)
    error = EngineDeadError(f"the engine died: {reason}")
    frontend.refuse(error)
    frontend.fail_all(error)
    return EXIT_ENGINE_DIED


def _health(server: ServerConfig, frontend: Frontend, link: EngineLink) -> tuple[bool, dict[str, Any]]:
    """The body of GET /health, and whether all is well."""
    refusal = frontend.refusal
    reason = None if refusal is None else str(refusal)
    if reason is None and link.silent_s > server.heartbeat_timeout_s:
        reason = f"the engine has been silent for {link.silent_s:.1f} s"
    facts: dict[str, Any] = {
        "status": "ok" if reason is None else "unavailable",
        "reason": reason,
        "open_requests": frontend.num_open,
        "running_requests": frontend.num_running,
        "engine_pid": link.pid,
        "engine_silent_s": round(link.silent_s, 3),
        "engine": link.status and msgspec.structs.asdict(link.status),
    }
    return reason is None, facts


async def _first_of(*waits: Awaitable[Any], timeout_s: float | None) -> None:
    """Returns when one of `waits` is over, or the time. Futures among them live on."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()


def _bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket, early, so that a busy port is known before the model is loaded."""
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][
            0
        ]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, ValueError) as error:  # ValueError: not even the form of a name, as "a..b"
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"can't listen on {host or '*'} port {port}: {why}; "
            "choose another with --host and --port (--port 0 takes a free one)"
        ) from None


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


def _named(ready: Ready) -> dict[str, float]:
    return {f"engine: {name}": duration_ms for name, duration_ms in ready.startup_ms.items()}


def _print_stage(stage: StartupStage) -> None:
    _say(stage_line(f"engine: {stage.name}", stage.duration_ms))


def _say(text: str) -> None:
    """To the user, not to the log; a user who does not listen must not end the server."""
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except UnicodeEncodeError:
        sys.stdout.write(text.encode("ascii", "replace").decode() + "\n")
    except OSError:
        # What was not written would be tried again at exit, and turn the exit code into 120.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
