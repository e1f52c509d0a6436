"""A node other than node 0: `minisgl serve --node-rank K` starts this host's ranks, without an HTTP server.

Promise: the node ends when node 0 ends for any reason, and leaves no process. It reports the end of one of
its ranks to node 0 at once.
"""

import logging
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from minisgl import __version__
from minisgl.config import EngineConfig
from minisgl.engine.ranks.follower_link import START_TIMEOUT_S, FollowerConfig
from minisgl.engine.ranks.node_link import Connection, Hello, RankEnded, Welcome, connect, model_digest
from minisgl.engine.ranks.rank_processes import RankProcesses
from minisgl.errors import DEVICE_FAULT_EXIT_CODE, DeviceFaultError, EngineDeadError
from minisgl.model_config.hf_config import read_model_config

logger = logging.getLogger(__name__)

Events = queue.SimpleQueue[tuple[int, int, str] | None]
"""The end of a rank as (rank, exit code, description), or None for the end of node 0."""


def run_node(config: EngineConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Join node 0, run this host's ranks, and return when the engine has ended in order.

    Args:
        config: checked, with `nnodes`, `node_rank` and `rdzv`. Node 0 decides all automatic settings.
        say: called with each line of progress.

    Raises:
        ConfigError: node 0 refuses this node.
        ModelError: `folder` has no model.
        DeviceFaultError: a GPU of this host failed.
        EngineDeadError: node 0 did not answer, or the engine ended with an error.
    """
    assert config.rdzv is not None  # checked
    read_model_config(folder, config.quantization, config.kv_dtype)
    hello = Hello(__version__, config.nnodes, config.tp, model_digest(folder), config.node_rank)
    say(f"node {config.node_rank}: waiting for node 0 at {config.rdzv}")
    connection, welcome = connect(config.rdzv, hello, START_TIMEOUT_S)
    events: Events = queue.SimpleQueue()
    processes = RankProcesses(lambda rank, code, how: events.put((rank, code, how)))

    def stop(signum: int, frame: object) -> None:
        raise EngineDeadError(f"node {config.node_rank} was told to stop ({signal.Signals(signum).name})")

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        _start(config, folder, welcome, processes)
        say(f"node {config.node_rank}: ranks {', '.join(str(each.rank) for each in welcome.ranks)}")
        _watch_node_0(connection, events)
        _follow(len(welcome.ranks), connection, events)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        processes.close(0)
        connection.close()


def _start(config: EngineConfig, folder: Path, welcome: Welcome, processes: RankProcesses) -> None:
    assert welcome.engine is not None  # node 0 did not refuse this node
    engine = replace(
        welcome.engine,
        node_rank=config.node_rank,
        cpu_threads=config.cpu_threads,
        compile_cache=config.compile_cache,
        profile_dir=config.profile_dir,
    )
    level = logging.getLevelName(logger.getEffectiveLevel()).lower()
    for each in welcome.ranks:
        line = FollowerConfig(engine, str(folder), None, each.rank, each.addresses, welcome.store, level)
        processes.start(each.rank, msgspec.json.encode(line))


def _follow(num_ranks: int, connection: Connection, events: Events) -> None:
    """Wait until all ranks have ended with exit code 0.

    Raises:
        DeviceFaultError: a rank ended because of a fault of its GPU.
        EngineDeadError: a rank failed, or node 0 has ended.
    """
    while num_ranks:
        event = events.get()
        if event is None:
            raise EngineDeadError("node 0 has ended, and so do this node's ranks")
        rank, code, how = event
        if code != 0:
            is_device_fault = code == DEVICE_FAULT_EXIT_CODE
            connection.send(RankEnded(rank, how, is_device_fault))
            kind = DeviceFaultError if is_device_fault else EngineDeadError
            raise kind(f"rank {rank} of --tp ended ({how}); all ranks end")
        num_ranks -= 1


def _watch_node_0(connection: Connection, events: Events) -> None:
    def wait() -> None:
        connection.receive(Welcome)  # node 0 sends nothing more, so this returns when it ends
        events.put(None)

    threading.Thread(target=wait, name="node-0-exit", daemon=True).start()
