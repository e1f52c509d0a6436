"""Lets a prompt wait for the snapshot that another one is about to leave, instead of computing it again.

Promise: a request waits only in plans that compute a part of the other prompt, or while the step with that
one's end is in flight. So its wait ends with that prompt, however that ends, and where a plan stays empty
because of it, a step before it is in flight. It keeps its row and its turn meanwhile.

Models without states need no such rule: a request reads pages in the step that computes them.
"""

from collections.abc import Iterable

import numpy as np

from minisgl.request import Request, RequestState
from minisgl.scheduler.holdings import Holdings
from minisgl.scheduler.logprobs import PromptLogprobs

MOST_LEADERS = 2
"""For how many others a request waits, one after the other. If they end early, it computes its prompt."""
LEAST_SHARE = 8
"""Where several wait for one snapshot and save `least_saved_tokens` together, each saves an eighth of it."""


class _Wait:
    """Of a request that has a row and has computed nothing since."""

    __slots__ = ("end", "leader", "num_leaders")

    def __init__(self) -> None:
        self.leader: Request | None = None  # for whose snapshot it waits
        self.end = 0  # where that snapshot will be, in tokens
        self.num_leaders = 0


class SnapshotWaits:
    """The requests that may wait, and the prompts being computed that they may wait for.

    Args:
        least_saved_tokens: prompt tokens that a wait must save (`SchedulerConfig`).
    """

    def __init__(self, holdings: Holdings, prompt_logprobs: PromptLogprobs, least_saved_tokens: int) -> None:
        self._holdings = holdings
        self._prompt_logprobs = prompt_logprobs
        self._least = least_saved_tokens
        self._least_of_one = max(least_saved_tokens // LEAST_SHARE, 1)
        self._waits: dict[Request, _Wait] = {}
        self._computing: dict[Request, None] = {}
        self._branches: dict[Request, int] = {}  # where those that followed requests save enough together

    def __contains__(self, request: Request) -> bool:
        """Whether the request may wait: it was admitted and has computed nothing since."""
        return request in self._waits

    def start_plan(self, prefilling: Iterable[Request]) -> None:
        """Begin a new plan.

        Args:
            prefilling: the requests with a row whose prompts are not computed yet.
        """
        waits, self._waits = self._waits, {}
        branches, self._branches = self._branches, {}
        self._computing = {}
        for request in prefilling:
            if request in waits:
                self._waits[request] = waits[request]
            else:
                self._computing[request] = None
            if request in branches:
                self._branches[request] = branches[request]
        for wait in self._waits.values():
            if wait.leader is not None and self.is_ending(wait.leader):
                self._computing[wait.leader] = None

    def is_ending(self, leader: Request) -> bool:
        """Whether its prompt is planned to the end; its last step may be in flight."""
        return leader.state is RequestState.DECODE and leader.lease is not None

    def admit(self, request: Request, following: Iterable[Request]) -> None:
        """A request has got a row. It is saved where `following` ones branch off, if that saves enough."""
        self._waits[request] = _Wait()
        start = request.num_planned_tokens
        last = max(self._holdings.coming_snapshots(request), default=0)
        ends = [min(self._shared_tokens(request, other), last) for other in following]
        ends = sorted([end for end in ends if end >= start + self._least_of_one], reverse=True)
        saved = [number * (end - start) for number, end in enumerate(ends, 1)]
        if saved and max(saved) >= self._least:
            end = ends[saved.index(max(saved))]
            if self._holdings.want_snapshot(request, end):
                self._branches[request] = end

    def begin(self, request: Request) -> bool:
        """The request's first chunk is planned. Returns whether it has waited."""
        self._computing[request] = None
        return self._waits.pop(request).num_leaders > 0

    def leader(self, request: Request) -> Request | None:
        """For whom to wait: as before, if that goes on, else for whose snapshot saves the most tokens."""
        wait = self._waits[request]
        if self.goes_on(request):
            return wait.leader
        start = request.num_planned_tokens
        found: Request | None = None
        best = start
        for other in self._computing:
            # One that is behind would take longer than this request itself.
            if other.num_planned_tokens >= start:
                for end in self._holdings.coming_snapshots(other):
                    if end > best and self._is_worth_it(request, other, end):
                        found, best = other, end
        if found is not None and found is not wait.leader:
            if wait.num_leaders == MOST_LEADERS:
                return None
            wait.num_leaders += 1
        wait.leader, wait.end = found, best
        return found

    def goes_on(self, request: Request) -> bool:
        """Whether the snapshot of the last `leader` is still to come."""
        wait = self._waits[request]
        if wait.leader is None or wait.leader not in self._computing:
            return False
        is_needed = wait.end > request.num_planned_tokens  # not if it found another one on its way
        return is_needed and wait.end in self._holdings.coming_snapshots(wait.leader)

    def _is_worth_it(self, request: Request, other: Request, end: int) -> bool:
        """Whether `request` may begin with a snapshot of `other` at `end`, and that saves enough."""
        saved = end - request.num_planned_tokens
        if saved < self._least:
            is_one_of_several = end == self._branches.get(other)
            if not is_one_of_several or saved < self._least_of_one:
                return False
        if end > self._longest_hit(request) or request.cache_salt != other.cache_salt or request.is_isolated:
            return False
        if request.feed is other.feed:
            return True
        is_same_end = request.feed[end - 1] == other.feed[end - 1]
        return bool(is_same_end) and np.array_equal(request.feed[:end], other.feed[:end])

    def _shared_tokens(self, request: Request, other: Request) -> int:
        """The last page end of `request` where a hit of `other` could end."""
        end, few = min(self._longest_hit(other), len(request.feed)), self._least_of_one
        if end < few or request.cache_salt != other.cache_salt or other.is_isolated:
            return 0
        if request.feed is not other.feed:
            if not np.array_equal(request.feed[:few], other.feed[:few]):
                return 0
            differs = request.feed[:end] != other.feed[:end]
            first = int(differs.argmax())
            if differs[first]:
                end = first
        return end // self._holdings.page_size * self._holdings.page_size

    def _longest_hit(self, request: Request) -> int:
        """The last page end where a prefix hit of the request may end."""
        most = len(self._prompt_logprobs.matchable_tokens(request)) - 1
        return max(most, 0) // self._holdings.page_size * self._holdings.page_size
