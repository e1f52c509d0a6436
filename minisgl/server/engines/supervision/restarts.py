"""How often an engine may be started again, and how long to wait before it."""

from collections import deque

WINDOW_S = 600.0
"""Restarts that are longer ago do not count."""
LONGEST_WAIT_S = 30.0


class Restarts:
    """Counts the restarts of one engine.

    Args:
        most: restarts within `WINDOW_S`; 0 = none.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._times: deque[float] = deque()

    def take(self, now_s: float) -> float | None:
        """Count a restart, and return how many seconds to wait before it; None = no restart is left.

        The first one in the window comes at once, the next ones after 1 s, 2 s, 4 s and so on.

        Args:
            now_s: by `time.monotonic`; not earlier than the last time.
        """
        while self._times and self._times[0] <= now_s - WINDOW_S:
            self._times.popleft()
        num_before = len(self._times)
        if num_before >= self.most:
            return None
        self._times.append(now_s)
        return min(LONGEST_WAIT_S, 2.0 ** (num_before - 1)) if num_before else 0.0

    @property
    def num_counted(self) -> int:
        """Restarts in the window, by the last `take`."""
        return len(self._times)
