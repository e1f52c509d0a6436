"""Compiled code between starts, as an engine keeps it: an entry of `compile_cache` for each rank.

Promise: whatever is wrong with it is a warning, and the start goes on.
"""

import logging
import os
from pathlib import Path

import torch

from compile_cache.key import machine_facts
from compile_cache.seal import CacheError
from compile_cache.store import OpenCache, open_cache
from minisgl.config import ResolvedConfig

logger = logging.getLogger(__name__)


def open_compiled_code(config: ResolvedConfig, device: torch.device, rank: int) -> OpenCache | None:
    """Where compiled code of former starts lies; None = nothing is compiled, or torch's own place is used.

    Ranks start together, so each has an entry of its own.
    """
    if device.type == "cpu" or not config.compile_cache or config.kernel:
        return None
    try:
        facts = machine_facts(device)
        if config.tp > 1:
            facts |= {"rank": f"{rank} of {config.tp}"}
        cache = open_cache(Path(os.path.expanduser(config.compile_cache)), facts)
    except CacheError as error:
        logger.warning("starting without a compile cache: %s", error)
        return None
    if cache is not None and cache.note:
        logger.warning("%s", cache.note)
    return cache


def seal(cache: OpenCache) -> None:
    """Let the next start have what was compiled so far."""
    try:
        cache.seal()
    except CacheError as error:
        logger.warning("the next start compiles again: %s", error)
