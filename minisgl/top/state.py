"""What `minisgl top` shows, and how keys change it. No terminal, no network, no clock.

Promise: a choice stays with its request, wherever sorting moves it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from minisgl.server.watch.views import RequestView
from minisgl.top.client import Snapshot

T = TypeVar("T")
SORTS: dict[str, Callable[[RequestView], Any]] = {
    "arrival": lambda one: -one.arrived_at,
    "time": lambda one: -one.total_ms,
    "first token": lambda one: -(one.first_token_ms or 0.0),
    "prompt": lambda one: -one.prompt_tokens,
    "output": lambda one: -one.output_tokens,
}
"""What the list can be sorted by; equal ones are sorted by arrival, the newest first."""
FILTERS: dict[str, Callable[[RequestView], bool]] = {
    "all": lambda one: True,
    "open": lambda one: one.state != "ended",
    "waiting": lambda one: one.state in ("restart", "grammar", "queued", "preempted"),
}


@dataclass
class State:
    """The screen's content, and the user's choices."""

    snapshot: Snapshot | None = None
    problem: str = ""
    """Why there is no newer snapshot; empty = it is new."""
    message: str = ""
    """What the last command did."""
    sort: str = "arrival"
    filter: str = "all"
    engine: int | None = None
    """Place of the engine that is shown; None = all."""
    chosen: int | None = None
    """Number of the chosen request."""
    explains: bool = False
    """Whether the chosen request is shown in words."""
    confirms: RequestView | None = None
    """The request that is aborted if the user says yes."""
    aborts: list[RequestView] = field(default_factory=list)
    """Requests that the user wants ended; whoever reads them takes them out."""

    @property
    def num_engines(self) -> int:
        """How many engines the server has."""
        return len(self.snapshot.engines.engines) if self.snapshot is not None else 0

    def requests(self) -> list[RequestView]:
        """The requests of the shown engines, filtered and sorted."""
        if self.snapshot is None:
            return []
        found = [one for part in self.shown(self.snapshot.requests.engines) for one in part.requests]
        wanted = sorted(filter(FILTERS[self.filter], found), key=lambda one: (-one.arrived_at, -one.number))
        return sorted(wanted, key=SORTS[self.sort])

    def shown(self, engines: Sequence[T]) -> Sequence[T]:
        """Of what is told of each engine, that of the shown ones."""
        if self.engine is None:
            return engines
        return engines[self.engine : self.engine + 1] or engines[-1:]

    def engine_of(self, number: int) -> int | None:
        """Id of the engine that has this request."""
        engines = self.snapshot.requests.engines if self.snapshot is not None else []
        return next((part.id for part in engines if any(one.number == number for one in part.requests)), None)

    def chosen_request(self) -> RequestView | None:
        """The chosen request, if it is shown."""
        return next((one for one in self.requests() if one.number == self.chosen), None)

    def take(self, key: str) -> bool:
        """Do what a key asks for. Returns False if the user wants to leave."""
        self.message = ""
        if self.confirms is not None:
            if key in ("y", "Y"):
                self.aborts.append(self.confirms)
                self.message = f"ending {self.confirms.id or self.confirms.number}"
            self.confirms = None
            return True
        if key in ("q", "Q", "ctrl-c"):
            return False
        actions: dict[str, Callable[[], None]] = {
            "up": lambda: self._move(-1),
            "k": lambda: self._move(-1),
            "down": lambda: self._move(1),
            "j": lambda: self._move(1),
            "page-up": lambda: self._move(-10),
            "page-down": lambda: self._move(10),
            "enter": self._explain,
            "escape": self._leave,
            "s": lambda: setattr(self, "sort", _next(SORTS, self.sort)),
            "f": lambda: setattr(self, "filter", _next(FILTERS, self.filter)),
            "a": self._ask_to_abort,
            "e": self._next_engine,
        }
        actions.get(key, lambda: None)()
        return True

    def _move(self, by: int) -> None:
        shown = self.requests()
        if not shown:
            return
        places = {one.number: place for place, one in enumerate(shown)}
        place = places.get(self.chosen) if self.chosen is not None else None
        wanted = (0 if by > 0 else len(shown) - 1) if place is None else place + by
        self.chosen = shown[max(0, min(wanted, len(shown) - 1))].number

    def _explain(self) -> None:
        self.explains = self.chosen_request() is not None and not self.explains

    def _leave(self) -> None:
        if self.explains:
            self.explains = False
        else:
            self.chosen = None

    def _ask_to_abort(self) -> None:
        one = self.chosen_request()
        if one is None:
            self.message = "choose a request first, with the arrow keys"
        elif one.state == "ended":
            self.message = "it has ended"
        else:
            self.confirms = one

    def _next_engine(self) -> None:
        if self.snapshot is None or self.num_engines < 2:
            return
        following = 0 if self.engine is None else self.engine + 1
        self.engine = following if following < self.num_engines else None
        self.chosen = None


def _next(names: dict[str, Any], name: str) -> str:
    all_names = list(names)
    return all_names[(all_names.index(name) + 1) % len(all_names)]
