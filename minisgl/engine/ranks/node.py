"""A node other than 0: `minisgl serve --node-rank K`, which starts this host's ranks and serves nobody.

Promise: it ends when node 0 does, however that ends, and then leaves no process; the end of one of its ranks
is node 0's at once.
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
from minisgl.engine.follower_link import START_TIMEOUT_S, FollowerConfig
from minisgl.engine.node_link import Connection, Hello, RankEnded, Welcome, connect, model_digest
from minisgl.engine.rank_processes import RankProcesses
from minisgl.errors import EngineDeadError
from minisgl.hf_config import read_model_config

logger = logging.getLogger(__name__)

Events = queue.SimpleQueue[tuple[int, int, str] | None]
"""The end of a rank: which, its exit code, and in words; None: that of node 0."""


def run_node(config: EngineConfig, folder: Path, say: Callable[[str], None]) -> None:
    """Join node 0, run this host's ranks, and return when the engine has ended in order.

    Args:
        config: checked, with `nnodes`, `node_rank` and `rdzv`; what is left to be decided, node 0 decides.
        say: told what happens, a line at a time.

    Raises:
        ConfigError: node 0 does not let this node in.
        ModelError: `folder` has no model.
        EngineDeadError: there is no node 0, or the engine did not end in order.
    """
    assert config.rdzv is not None  # checked
    read_model_config(folder)
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
    assert welcome.engine is not None  # this node was let in
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
    """Until all ranks have ended in order.

    Raises:
        EngineDeadError: they have not.
    """
    while num_ranks:
        event = events.get()
        if event is None:
            raise EngineDeadError("node 0 has ended, and so do this node's ranks")
        rank, code, how = event
        if code != 0:
            connection.send(RankEnded(rank, how))
            raise EngineDeadError(f"rank {rank} of --tp ended ({how}); all ranks end")
        num_ranks -= 1


def _watch_node_0(connection: Connection, events: Events) -> None:
    def wait() -> None:
        connection.receive(Welcome)  # nothing comes any more but the end
        events.put(None)

    threading.Thread(target=wait, name="node-0-exit", daemon=True).start()
