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
        self._gpus = ""  # that it sees, as CUDA_VISIBLE_DEVICES

    def start(self, worker: dict[str, Any]) -> None:
        """Start a process, unless one waits already that sees the same GPUs.

        Args:
            worker: an engine's settings. The process does what all engines of this host with these GPUs need;
                other settings may follow.
        """
        if self._process is not None and not self._process.exited.is_set():
            if self._gpus == _gpus_of(worker):
                return
            self._process.kill()
        self._gpus = _gpus_of(worker)
        try:
            self._process = EngineProcess(self._command)
        except ConfigError as error:  # the next engine starts without it
            self._process = None
            log.warning("no spare process: %s", error)
            return
        self._process.tell(json.dumps({**worker, "ipc_dir": ""}).encode())

    def take(self, worker: dict[str, Any]) -> EngineProcess | None:
        """The process for an engine with these settings, which the caller begins and closes.

        None: there is none, or it sees other GPUs, which is not to be changed once torch is imported.
        """
        process = self._process
        if process is None or self._gpus != _gpus_of(worker):
            return None
        self._process = None
        if process.exited.is_set():
            log.warning("the spare process has ended, so the engine starts without it")
            return None
        return process

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await process.close()


def _gpus_of(worker: dict[str, Any]) -> str:
    return worker.get("visible_gpus", "")
