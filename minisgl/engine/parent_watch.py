"""Ends this process when its parent has ended, for whatever reason."""

import os
import select
import shutil
import threading


class ParentWatch:
    """Exits the process as soon as nobody can write to its stdin any more, a pipe; reads nothing of it.

    Attributes:
        folder: a directory to remove then, because a killed parent can't; None = none.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        threading.Thread(target=self._wait, name="parent-watch", daemon=True).start()

    def _wait(self) -> None:
        watched = select.poll()
        watched.register(0, 0)  # which still reports the end
        watched.poll()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(1)
