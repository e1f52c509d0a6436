"""Ends a connected engine on SIGTERM.

Promise: an engine in service goes when its requests have ended or the server lets it go at its limit; one
that loads or waits for a server goes at once, and so does every one at a second SIGTERM.
"""

import signal
import sys
from typing import Any


class Departure:
    """Whether this process is to end. `listen` in the main thread.

    Args:
        limit_s: seconds that open requests have until they go on in other engines.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.is_wanted = False
        self._is_in_service = False

    def listen(self) -> None:
        """Take SIGTERM from now on."""
        signal.signal(signal.SIGTERM, self._want)

    def enter_service(self) -> None:
        """The engine has requests from now on, or may get some."""
        self._is_in_service = True

    def leave_service(self) -> None:
        """It has none. If it is to end, this ends the process with exit code 0."""
        self._is_in_service = False
        if self.is_wanted:
            sys.exit(0)

    def _want(self, *_: Any) -> None:
        if self.is_wanted or not self._is_in_service:
            sys.exit(0)
        self.is_wanted = True
