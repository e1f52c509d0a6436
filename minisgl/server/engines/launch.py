"""Runs a server: starts the engine and the server processes, watches them, drains and stops them.

Promise: when `run_server` returns, the engine's process has ended, the directory of the sockets is removed,
and every client has got an answer. Every wait for the engine or a request has a limit.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from minisgl.config import EngineConfig, ServerConfig, check_engine_config, check_server_config
from minisgl.errors import DEVICE_FAULT_EXIT_CODE, ConfigError, EngineDeadError, RequestError
from minisgl.ipc.child_process import module_command
from minisgl.ipc.messages import Ready, StartupStage
from minisgl.ipc.transport import make_ipc_dir
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.replicas import check_replicas, gpu_names, replica_workers
from minisgl.server.engines.startup_report import StartupClock, base_url, curl_line, stage_line, waterfall
from minisgl.server.engines.supervision.door import DoorSettings, EngineDoor, check_engine_listen
from minisgl.server.engines.supervision.keeper import KeeperSettings
from minisgl.server.engines.supervision.keepers import EngineKeepers
from minisgl.server.engines.supervision.life import LifeLimits
from minisgl.server.http.connections import OTHER_FILES
from minisgl.server.http_server import (
    BACKLOG,
    HttpServer,
    HttpServerSettings,
    open_http_server,
    read_users,
    tls_context,
)
from minisgl.server.processes.api_workers import ApiWorkers
from minisgl.server.reload.reloader import FindModel, Reloader, ReloaderParts
from minisgl.server.reload.reloads import Reloads
from minisgl.server.served_model import served_name
from minisgl.server.tracing.call_tracer import LAST_SPANS_S, load_export

log = logging.getLogger(__name__)

WORKER = tuple(module_command("minisgl.engine.worker"))
DEFAULT_RESTARTS = 3
EXIT_STOPPED = 0
EXIT_ENGINE_DIED = 1
EXIT_INTERRUPTED = 130


def run_server(
    server: ServerConfig,
    engine: EngineConfig,
    model_folder: Path,
    *,
    worker_command: list[str] | None = None,
    visible_gpus: str | None = None,
    engine_secret: str | None = None,
    find_model: FindModel | None = None,
    started_at: float,
) -> int:
    """Serve `model_folder` until a signal or the engine's end; returns the process's exit code.

    Args:
        worker_command: command line of the engine, for tests; None = minisgl's own engine.
        visible_gpus: the value of CUDA_VISIBLE_DEVICES; None = it is not set.
        engine_secret: of --engine-listen; None = no secret was given.
        find_model: finds the models of reloads; None = each is a folder.
        started_at: `time.monotonic()` when the program began, for the start-up report.

    Raises:
        ConfigError: the port is taken, a file of TLS or of API keys can't be used, --otlp-endpoint lacks its
            packages, or a setting is out of range; all this is checked before any process starts. Or the
            engine reports that settings or model can't work.
        ModelError: the folder has no usable tokenizer.
    """
    check_server_config(server)
    check_engine_config(engine)
    check_replicas(server, engine, visible_gpus)
    check_engine_listen(server, engine)
    raise_open_file_limit(server.max_queued_requests + OTHER_FILES)
    clock = StartupClock(started_at)
    clock.lap("server: imports, arguments")
    tls_context(server)  # only a check: each server process makes its own
    read_users(server)  # the same
    if server.otlp_endpoint is not None:
        load_export()  # the same
    listeners = _listen(server.host, server.port, server.api_workers)
    ipc_dir: Path | None = None
    try:
        ipc_dir = make_ipc_dir()
        worker = {
            "engine": dataclasses.asdict(engine),
            "model_folder": str(model_folder),
            "log_level": server.log_level,
            "num_servers": server.api_workers,
        }
        keeper = KeeperSettings(
            command=worker_command or list(WORKER),
            worker=worker,
            private_dir=ipc_dir,
            startup_timeout_s=server.startup_timeout_s,
            heartbeat_timeout_s=server.heartbeat_timeout_s,
            restarts=DEFAULT_RESTARTS if server.engine_restarts is None else server.engine_restarts,
            keeps_spare=server.spare_process,
        )
        door = None
        if server.engine_listen is not None:
            limits = LifeLimits(server.startup_timeout_s, server.heartbeat_timeout_s)
            door = DoorSettings(server.engine_listen, engine_secret or "", model_folder, limits)
        launch = LaunchSettings(
            server=server,
            engine=engine,
            model_name=served_name(server.served_model_name, engine.model),
            model_folder=model_folder,
            listeners=listeners,
            keeper=keeper,
            workers=replica_workers(worker, server.replicas, engine.tp, visible_gpus),
            door=door,
            find_model=find_model or _model_in_folder,
            gpus=gpu_names(visible_gpus),
            clock=clock,
        )
        return asyncio.run(_serve(launch))
    finally:
        for listener in listeners:
            listener.close()
        if ipc_dir is not None:
            shutil.rmtree(ipc_dir, ignore_errors=True)


def _model_in_folder(engine: EngineConfig) -> tuple[EngineConfig, Path]:
    folder = Path(engine.model).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--model must be a folder, got {engine.model!r}")
    return engine, folder


def raise_open_file_limit(wanted: int) -> None:
    """Raise the soft limit on open files to the hard limit; log a warning if that is below `wanted`."""
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


class LaunchSettings(NamedTuple):
    """Everything that `_serve` needs to start."""

    server: ServerConfig
    engine: EngineConfig
    model_name: str
    model_folder: Path
    listeners: list[socket.socket]  # bound and listening, one for each server process
    keeper: KeeperSettings
    workers: list[dict[str, Any]]  # the first line of each engine
    door: DoorSettings | None  # --engine-listen: no engine is started
    find_model: FindModel
    gpus: list[str] | None  # all that engines may use; None = unknown
    clock: StartupClock


class Signals:
    """SIGTERM and the first SIGINT set `stop`; another SIGINT sets `stop_now`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.stop_now = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def on_hangup(self, *actions: Callable[[], None]) -> None:
        """Do this at every SIGHUP from now on. Without, it ends the process."""

        def act() -> None:
            for action in actions:
                action()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, act)

    def _interrupt(self) -> None:
        if self.stop.is_set():
            self.stop_now.set()
        self.stop.set()


