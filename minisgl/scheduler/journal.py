"""Notes of what happens to requests, and why the queue does not move, for those who explain it.

Promise: a note is written when something changes, never for each waiting or running request and step. There
is no clock here: the engine takes the notes after each call of the scheduler and adds the time.
"""

import logging
from collections import deque
from collections.abc import Sequence

import msgspec

from minisgl.lives import WaitReason
from minisgl.request import FinishReason, Request
from minisgl.scheduler.holdings import Holdings
from minisgl.scheduler.plan import Chunk

logger = logging.getLogger(__name__)

MAX_NOTES = 1 << 16
"""Notes that nobody takes are forgotten beyond this number."""


class Added(msgspec.Struct, frozen=True, gc=False):
    """A request waits: for its grammar, or for a row."""

    request_id: int
    num_prompt_tokens: int
    priority: int
    has_grammar: bool
    num_output_tokens: int = 0
    """What it has generated in an engine that has ended."""


class GrammarReady(msgspec.Struct, frozen=True, gc=False):
    """A request's grammar is compiled, or can't be; it waits for a row, or ends."""

    request_id: int


class Held(msgspec.Struct, frozen=True):
    """The first request of the queue gets no row in this step, and so does none behind it."""

    request_id: int
    priority: int
    reason: WaitReason
    figures: dict[str, int]


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """A request got a row. If it then waits for another one's snapshot, a second note says what it found."""

    request_id: int
    num_cached_tokens: int
    """Tokens of its feed that need not be computed."""


class Computed(msgspec.Struct, frozen=True, gc=False):
    """A chunk of a request's prompt is computed."""

    request_id: int
    num_fed_tokens: int
    is_last: bool


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """A request lost its row and its pages and waits again."""

    request_id: int
    by: int
    """The request that needed its pages; itself = it needed one and was the youngest. -1 = nobody: it is
    computed again alone, because a page that it shared may be wrong."""
    num_held_pages: int
    num_output_tokens: int


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A request has ended. One that was refused has no other note."""

    request_id: int
    reason: FinishReason
    num_output_tokens: int
    error_code: str


class Released(msgspec.Struct, frozen=True, gc=False):
    """The queue is empty."""


Note = Added | GrammarReady | Held | Admitted | Computed | Preempted | Ended | Released


class Journal:
    """Collects the notes until `take`."""

    def __init__(self) -> None:
        self.notes: deque[Note] = deque(maxlen=MAX_NOTES)
        """To look whether there are any."""
        self._last_held: tuple[str, int, int] | None = None  # None = the queue was empty

    def take(self) -> list[Note]:
        """All notes since the last call, in order."""
        notes = list(self.notes)
        self.notes.clear()
        return notes

    def added(self, request: Request) -> None:
        """See `Added`."""
        self.notes.append(
            Added(
                request.request_id,
                len(request.prompt),
                request.priority,
                request.has_grammar,
                len(request.output),
            )
        )

    def grammar_ready(self, request: Request) -> None:
        """See `GrammarReady`."""
        self.notes.append(GrammarReady(request.request_id))

    def held(
        self,
        head: Request,
        reason: WaitReason,
        holdings: Holdings,
        running: Sequence[Request],
        chunks: Sequence[Chunk],
    ) -> None:
        """Note why the first request of the queue gets no row, unless the last note says the same.

        For lack of pages it is noted for each first request, as its own pages explain it.

        Args:
            running: the requests that have a row.
            chunks: the parts of prompts that the step computes.
        """
        key = (reason, head.priority, head.request_id if reason == "pages" else -1)
        if key == self._last_held:
            return
        self._last_held = key
        figures: dict[str, int] = {}
        if reason == "rows":
            figures = {"rows": holdings.num_rows}
        elif reason == "pages":
            figures = _figures_of_pages(holdings, running)
        elif reason == "budget":
            figures = _figures_of_budget(running, chunks)
        self.notes.append(Held(head.request_id, head.priority, reason, figures))

    def released(self) -> None:
        """Note that the queue is empty, unless the last note says so."""
        if self._last_held is not None:
            self._last_held = None
            self.notes.append(Released())

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """See `Admitted`."""
        self.notes.append(Admitted(request.request_id, num_cached_tokens))

    def computed(self, request: Request, num_fed_tokens: int) -> None:
        """See `Computed`."""
        self.notes.append(Computed(request.request_id, num_fed_tokens, num_fed_tokens == len(request.feed)))

    def preempted(self, request: Request, by: Request | None) -> None:
        """See `Preempted`."""
        logger.debug("request %d is preempted at %d tokens", request.request_id, request.num_planned_tokens)
        by_id = -1 if by is None else by.request_id
        num_pages = len(request.lease.page_ids)
        self.notes.append(Preempted(request.request_id, by_id, num_pages, len(request.output)))

    def ended(self, request: Request, reason: FinishReason, error_code: str = "") -> None:
        """See `Ended`."""
        self.notes.append(Ended(request.request_id, reason, len(request.output), error_code))

    def refused(self, request_id: int, error_code: str) -> None:
        """A request was answered with an error instead of being added."""
        self.notes.append(Ended(request_id, FinishReason.ERROR, 0, error_code))


def _figures_of_pages(holdings: Holdings, running: Sequence[Request]) -> dict[str, int]:
    """What the first request of the queue lacks, and who has it."""
    lacking = holdings.lacking
    if lacking.window:
        return {
            "needed_pages": lacking.needed_pages,
            "free_pages": max(lacking.available_pages - lacking.reserved_pages, 0),
            "reserved_pages": min(lacking.reserved_pages, lacking.available_pages),
            "window": lacking.window,
            "running": len(running),
        }
    held_pages = [len(request.lease.page_ids) for request in running]
    most = [max(held_pages)] if held_pages else []
    if len(held_pages) > 1:
        held_pages.remove(most[0])
        most.append(max(held_pages))
    return {
        "needed_pages": lacking.needed_pages,
        "free_pages": max(lacking.available_pages - lacking.reserved_pages, 0),
        "reserved_pages": min(lacking.reserved_pages, lacking.available_pages),
        "pages": holdings.num_pages,
        "holders": len(most),
        "held_pages": min(sum(most), holdings.num_pages),
        "running": len(running),
    }


def _figures_of_budget(running: Sequence[Request], chunks: Sequence[Chunk]) -> dict[str, int]:
    """How many prompt tokens the step computes, and the longest rest of a prompt among the running ones."""
    rests = [len(one.feed) - one.num_planned_tokens for one in running]
    rest = max(rests, default=0)
    longest = running[rests.index(rest)].request_id if rests else -1
    num_tokens = sum(chunk.num_new_tokens for chunk in chunks)
    figures = {"step_tokens": num_tokens}
    return figures | ({"longest": longest, "longest_rest_tokens": rest} if rest > 0 else {})
