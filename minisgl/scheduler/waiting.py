"""The queue of waiting requests: decides which of them gets a row next, and whether it fits.

Promise: requests are admitted by seniority, except that one of the same priority with a longer cached prefix
may pass the first (`policy.choose_waiting`). A request that does not fit holds up those behind it.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np

from minisgl.kvcache.radix_tree import Match
from minisgl.lives import WaitReason
from minisgl.request import Request
from minisgl.scheduler.holdings import Holdings
from minisgl.scheduler.logprobs import PromptLogprobs
from minisgl.scheduler.policy import PREFIX_WINDOW, by_seniority, choose_waiting
from minisgl.scheduler.rules import MAX_RULES_COST_PER_STEP


class WaitingQueue:
    """The waiting requests, the most senior first. It writes a request's `num_times_skipped` only."""

    def __init__(self, holdings: Holdings, prompt_logprobs: PromptLogprobs) -> None:
        self._holdings = holdings
        self._prompt_logprobs = prompt_logprobs
        self._requests: list[Request] = []
        # The last request that did not fit: its id, and the pages that were available.
        self._blocked: tuple[int, int] | None = None
        # What the last admission found cached, by the id of the array that it searched for.
        self._found: dict[int, tuple[np.ndarray, Match]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=by_seniority)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    @property
    def head(self) -> Request:
        """The first request; there must be one."""
        return self._requests[0]

    @property
    def held_by(self) -> WaitReason | None:
        """What keeps the first request from a row in this step; None = nothing that is known before a try.

        Pages do if it did not fit and none came free since; rules do if the step's new ones cost enough.
        """
        if not self._holdings.has_free_row:
            return "rows"
        if self._blocked == (self._requests[0].request_id, self._holdings.num_available_pages):
            return "pages"
        if self._holdings.new_rules_cost_tokens >= MAX_RULES_COST_PER_STEP:
            return "rules"
        return None

    @property
    def may_admit(self) -> bool:
        """Whether a waiting request may get a row in this step."""
        return bool(self._requests) and self.held_by is None

    def admit_next(self, pages_still_needed: int | None) -> Request | None:
        """Take out the next request, with a row and its cached prefix; None = none can be admitted.

        Args:
            pages_still_needed: pages that the running requests still need; None = no request runs, so the
                first one is admitted in any case.
        """
        if not self.may_admit:
            return None
        head = self._requests[0]
        # The first ones up to another priority: with age, priorities may alternate.
        window = list(takewhile(lambda r: r.priority == head.priority, self._requests[:PREFIX_WINDOW]))
        parts = [self._prompt_logprobs.matchable_tokens(request) for request in window]
        matches = self._find(parts, [request.cache_salt for request in window])
        index = choose_waiting([match.num_pages for match in matches], head.num_times_skipped)
        # If the chosen one needs more room than there is, the head must not wait for it.
        for candidate in (index, 0) if index else (0,):
            request = window[candidate]
            if self._holdings.try_admit(request, parts[candidate], matches[candidate], pages_still_needed):
                self._blocked = None
                if candidate:
                    head.num_times_skipped += 1
                del self._requests[candidate]
                return request
        self._blocked = (head.request_id, self._holdings.num_available_pages)
        return None

    def _find(self, parts: Sequence[np.ndarray], salts: Sequence[str]) -> list[Match]:
        """The cached prefix of each array. Choices of a prompt share array and salt: it is searched once."""
        before, self._found = self._found, {}
        for part, salt in zip(parts, salts, strict=True):
            if id(part) not in self._found:
                _, earlier = before.get(id(part), (part, None))
                self._found[id(part)] = (part, self._holdings.find(part, earlier, salt))
        return [self._found[id(part)][1] for part in parts]
