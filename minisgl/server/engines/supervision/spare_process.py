"""A process that has imported what an engine needs, and waits to become the next one.

Starting Python and importing torch takes seconds, which the next start then need not wait for.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

from minisgl.errors import ConfigError
from minisgl.server.engines.supervision.engine_process import EngineProcess

log = logging.getLogger(__name__)


class SpareProcess:
    """Keeps at most one such process. Create, use and close it in one event loop.

    Args:
        command: the engine's command line.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: EngineProcess | None = None

    def start(self, worker: dict[str, Any]) -> None:
        """Start a process, unless one waits already.

        Args:
            worker: an engine's settings. The process does what all engines of this host need; another
                engine's settings may follow.
        """
        if self._process is not None and not self._process.exited.is_set():
            return
        try:
            self._process = EngineProcess(self._command)
        except ConfigError as error:  # the next engine starts without it
            log.warning("no spare process: %s", error)
            return
        # Which GPUs it sees is the next engine's to say.
        self._process.tell(json.dumps({**worker, "ipc_dir": "", "visible_gpus": ""}).encode())

    def take(self) -> EngineProcess | None:
        """The process, which the caller begins and closes; None = there is none."""
        process, self._process = self._process, None
        if process is not None and process.exited.is_set():
            log.warning("the spare process has ended, so the engine starts without it")
            return None
        return process

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()
