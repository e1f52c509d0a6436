"""Who holds which row and which pages, and the news of both for the next plan.

Promise: a row and a lease belong to one request from `take` to `give_back`. The news name each entry of the
device's tables once, and nothing of a row that has changed hands since.
"""

from collections.abc import Collection, Iterable

import numpy as np

from minisgl.kvcache.manager import KVCacheManager, Lease
from minisgl.request import Request, RequestState
from minisgl.scheduler.plan import LogitRules, PageUpdate, RowInit
from minisgl.scheduler.policy import pages_for


class Holdings:
    """Hands out rows and pages; the only writer of a request's row, lease and decode_limit.

    Args:
        output_reserve_tokens: room that `take` leaves for the output of each request.
    """

    def __init__(self, cache: KVCacheManager, max_rows: int, output_reserve_tokens: int) -> None:
        self._cache = cache
        self._page_size = cache.page_size
        self._max_rows = max_rows
        self._output_reserve_tokens = output_reserve_tokens
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._row_inits: list[RowInit] = []
        self._page_updates: list[PageUpdate] = []
        self.num_with_extras = 0
        """Requests with a row that do more than sample."""

    @property
    def num_rows(self) -> int:
        """Rows that were handed out and have not come back."""
        return self._max_rows - len(self._free_rows)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or can be evicted."""
        return self._cache.num_free_pages + self._cache.num_evictable_pages

    def match_length(self, tokens: np.ndarray) -> int:
        """How many of the tokens, int32 [tokens], are cached."""
        return self._cache.match_length(tokens)

    def pages_to_come(self, running: Iterable[Request]) -> int:
        """Pages that these requests will still take: for the rest of their feeds and some output of each."""
        return sum(
            self._pages_to_come(request, request.num_planned_tokens, len(request.lease.page_ids))
            for request in running
        )

    def take(self, request: Request, matchable: np.ndarray, pages_to_come: int | None) -> bool:
        """Give a request a row and its cached prefix, if the rest fits beside what the running ones need.

        Args:
            matchable: the part of its feed that may come from the cache, int32 [tokens].
            pages_to_come: `pages_to_come` of all that run; None = whatever it needs, it gets in.
        """
        lease = self._lease_if_it_fits(request, matchable, pages_to_come)
        if lease is None:
            return False
        request.lease = lease
        request.row = self._free_rows.pop()
        request.num_planned_tokens = len(lease.page_ids) * self._page_size
        request.decode_limit = 0
        self._row_inits.append(_row_init(request))
        if lease.page_ids:
            self._page_updates.append(PageUpdate(request.row, 0, tuple(lease.page_ids)))
        self.num_with_extras += request.changes_logits or request.wants_logprobs
        return True

    def room_tokens(self, request: Request) -> int:
        """The most tokens the request could have, with all pages that are available."""
        return (len(request.lease.page_ids) + self.num_available_pages) * self._page_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Get the pages for `num_tokens` tokens; False = there are not enough, nothing changed."""
        grown = self._cache.grow(request.lease, num_tokens)
        if grown is None:
            return False
        first_index, page_ids = grown
        if page_ids:
            self._page_updates.append(PageUpdate(request.row, first_index, page_ids))
        capacity = len(request.lease.page_ids) * self._page_size
        request.decode_limit = (
            min(capacity, request.last_fed_tokens) if request.state is RequestState.DECODE else 0
        )
        return True

    def commit(self, request: Request, num_fed: int) -> None:
        """So much of the feed is in the pool: share its full pages, and use the tree's where it has them."""
        for index, page_id in self._cache.commit(request.lease, request.feed, num_fed):
            self._page_updates.append(PageUpdate(request.row, index, (page_id,)))

    def give_back(self, request: Request) -> None:
        """Take row and pages from a request that no launched step uses; what was computed stays cached."""
        tokens = request.tokens()
        self._cache.release(request.lease, tokens, min(request.num_planned_tokens, len(tokens)))
        self._row_inits = [init for init in self._row_inits if init.row != request.row]
        self._page_updates = [update for update in self._page_updates if update.row != request.row]
        self._free_rows.append(request.row)
        self.num_with_extras -= request.changes_logits or request.wants_logprobs
        request.lease = None
        request.row = -1

    def take_news(self) -> tuple[tuple[RowInit, ...], tuple[PageUpdate, ...]]:
        """What has changed since the last call."""
        news = tuple(self._row_inits), tuple(self._page_updates)
        self._row_inits.clear()
        self._page_updates.clear()
        return news

    def check_invariants(self, holders: Collection[Request]) -> None:
        """Recompute what must hold if these requests hold all that is held; for tests.

        Raises:
            AssertionError: names the broken promise.
        """
        self._cache.check_invariants()
        rows = sorted([request.row for request in holders] + self._free_rows)
        assert rows == list(range(self._max_rows)), f"rows lost or held twice: {rows}"
        for request in holders:
            assert request.lease is not None, "a request with a row has no lease"
        with_extras = sum(request.changes_logits or request.wants_logprobs for request in holders)
        assert self.num_with_extras == with_extras, "num_with_extras is off"

    def _lease_if_it_fits(
        self, request: Request, matchable: np.ndarray, pages_to_come: int | None
    ) -> Lease | None:
        lease = self._cache.admit(matchable)
        if pages_to_come is not None:
            needed = pages_to_come + self._pages_to_come(request, 0, len(lease.page_ids))
            if needed > self.num_available_pages:
                self._cache.release(lease, request.feed, len(lease.page_ids) * self._page_size)
                return None
        return lease

    def _pages_to_come(self, request: Request, num_planned_tokens: int, num_held_pages: int) -> int:
        """Pages a request will still take: for the rest of its feed and an estimate of its output."""
        fed = max(num_planned_tokens, len(request.feed))
        remaining = request.last_fed_tokens - fed
        tokens = fed + min(remaining, self._output_reserve_tokens)
        return max(pages_for(tokens, self._page_size) - num_held_pages, 0)


def _row_init(request: Request) -> RowInit:
    """The sampling state of a row that the request now gets."""
    params = request.params
    rules = None
    if request.changes_logits:
        rules = LogitRules(
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=tuple((params.logit_bias or {}).items()),
            allowed_token_ids=params.allowed_token_ids,
            bad_words_ids=params.bad_words_ids,
            stop_ids=tuple(request.stop_ids) if params.min_tokens else (),
            min_len=len(request.prompt) + params.min_tokens,
            prompt=request.prompt.tobytes(),
            output=np.array(request.output, dtype=np.int32).tobytes(),
        )
    return RowInit(
        request.row,
        params.temperature,
        max(params.top_k, 0),
        params.top_p,
        params.min_p,
        request.seed,
        rules,
    )