async def _serve(launch: LaunchSettings) -> int:
    """Start all parts, supervise them, and end them in reverse order; returns the exit code."""
    signals = Signals()
    async with contextlib.AsyncExitStack() as parts:
        keepers = _make_keepers(launch)
        parts.push_async_callback(keepers.close)
        is_door = isinstance(keepers, EngineDoor)
        engines = Engines(keepers.engines, may_grow=is_door)
        private_dir = launch.keeper.private_dir
        settings = HttpServerSettings(
            launch.server, launch.engine, launch.model_name, launch.model_folder, private_dir, rank=0
        )
        first_dir = private_dir if is_door else keepers.first.dir_of_life()
        workers = ApiWorkers(settings, launch.listeners[1:], engines.first.pid, first_dir)
        parts.push_async_callback(workers.close)
        launch.clock.lap("server: port, sockets, processes")
        # This runs while the engine starts, so it does not delay readiness.
        reloads = Reloads()
        http_server = await open_http_server(settings, engines, reloads, launch.listeners[0])
        parts.push_async_callback(http_server.close)
        if launch.server.api_keys_file is not None or launch.server.usage_log is not None:
            signals.on_hangup(http_server.reload, workers.reload)
        engines.listen(http_server.reader(_print_stage))
        reloader: Reloader | None = None
        if is_door:
            keepers.open(engines, workers)
            _print_to_user(f"Engines connect to {keepers.endpoint}")
        else:
            keepers.keep(workers)
            reloaded = (http_server, engines, keepers, workers, reloads)
            reloader = Reloader(ReloaderParts(settings, *reloaded, launch.find_model, launch.gpus))
            parts.push_async_callback(reloader.close)
        return await _supervise(ServerParts(launch, http_server, keepers, workers, reloader, signals))


def _make_keepers(launch: LaunchSettings) -> EngineKeepers | EngineDoor:
    if launch.door is not None:
        return EngineDoor(launch.door)
    # On a GPU the first engine compiles, and the others find its code.
    return EngineKeepers(launch.keeper, launch.workers, one_first=launch.engine.device != "cpu")


class ServerParts(NamedTuple):
    """The parts of a running server."""

    launch: LaunchSettings
    http_server: HttpServer
    keepers: EngineKeepers | EngineDoor
    workers: ApiWorkers
    reloader: Reloader | None
    """None: the engines are not the server's."""
    signals: Signals


async def _supervise(parts: ServerParts) -> int:
    """Wait until the engine is ready, then for a failure or a signal; then end every open request.

    Returns the exit code.

    Raises:
        ConfigError: the engine refuses its settings or the model.
    """
    launch, http_server, keepers, workers, _, signals = parts
    server, model = launch.server, http_server.model.current
    host, port = launch.listeners[0].getsockname()[:2]
    tls = server.tls_cert is not None
    _print_to_user(f"Listening on {base_url(host, port, tls)}; loading {model.name}")
    failures = (keepers.failed, workers.failed)
    await _wait_for_first(keepers.ready, *failures, signals.stop.wait(), timeout_s=None)
    if keepers.ready.done() and not any(failure.done() for failure in failures):
        ready = keepers.ready.result()
        await _wait_for_first(workers.all_ready(), *failures, signals.stop.wait(), timeout_s=None)
        _print_to_user(waterfall({**launch.clock.laps, **_engine_stages(ready)}, launch.clock.total_ms()))
        _print_to_user(
            f"Serving {model.name} on {ready.device}, up to {ready.max_context_tokens} tokens a request:"
        )
        needs_key = bool(server.api_key or server.api_keys_file)
        _print_to_user(curl_line(base_url(host, port, tls), model.name, model.template.is_usable, needs_key))
        await _wait_for_first(*failures, signals.stop.wait(), timeout_s=None)
    if not any(failure.done() for failure in failures):
        if await _drain(parts):
            return EXIT_STOPPED
        if not any(failure.done() for failure in failures):
            return EXIT_INTERRUPTED
    if keepers.failed.done():
        failure = keepers.failed.result()
        if failure.is_user_mistake:
            _fail_open_requests(parts, failure.reason)
            raise ConfigError(failure.reason)
        code = DEVICE_FAULT_EXIT_CODE if failure.is_device_fault else EXIT_ENGINE_DIED
        return _fail(parts, f"the engine died: {failure.reason}", code)
    return _fail(parts, workers.failed.result())


