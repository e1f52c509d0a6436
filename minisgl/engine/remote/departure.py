"""Ends a connected engine on SIGTERM.

Promise: an engine in service ends when its requests have ended, or when the server lets it go at its limit.
An engine that loads or waits for a server ends at once. A second SIGTERM ends any engine at once.
"""

import signal
import sys
from typing import Any


class Departure:
    """Whether this process is to end. Call `listen` in the main thread.

    Args:
        limit_s: seconds until open requests go on in other engines.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.is_wanted = False
        self._is_in_service = False

    def listen(self) -> None:
        """Take SIGTERM from now on."""
        signal.signal(signal.SIGTERM, self._want)

    def enter_service(self) -> None:
        """The engine may get requests from now on."""
        self._is_in_service = True

    def leave_service(self) -> None:
        """The engine has no requests. If it is to end, end the process with exit code 0."""
        self._is_in_service = False
        if self.is_wanted:
            sys.exit(0)

    def _want(self, *_: Any) -> None:
        if self.is_wanted or not self._is_in_service:
            sys.exit(0)
        self.is_wanted = True
