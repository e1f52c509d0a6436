"""A lock between processes that would otherwise convert the same model at the same time."""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Wait for the exclusive lock on `path` and hold it. The system frees it if this process dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is making the same model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