async def _drain(parts: ServerParts) -> bool:
    """Let the open requests end, then stop the engine.

    Returns False if a process died meanwhile, or if the user does not want to wait (a second SIGINT).
    """
    launch, http_server, keepers, workers, reloader, signals = parts
    streams, failures = http_server.streams, (keepers.failed, workers.failed)
    refusal = RequestError(503, "shutting_down", "the server is shutting down")
    http_server.refuse_requests(refusal)
    workers.drain()
    if not keepers.has_been_ready:
        return True  # no request runs, and a loading engine reads no messages
    limit_s = launch.server.drain_timeout_s
    log.info("stopping: %d open requests may go on for %g s", await http_server.num_open(), limit_s)
    await _wait_for_first(
        _all_empty(http_server, workers), *failures, signals.stop_now.wait(), timeout_s=limit_s
    )
    if any(failure.done() for failure in failures):
        return False
    streams.fail_all(refusal)
    if reloader is not None:  # before the processes end, one of which may have its caller
        await _wait_for_first(reloader.close(), signals.stop_now.wait(), timeout_s=None)
    await _wait_for_first(workers.stop(), signals.stop_now.wait(), timeout_s=None)
    if not signals.stop_now.is_set():
        await _wait_for_first(http_server.make_spans(), signals.stop_now.wait(), timeout_s=LAST_SPANS_S)
        await _wait_for_first(keepers.stop(), signals.stop_now.wait(), timeout_s=None)
    return not signals.stop_now.is_set()


async def _all_empty(http_server: HttpServer, workers: ApiWorkers) -> None:
    """Return when no server process has an open request."""
    await http_server.streams.wait_until_empty()
    await workers.all_empty()


def _fail(parts: ServerParts, reason: str, exit_code: int = EXIT_ENGINE_DIED) -> int:
    """Handle the failure of the engine or of a server process; returns the exit code."""
    log.error("%s", reason)
    _fail_open_requests(parts, reason)
    return exit_code


def _fail_open_requests(parts: ServerParts, reason: str) -> None:
    """End every open request in all server processes with an error that states `reason`."""
    error = EngineDeadError(reason)
    parts.http_server.refuse_requests(error)
    parts.http_server.streams.fail_all(error)
    parts.workers.fail(reason)


async def _wait_for_first(*waits: Awaitable[Any], timeout_s: float | None) -> None:
    """Return when one of `waits` is done or the time is over. Futures among them are not cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()


def _listen(host: str, port: int, num_servers: int) -> list[socket.socket]:
    """Open the listening TCP sockets. This comes early, so that a busy port is found before the model loads.

    Several sockets share the port by SO_REUSEPORT; the kernel gives each connection to one of them.

    Raises:
        ConfigError: the address can't be used.
    """
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][
            0
        ]
        first = socket.create_server((host, port), family=family, backlog=BACKLOG)
        if num_servers == 1:
            return [first]
        # A socket without SO_REUSEPORT could bind, so no other server uses the port.
        host, port = first.getsockname()[:2]
        first.close()
        return [
            socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=True)
            for _ in range(num_servers)
        ]
    except (OSError, ValueError) as error:  # ValueError: a malformed name, such as "a..b"
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"can't listen on {host or '*'} port {port}: {why}; "
            "choose another with --host and --port (--port 0 takes a free one)"
        ) from None


def _engine_stages(ready: Ready) -> dict[str, float]:
    return {f"engine: {name}": duration_ms for name, duration_ms in ready.startup_ms.items()}


def _print_stage(stage: StartupStage) -> None:
    _print_to_user(stage_line(f"engine: {stage.name}", stage.duration_ms))


def _print_to_user(text: str) -> None:
    """Print to stdout. A closed stdout must not end the server."""
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except UnicodeEncodeError:
        sys.stdout.write(text.encode("ascii", "replace").decode() + "\n")
    except OSError:
        # Python would try to write the rest at exit, and turn the exit code into 120.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
