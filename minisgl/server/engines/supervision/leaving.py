"""Lets an engine leave that wants to (`ipc/door_messages.Leaving`).

Promise: its requests end in it or, after its limit, go on in other engines. This counts as no crash.
"""

import asyncio
import logging
import time

from minisgl.server.engines.served_engine import ServedEngine

log = logging.getLogger(__name__)

HAS_LEFT = "it has left, as it wanted to"
"""The reason that is noted for the end of its life."""
EMPTY_POLL_S = 0.05
"""How often to check whether its requests have ended."""


async def end_when_left(engine: ServedEngine) -> None:
    """Wait until the engine wants to leave; end its life when it has no requests, or at its limit."""
    link = engine.link
    limit_s = await link.leaving
    log.info("%s is leaving; its %d requests have up to %g s", engine.name, engine.num_open, limit_s)
    deadline = time.monotonic() + limit_s
    while engine.num_open and time.monotonic() < deadline:
        await asyncio.sleep(EMPTY_POLL_S)
    link.declare_dead(HAS_LEFT)
