"""A further rank of an engine: `python -m minisgl.engine.follower`, started by rank 0 or by its own node.

Reads one JSON line from stdin, a `FollowerConfig`. The pipe stays open as a sign of life: at its end who
started it is gone, and so is this process.

Promise: it executes rank 0's step plans in their order and decides nothing; it never outlives who started it,
and says why when it has to end.
"""

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from compile_cache.bytecode import keep_bytecode
from minisgl.engine.follower_link import (
    RECORD_GRAPH,
    Checksum,
    Failed,
    FollowerConfig,
    Joining,
    Started,
    TokenChecksum,
)
from minisgl.engine.garbage import collect_once
from minisgl.engine.worker import end_with_the_parent
from minisgl.errors import MinisglError
from minisgl.log import setup_logging
from minisgl.scheduler.plan import StepPlan
from minisgl.transport import FollowerSocket

logger = logging.getLogger(__name__)


def main() -> int:
    """Run until told to stop; the exit code is 0 then, 1 after a failure."""
    line = sys.stdin.buffer.readline()
    if not line:
        return 1  # rank 0 is gone already
    config = msgspec.json.decode(line, type=FollowerConfig)
    end_with_the_parent(config.ipc_dir)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup_logging(config.log_level, f"rank {config.rank}")
    socket = FollowerSocket(config.addresses)
    try:
        _run(config, socket)
        return 0
    except MinisglError as error:
        socket.send(msgspec.msgpack.encode(Failed(config.rank, str(error))))
        return 1
    except Exception as error:
        logger.exception("the rank failed")
        message = f"it failed: {type(error).__name__}: {error}"
        socket.send(msgspec.msgpack.encode(Failed(config.rank, message)))
        return 1
    finally:
        socket.close()


def _run(config: FollowerConfig, socket: FollowerSocket) -> None:
    if config.engine.compile_cache:
        keep_bytecode(Path(config.engine.compile_cache).expanduser())
    stages: dict[str, float] = {}
    with collect_once():
        # Lazy: torch takes seconds, and whatever it says should be reported.
        from minisgl.engine.build import build_follower
        from minisgl.engine.device import peak_host_bytes
        from minisgl.engine.rank import Rendezvous
        from minisgl.engine.stages import load_ms

        engine = build_follower(
            config.engine,
            Path(config.model_folder),
            Rendezvous(
                config.rank,
                config.store,
                lambda: socket.send(msgspec.msgpack.encode(Joining(config.rank))),
            ),
            on_stage=stages.__setitem__,
        )
    logger.debug("start, in ms: %s", {name: round(duration_ms) for name, duration_ms in stages.items()})
    started = Started(config.rank, engine.weights_bytes, load_ms(stages), peak_host_bytes())
    if config.engine.dummy_weights:
        engine.fill_pool()  # as rank 0's is where steps are measured
    socket.send(msgspec.msgpack.encode(started))
    decoder = msgspec.msgpack.Decoder(StepPlan)
    checksum = TokenChecksum()
    while data := socket.receive():
        if data == RECORD_GRAPH:
            engine.record_graph()
            continue
        for tokens in engine.follow(decoder.decode(data)):
            if checksum.add(tokens):
                report = Checksum(config.rank, checksum.num_steps, checksum.value)
                socket.send(msgspec.msgpack.encode(report))
    engine.close()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # what torch does at an interpreter's end may wait for ranks that are gone
