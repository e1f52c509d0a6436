"""Keeps a rank's compiled code between starts, as one entry of `compile_cache` for each rank.

Promise: a problem with the cache logs a warning, and the start continues.
"""

import logging
import os
from pathlib import Path

import torch

from compile_cache.key import machine_facts
from compile_cache.manifest import CacheError
from compile_cache.store import OpenCache, open_cache
from minisgl.config import ResolvedConfig

logger = logging.getLogger(__name__)


def open_rank_compile_cache(config: ResolvedConfig, device: torch.device, rank: int) -> OpenCache | None:
    """Open the cache entry with the compiled code of former starts.

    Ranks start at the same time, so each has its own entry. None: nothing is compiled, or torch's default
    cache folder is used.
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


def publish_compile_cache(cache: OpenCache) -> None:
    """Make the code compiled so far available to the next start."""
    try:
        cache.publish()
    except CacheError as error:
        logger.warning("the next start compiles again: %s", error)
