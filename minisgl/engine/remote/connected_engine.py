"""An engine that connects to a server: it loads the model once, and serves one connection after the other.

Promise: a new connection is a new life. The requests of the last life have ended; its prefix cache is kept.
Before the engine ends or goes to another server, it tells its server.
"""

import contextlib
import math
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from compile_cache.bytecode import keep_bytecode
from minisgl import __version__
from minisgl.config import SUPERVISED, ConnectConfig, EngineConfig
from minisgl.config.model_facts import engine_facts
from minisgl.engine.ranks.follower_link import FollowerConfig
from minisgl.engine.ranks.job import Job, ask
from minisgl.engine.remote.departure import Departure
from minisgl.engine.remote.supervisor import Supervisor
from minisgl.engine.start.gc_freeze import pause_then_freeze_gc
from minisgl.engine.worker import end_soon, fatal_message, ready_message, serve
from minisgl.errors import ConfigError
from minisgl.grammar.limits import MAX_QUEUED
from minisgl.ipc.door_messages import Hello, Leaving
from minisgl.ipc.messages import Ready, StartupStage, ToEngine
from minisgl.ipc.server_line import ServerDoor, ServerLine, ServerLostError

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine.engine import Engine

Say = Callable[[str], None]


class ProcessParts(NamedTuple):
    """What connects this process to others: the server, signals, a supervisor, the terminal."""

    door: ServerDoor
    departure: Departure
    """Whether SIGTERM has asked this process to end."""
    supervisor: Supervisor | None
    """The program that started this process with `--server -`; None = there is none."""
    say: Say
    """Called with each line of progress."""


def process_parts(connect: ConnectConfig, secret: str, say: Say, job: Job | None = None) -> ProcessParts:
    """Make the parts of this process. With a supervisor, wait until it says where the server is.

    Args:
        secret: of the server. A supervisor sends its own.

    Raises:
        ConfigError: the secret is too short.
    """
    departure = Departure(connect.drain_timeout_s)
    if job is None:  # torchrun ends all ranks at once, so none can wait
        departure.listen()
    if connect.server != SUPERVISED:
        return ProcessParts(ServerDoor(connect.server, secret, say), departure, None, say)
    supervisor = Supervisor()
    address = supervisor.first_address()
    door = ServerDoor(address.server, address.secret, say)
    supervisor.follow(door)
    return ProcessParts(door, departure, supervisor, say)


def run_connected_engine(
    config: EngineConfig, folder: Path, parts: ProcessParts, started: float, job: Job | None = None
) -> None:
    """Connect to the server, load the model, and serve until the process is ended.

    Args:
        config: checked.
        started: `time.monotonic()` when the program began.
        job: the torchrun job that this process is rank 0 of; None = no job.

    Raises:
        ConfigError: the server refuses this engine, or a setting is impossible.
        ModelError: the folder's model can't be loaded.
        DeviceFaultError: the GPU failed.
        EngineDeadError: another rank has ended.
    """
    if config.compile_cache:
        keep_bytecode(Path(config.compile_cache).expanduser())
    config = _with_ranks_of_job(config, job)
    stages: dict[str, float] = {}
    with pause_then_freeze_gc():
        from minisgl.engine.start.build import build_engine, reasons_for_settings, resolve_for_folder

        stages["import torch"] = (time.monotonic() - started) * 1e3
        # The server may refuse this engine, so it is asked before the model is loaded.
        facts = engine_facts(resolve_for_folder(config, folder), folder)
        line = parts.door.enter(_hello(facts))
        parts.say(f"connected to {line.endpoint}")

        def on_stage(name: str, duration_ms: float) -> None:
            stages[name] = duration_ms
            line.send(StartupStage(name, duration_ms))

        on_stage("import torch", stages["import torch"])
        try:
            engine = build_engine(
                config, folder, on_stage, on_lost_rank=end_soon, max_queued_grammars=MAX_QUEUED, job=job
            )
        except Exception as error:
            line.send(fatal_message(error))
            line.close()
            raise
    try:
        choices = reasons_for_settings(config, engine.config, folder)
        ready = ready_message(engine, stages, [(one.flag, one.value, one.why) for one in choices])
        parts.say("ready")
        _serve_lives(engine, ready, line, facts, parts)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            engine.close()
        raise


def run_rank_of_job(config: EngineConfig, folder: Path, job: Job) -> int:
    """Run a rank above 0 of a torchrun job until rank 0 ends it; returns the exit code.

    Rank 0 decides all settings except those of this host.

    Raises:
        ConfigError: --tp is not the number of ranks.
        EngineDeadError: rank 0 did not answer.
    """
    _with_ranks_of_job(config, job)
    from minisgl.engine.ranks.follower import run_follower
    from minisgl.parallel.mesh import open_store

    order = msgspec.json.decode(ask(open_store(job.store, job.size), job.rank), type=FollowerConfig)
    engine = replace(
        order.engine,
        cpu_threads=config.cpu_threads,
        compile_cache=config.compile_cache,
        profile_dir=config.profile_dir,
    )
    own = msgspec.structs.replace(order, engine=engine, model_folder=str(folder), ipc_dir=None)
    return run_follower(own)


def _with_ranks_of_job(config: EngineConfig, job: Job | None) -> EngineConfig:
    if job is None:
        return config
    if config.tp not in (1, job.size):
        raise ConfigError(f"torchrun has started {job.size} ranks, and --tp is {config.tp}; leave --tp out")
    return replace(config, tp=job.size)


def _serve_lives(
    engine: "Engine", ready: Ready, line: ServerLine, facts: dict[str, str], parts: ProcessParts
) -> None:
    door, departure, supervisor, say = parts
    while True:
        try:
            departure.enter_service()
            line.send(ready)
            serve(engine, _WatchedLine(line, engine, parts))
        except ServerLostError as lost:
            say(f"the connection to the server has ended ({lost}); its requests end here")
            line.close()
            engine.abort_all()
        except Exception as error:
            line.send(fatal_message(error))
            line.close()
            raise
        if supervisor is not None:
            supervisor.note_pause()
        departure.leave_service()
        line = door.enter(_hello(facts))
        say("connected again")


class _WatchedLine:
    """The connection of one life. It also tells the server when this engine wants to leave."""

    def __init__(self, line: ServerLine, engine: "Engine", parts: ProcessParts) -> None:
        self.send = line.send
        self.send_outputs = line.send_outputs
        self._line = line
        self._engine = engine
        self._parts = parts
        self._is_leaving = False

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """As `ServerLine.receive`."""
        door, departure, supervisor, _ = self._parts
        moves = door.endpoint != self._line.endpoint
        if not self._is_leaving and (departure.is_wanted or moves):
            self._is_leaving = True
            # The other engines move, too, so the requests have no other engine to go on in.
            self._line.send(Leaving(math.inf if moves else departure.limit_s))
        if supervisor is not None:
            supervisor.note_service(self._engine)
        return self._line.receive(timeout_ms)


def _hello(facts: dict[str, str]) -> Hello:
    """The first message of the next life."""
    return Hello(__version__, uuid.uuid4().hex[:12], socket.gethostname(), os.getpid(), facts)
