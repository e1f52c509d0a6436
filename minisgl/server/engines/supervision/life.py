"""One life of an engine, as the first server process sees it: from its start to its end.

Promise: when the life is ready, requests that wait are sent to it; suspects of a crash are tried alone first.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from minisgl.ipc.messages import Ready
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.processes.api_workers import ApiWorkers

log = logging.getLogger(__name__)


class LifeLimits(NamedTuple):
    """How long to wait for an engine, in seconds."""

    startup_s: float
    heartbeat_s: float


async def live(
    engine: ServedEngine, workers: ApiWorkers, limits: LifeLimits, on_ready: Callable[[Ready], None]
) -> None:
    """Run requests in the engine's current life; return when the life has ended.

    Args:
        on_ready: called when the life is ready, before it gets requests.
    """
    link = engine.link
    await asyncio.wait((link.ready, link.died), timeout=limits.startup_s, return_when=asyncio.FIRST_COMPLETED)
    if not link.ready.done() and not link.died.done():
        link.declare_dead(f"it was not ready after {limits.startup_s:g} s (see --startup-timeout-s)")
    if link.is_up:
        on_ready(link.ready.result())
        link.start_heartbeat(limits.heartbeat_s)
        resuming = asyncio.ensure_future(_resume(engine, workers))
        await asyncio.wait((resuming, link.died), return_when=asyncio.FIRST_COMPLETED)
        if not resuming.done():
            resuming.cancel()
        elif resuming.exception() is not None:
            log.error("requests can't be sent to the engine", exc_info=resuming.exception())
            link.declare_dead("its requests could not be sent")
    await link.died


async def _resume(engine: ServedEngine, workers: ApiWorkers) -> None:
    if engine.generation > engine.first_generation:
        # The workers are asked first, because nothing else may run beside a suspect.
        in_workers = await workers.num_suspects(engine.generation)
        if engine.num_suspects or any(in_workers):
            num = engine.num_suspects + sum(in_workers)
            log.warning("%d requests, on one of which the engine may have crashed, are tried alone", num)
            await engine.try_suspects()
            await workers.try_suspects(engine.first_generation, engine.generation, in_workers)
    await engine.resume()
    workers.resume(engine.first_generation, engine.generation)
