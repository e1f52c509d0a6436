"""Which ingress an engine goes to, when there may be an older and a younger one.

This module does not import Ray.
"""

from typing import NamedTuple

SETTLE_S = 5.0
"""How long an engine in service stays when there is a younger ingress: the older one may still get calls."""


class Whereabouts(NamedTuple):
    """Where engines find an ingress."""

    server: str
    """tcp://host:port."""
    secret: str
    born: float
    """When it began, `time.time()`."""


class Follower:
    """Chooses for one engine: the youngest ingress that was seen, but not in a hurry."""

    def __init__(self) -> None:
        self._youngest: Whereabouts | None = None
        self._seen_s = 0.0
        self._told: Whereabouts | None = None

    def next(self, found: Whereabouts, *, in_service: bool, now_s: float) -> Whereabouts | None:
        """Where the engine must go now; None = it stays.

        Args:
            found: an ingress that has just answered; not always the same one while there are two.
            in_service: the engine serves an ingress. One that does not has nothing to wait for.
            now_s: `time.monotonic()`.
        """
        if self._youngest is None or found.born > self._youngest.born:
            self._youngest, self._seen_s = found, now_s
        if self._youngest == self._told or (in_service and now_s - self._seen_s < SETTLE_S):
            return None
        self._told = self._youngest
        return self._told
