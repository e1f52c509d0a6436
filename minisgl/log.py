"""Sets up logging; only a process's entry point calls it, once."""

import logging
import sys

LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str, process: str) -> None:
    """Send this process's log to stderr, each line marked with `process` ("server", "engine" ...)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {process} %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")
    )
    for name in ("minisgl", "triton_kernels"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
