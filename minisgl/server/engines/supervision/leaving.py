"""Lets an engine go that wants to (`ipc/door_messages.Leaving`).

Promise: its requests end in it, or go on in other engines after its limit, and none of them counts this as a
crash.
"""

import asyncio
import logging
import time

from minisgl.server.engines.served_engine import ServedEngine

log = logging.getLogger(__name__)

HAS_LEFT = "it has left, as it wanted to"
"""Why the life of such an engine has ended."""
LOOK_S = 0.05
"""How often to see whether its requests have ended."""


async def let_go(engine: ServedEngine) -> None:
    """End the engine's current life when it wants to leave and has no requests, or at its limit."""
    link = engine.link
    limit_s = await link.leaving
    log.info("%s is leaving; its %d requests have up to %g s", engine.name, engine.num_open, limit_s)
    deadline = time.monotonic() + limit_s
    while engine.num_open and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)
    link.declare_dead(HAS_LEFT)
