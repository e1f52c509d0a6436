"""Which ingress an engine goes to, when there may be an older and a younger one.

This module does not import Ray.
"""

from typing import NamedTuple

SETTLE_S = 5.0
"""An engine in service stays so long after a younger ingress was seen: the older one may still get calls."""


class Whereabouts(NamedTuple):
    """Where engines find an ingress."""

    server: str
    """tcp://host:port."""
    secret: str
    born: float
    """When it began, `time.time()`."""


class IngressChooser:
    """Chooses the ingress of one engine: the youngest that has answered, once `SETTLE_S` have passed."""

    def __init__(self) -> None:
        self._youngest: Whereabouts | None = None
        self._seen_s = 0.0
        self._last_choice: Whereabouts | None = None

    def next(self, found: Whereabouts, *, in_service: bool, now_s: float) -> Whereabouts | None:
        """The ingress that the engine must go to now; None = it stays.

        Args:
            found: an ingress that has just answered. While there are two, either may answer.
            in_service: whether the engine serves an ingress. If not, it goes at once.
            now_s: `time.monotonic()`.
        """
        if self._youngest is None or found.born > self._youngest.born:
            self._youngest, self._seen_s = found, now_s
        if self._youngest == self._last_choice or (in_service and now_s - self._seen_s < SETTLE_S):
            return None
        self._last_choice = self._youngest
        return self._last_choice
