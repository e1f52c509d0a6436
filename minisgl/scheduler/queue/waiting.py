"""The queue of waiting requests: decides which of them gets a row next, and whether it fits.

Promise: a user's requests are admitted by seniority, except that one of the same priority with a longer
cached prefix may pass the first (`policy.choose_waiting`). Users take turns by the service that they have had
(`shares.goes_first`). A request that does not fit holds up all others.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import chain, islice, takewhile, zip_longest

import numpy as np

from minisgl.kvcache.radix_tree import Match
from minisgl.lives import WaitReason
from minisgl.request import Request
from minisgl.scheduler.holdings import Holdings
from minisgl.scheduler.logprobs import PromptLogprobs
from minisgl.scheduler.queue.policy import PREFIX_WINDOW, by_seniority, choose_waiting
from minisgl.scheduler.queue.shares import Account, Shares, goes_first
from minisgl.scheduler.rules import MAX_RULES_COST_PER_STEP


class WaitingQueue:
    """The waiting requests. It writes a request's `num_times_skipped` and lifts accounts, nothing else."""

    def __init__(self, holdings: Holdings, prompt_logprobs: PromptLogprobs, shares: Shares) -> None:
        self._holdings = holdings
        self._shares = shares
        self._prompt_logprobs = prompt_logprobs
        # Of each user that has any, the most senior first.
        self._queues: dict[Account, list[Request]] = {}
        self._last_left: Account | None = None  # of the user whose queue became empty last
        # The last request that did not fit: its id, and the pages that were available.
        self._blocked: tuple[int, object] | None = None
        # What the last admission found cached, by the id of the array that it searched for.
        self._found: dict[int, tuple[np.ndarray, Match]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests; those of each user by seniority."""
        return chain.from_iterable(self._queues.values())

    def add(self, request: Request) -> None:
        account: Account = request.account
        queue = self._queues.get(account)
        if queue is None:
            if self._queues:
                account.lift(min(other.service for other in self._queues))
            elif self._last_left is not None:
                account.lift(self._last_left.service)
            queue = self._queues[account] = []
        insort(queue, request, key=by_seniority)

    def remove(self, request: Request) -> None:
        queue = self._queues[request.account]
        queue.remove(request)
        if not queue:
            del self._queues[request.account]
            self._last_left = request.account

    @property
    def head(self) -> Request:
        """The request that is next; there must be one."""
        heads = [queue[0] for queue in self._queues.values()]
        return heads[0] if len(heads) == 1 else goes_first(heads)

    @property
    def has_no_room(self) -> bool:
        """Whether the next request has to wait until a running one leaves or a page comes free."""
        return bool(self._queues) and self.held_by in ("rows", "share", "pages")

    @property
    def held_by(self) -> WaitReason | None:
        """What keeps the next request from a row in this step; None = nothing that is known before a try.

        Pages do if it did not fit and none came free since; rules do if the step's new ones cost enough.
        """
        num_free = self._holdings.num_free_rows
        if not num_free:
            return "rows"
        head = self.head
        if not self._shares.may_take_row(head, num_free, self._holdings.max_rows):
            return "share"
        if self._blocked == (head.request_id, self._holdings.availability):
            return "pages"
        if self._holdings.new_rules_cost_tokens >= MAX_RULES_COST_PER_STEP:
            return "rules"
        return None

    @property
    def may_admit(self) -> bool:
        """Whether a waiting request may get a row in this step."""
        return bool(self._queues) and self.held_by is None

    def in_turns(self) -> list[Request]:
        """About the order in which they get rows, if users take turns."""
        return list(self._turns())

    def next_few(self) -> Iterator[Request]:
        """About the next `PREFIX_WINDOW` requests to get rows."""
        return islice(self._turns(), PREFIX_WINDOW)

    def admit_next(self, pages_still_needed: int | None) -> Request | None:
        """Take out the next request, with a row and its cached prefix; None = none can be admitted.

        Args:
            pages_still_needed: pages that the running requests still need; None = no request runs, so the
                first one is admitted in any case.
        """
        if not self.may_admit:
            return None
        head = self.head
        # The first ones of its user up to another priority: with age, priorities may alternate.
        first = self._queues[head.account][:PREFIX_WINDOW]
        window = list(takewhile(lambda r: r.priority == head.priority, first))
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
                self.remove(request)
                return request
        self._blocked = (head.request_id, self._holdings.availability)
        return None

    def check_invariants(self) -> None:
        """Recompute what holds between two calls; for tests.

        Raises:
            AssertionError: names the broken promise.
        """
        for account, queue in self._queues.items():
            assert queue, "a user without requests has a queue"
            assert queue == sorted(queue, key=by_seniority), "a queue is out of order"
            assert all(request.account is account for request in queue), "a request is in another's queue"

    def _turns(self) -> Iterator[Request]:
        rounds = zip_longest(*self._queues.values())
        return (request for requests in rounds for request in requests if request is not None)

    def _find(self, parts: Sequence[np.ndarray], salts: Sequence[str]) -> list[Match]:
        """The cached prefix of each array. Choices of a prompt share array and salt: it is searched once."""
        before, self._found = self._found, {}
        for part, salt in zip(parts, salts, strict=True):
            if id(part) not in self._found:
                _, earlier = before.get(id(part), (part, None))
                self._found[id(part)] = (part, self._holdings.find(part, earlier, salt))
        return [self._found[id(part)][1] for part in parts]
