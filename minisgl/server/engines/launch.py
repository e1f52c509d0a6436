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
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.config import EngineConfig, ServerConfig, check_engine_config, check_server_config
from minisgl.errors import ConfigError, EngineDeadError, RequestError
from minisgl.messages import Ready, StartupStage
from minisgl.server.api_workers import ApiWorkers
from minisgl.server.engine_link import EngineLink, EngineProcess
from minisgl.server.front import BACKLOG, Front, FrontSettings, open_front, tls_context
from minisgl.server.served_model import served_name
from minisgl.server.startup_report import StartupClock, base_url, curl_line, stage_line, waterfall
from minisgl.transport import make_ipc_dir

log = logging.getLogger(__name__)

WORKER = ("-m", "minisgl.engine.worker")
EXIT_STOPPED = 0
EXIT_ENGINE_DIED = 1
EXIT_INTERRUPTED = 130
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
        ConfigError: the port or the TLS files can't be had, or a setting is out of range, all before anything
            is started.
        ModelError: the folder has no usable tokenizer.
    """
    check_server_config(server)
    check_engine_config(engine)
    allow_open_files(server.max_queued_requests + OTHER_FILES)
    clock = StartupClock(started_at)
    clock.lap("server: imports, arguments")
    tls_context(server)  # each process makes its own; here it is only tried
    listeners = _bind(server.host, server.port, server.api_workers)
    ipc_dir: Path | None = None
    try:
        ipc_dir = make_ipc_dir()
        first_line = json.dumps(
            {
                "engine": dataclasses.asdict(engine),
                "model_folder": str(model_folder),
                "ipc_dir": str(ipc_dir),
                "log_level": server.log_level,
                "num_servers": server.api_workers,
            },
            allow_nan=False,
        ).encode()
        service = Service(
            server=server,
            engine=engine,
            model_name=served_name(server.served_model_name, engine.model),
            model_folder=model_folder,
            listeners=listeners,
            command=worker_command or [sys.executable, *WORKER],
            first_line=first_line,
            ipc_dir=ipc_dir,
            clock=clock,
        )
        return asyncio.run(_serve(service))
    finally:
        for listener in listeners:
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
    engine: EngineConfig
    model_name: str
    model_folder: Path
    listeners: list[socket.socket]  # bound and listening, one for each server process
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
    signals = Signals()
    link = EngineLink(service.ipc_dir)
    try:
        process = EngineProcess(service.command, service.first_line, link)
        try:
            settings = FrontSettings(
                service.server,
                service.engine,
                service.model_name,
                service.model_folder,
                service.ipc_dir,
                rank=0,
                engine_pid=process.pid,
            )
            workers = ApiWorkers(settings, service.listeners[1:])
            service.clock.lap("server: port, sockets, processes")
            try:
                # While the engine starts: this is not on the way to readiness.
                front = await open_front(settings, link, service.listeners[0])
                try:
                    link.listen(front.frontend.take, _print_stage)
                    return await _supervise(Running(service, front, link, process, workers, signals))
                finally:
                    await front.close()
            finally:
                await workers.close()
        finally:
            await process.close()
    finally:
        link.close()


class Running(NamedTuple):
    """What supervision looks after."""

    service: Service
    front: Front
    link: EngineLink
    process: EngineProcess
    workers: ApiWorkers
    signals: Signals


async def _supervise(running: Running) -> int:
    """Wait for the engine, for its end, for a signal; then see to it that every request has its answer."""
    service, front, link, _, workers, signals = running
    server, frontend, model = service.server, front.frontend, front.model
    host, port = service.listeners[0].getsockname()[:2]
    tls = server.tls_cert is not None
    _say(f"Listening on {base_url(host, port, tls)}; loading {model.name}")
    failures = (link.died, workers.failed)
    await _first_of(link.ready, *failures, signals.stop.wait(), timeout_s=server.startup_timeout_s)
    if link.ready.done() and not any(failure.done() for failure in failures):
        ready = link.ready.result()
        frontend.welcome(ready.max_context_tokens)
        link.watch(server.heartbeat_timeout_s)
        await _first_of(workers.all_ready(), *failures, signals.stop.wait(), timeout_s=None)
        _say(waterfall({**service.clock.laps, **_named(ready)}, service.clock.total_ms()))
        _say(f"Serving {model.name} on {ready.device}, up to {ready.max_context_tokens} tokens a request:")
        _say(curl_line(base_url(host, port, tls), model.name, model.template.usable, bool(server.api_key)))
        await _first_of(*failures, signals.stop.wait(), timeout_s=None)
    elif not any(failure.done() for failure in failures) and not signals.stop.is_set():
        return _fail(
            running,
            f"the engine was not ready after {server.startup_timeout_s:g} s (see --startup-timeout-s)",
        )
    if not any(failure.done() for failure in failures):
        if await _drain(running):
            return EXIT_STOPPED
        if not any(failure.done() for failure in failures):
            return EXIT_INTERRUPTED
    if link.died.done():
        return _fail(running, f"the engine died: {link.died.result()}")
    return _fail(running, workers.failed.result())


async def _drain(running: Running) -> bool:
    """Let the open requests end, then stop the engine; False if something died or we may not wait."""
    service, front, link, process, workers, signals = running
    frontend, failures = front.frontend, (link.died, workers.failed)
    refusal = RequestError(503, "shutting_down", "the server is shutting down")
    frontend.refuse(refusal)
    workers.drain()
    if not link.ready.done():
        return True  # nothing runs yet, and an engine that loads does not listen
    limit_s = service.server.drain_timeout_s
    log.info("stopping: %d open requests may go on for %g s", await front.num_open(), limit_s)
    await _first_of(_all_empty(front, workers), *failures, signals.stop_now.wait(), timeout_s=limit_s)
    if any(failure.done() for failure in failures):
        return False
    frontend.fail_all(refusal)
    await _first_of(workers.stop(), signals.stop_now.wait(), timeout_s=None)
    if not signals.stop_now.is_set():
        await _first_of(process.stop(), signals.stop_now.wait(), timeout_s=None)
    return not signals.stop_now.is_set()


async def _all_empty(front: Front, workers: ApiWorkers) -> None:
    """Returns when no server process has an open request."""
    await front.frontend.wait_until_empty()
    await workers.all_empty()


def _fail(running: Running, reason: str) -> int:
    """No answer can be given any more: every open stream hears it."""
    log.error("%s", reason)
    error = EngineDeadError(reason)
    running.front.frontend.refuse(error)
    running.front.frontend.fail_all(error)
    running.workers.fail(reason)
    return EXIT_ENGINE_DIED


async def _first_of(*waits: Awaitable[Any], timeout_s: float | None) -> None:
    """Returns when one of `waits` is over, or the time. Futures among them live on."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()


def _bind(host: str, port: int, num_servers: int) -> list[socket.socket]:
    """Listening TCP sockets, early, so that a busy port is known before the model is loaded.

    Several on one port share it by SO_REUSEPORT: the kernel gives each connection to one of them.
    """
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][
            0
        ]
        first = socket.create_server((host, port), family=family, backlog=BACKLOG)
        if num_servers == 1:
            return [first]
        # The first one was alone on the port, so nobody else's server shares it now.
        host, port = first.getsockname()[:2]
        first.close()
        return [
            socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True)
            for _ in range(num_servers)
        ]
    except (OSError, ValueError) as error:  # ValueError: not even the form of a name, as "a..b"
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"can't listen on {host or '*'} port {port}: {why}; "
            "choose another with --host and --port (--port 0 takes a free one)"
        ) from None


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
