"""The process of a rank above 0, started by rank 0 or by torchrun.

One that rank 0 starts reads one JSON line from stdin, a `FollowerConfig`. The pipe then stays open. It
closes when the parent ends, and this process exits.

Promise: the rank executes rank 0's step plans in their order and decides nothing. It never outlives its
parent, and reports why it ends.
"""

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from compile_cache.bytecode import keep_bytecode
from minisgl.engine.device_faults import exit_after_device_fault
from minisgl.engine.parent_watch import ParentWatch
from minisgl.engine.ranks.follower_link import (
    Checksum,
    Failed,
    FollowerConfig,
    Joining,
    Started,
    TokenChecksum,
)
from minisgl.engine.start.gc_freeze import pause_then_freeze_gc
from minisgl.engine.worker import fatal_message
from minisgl.errors import EngineDeadError, MinisglError
from minisgl.ipc.transport import FollowerSocket
from minisgl.log import setup_logging
from minisgl.scheduler.plan import StepPlan, TokenMasks

logger = logging.getLogger(__name__)


def main() -> int:
    """Run until told to stop. Returns exit code 0, or 1 after a failure; a GPU fault ends the process."""
    config = msgspec.json.decode(ParentWatch().next_line(), type=FollowerConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return run_follower(config)


def run_follower(config: FollowerConfig) -> int:
    """Run until rank 0 says that it is over. Returns as `main`."""
    setup_logging(config.log_level, f"rank {config.rank}")
    socket = FollowerSocket(config.addresses)
    try:
        _run(config, socket)
        return 0
    except Exception as error:
        fatal = fatal_message(error)
        if fatal.is_device_fault or not isinstance(error, MinisglError):
            logger.exception("the rank failed")
        failed = Failed(config.rank, fatal.message, fatal.is_user_error, fatal.is_device_fault)
        socket.send(msgspec.msgpack.encode(failed))
        if fatal.is_device_fault:
            socket.close()
            exit_after_device_fault()
        return 1
    finally:
        socket.close()


def _run(config: FollowerConfig, socket: FollowerSocket) -> None:
    if config.engine.compile_cache:
        keep_bytecode(Path(config.engine.compile_cache).expanduser())
    stages: dict[str, float] = {}
    with pause_then_freeze_gc():
        # Lazy: importing torch takes seconds, and `main` reports an error of the import to rank 0.
        from minisgl.engine.start.build import build_follower
        from minisgl.engine.start.build_rank import Rendezvous
        from minisgl.engine.start.device import peak_host_bytes
        from minisgl.engine.start.startup_stages import load_ms

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
        engine.fill_pool()  # as rank 0 does when it measures steps
    socket.send(msgspec.msgpack.encode(started))
    decoder = msgspec.msgpack.Decoder(StepPlan)
    masks_decoder = msgspec.msgpack.Decoder(TokenMasks)

    def receive_masks() -> TokenMasks:
        data = socket.receive()
        if not data:  # told to stop between the halves of a step
            raise EngineDeadError("rank 0 has ended")
        return masks_decoder.decode(data)

    checksum = TokenChecksum()
    while data := socket.receive():
        for tokens in engine.follow(decoder.decode(data), receive_masks):
            if checksum.add(tokens):
                report = Checksum(config.rank, checksum.num_steps, checksum.value)
                socket.send(msgspec.msgpack.encode(report))
    engine.close()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # torch's cleanup at exit may wait for ranks that have ended
