"""Tracks which request holds which row and pages, and collects the table updates for the next plan.

Promise: a row and a lease belong to one request from `try_admit` to `release`. The updates name each
entry of the device's tables once, and name no row that has changed hands since.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from minisgl.kvcache.grouped_manager import Cache, GroupedCacheManager
from minisgl.kvcache.manager import Lease
from minisgl.kvcache.radix_tree import Match
from minisgl.request import Request, RequestState
from minisgl.scheduler.plan import LogitRules, PageUpdate, RowInit, RowRules, StateCopies
from minisgl.scheduler.queue.policy import pages_for
from minisgl.scheduler.rules import rules_with_output


class TableUpdates(NamedTuple):
    """The entries that the next plan writes to the device's tables."""

    row_inits: tuple[RowInit, ...]
    row_rules: tuple[RowRules, ...]
    page_updates: tuple[PageUpdate, ...]
    state_copies: StateCopies


class Lacking(NamedTuple):
    """Why a request did not fit, in pages of the group that lacks them."""

    needed_pages: int = 0  # of its own, beside its cached prefix
    reserved_pages: int = 0  # that the running requests still need
    available_pages: int = 0
    window: int = 0  # of the group; 0 = the pages of all tokens


class Holdings:
    """Hands out rows and pages. It alone writes a request's row, lease and decode_limit.

    Args:
        output_reserve_tokens: tokens that `try_admit` reserves for the output of each request.
    """

    def __init__(self, cache: Cache, max_rows: int, output_reserve_tokens: int) -> None:
        self._cache = cache
        self._groups = cache if isinstance(cache, GroupedCacheManager) else None
        self.page_size = cache.page_size
        self.max_rows = max_rows
        self._output_reserve_tokens = output_reserve_tokens
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._row_inits: list[RowInit] = []
        self._page_updates: list[PageUpdate] = []
        self._row_rules: dict[int, tuple[LogitRules, list[int]]] = {}  # key: id(rules)
        self._state_saves: list[tuple[int, int]] = []
        self._state_loads: dict[int, int] = {}  # by row: the snapshot's slot
        self.new_rules_cost_tokens = 0
        """Cost of writing the collected rules (`LogitRules.cost_tokens`)."""
        self.num_with_extras = 0
        """Requests with a row that need more than plain sampling (`Request.has_extras`)."""
        self.lacking = Lacking()
        """What the last request that did not fit lacked."""

    @property
    def num_rows(self) -> int:
        """Rows that requests hold now."""
        return self.max_rows - len(self._free_rows)

    @property
    def num_pages(self) -> int:
        """Pages of the pool that requests can use."""
        return self._cache.num_usable_pages

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or evictable."""
        return self._cache.num_free_pages + self._cache.num_evictable_pages

    @property
    def availability(self) -> object:
        """Equal to an earlier value if the same numbers of pages are available in all groups."""
        return self.num_available_pages if self._groups is None else self._groups.availability

    def find(self, matchable: np.ndarray, earlier: Match | None, salt: str) -> Match:
        """Find the cached prefix that `try_admit` would use now.

        Args:
            matchable: the part of a feed that may come from the cache, int32 [tokens].
            earlier: what this found last for the same array and salt, so that it compares no token twice.
            salt: the request's `cache_salt`.
        """
        return self._cache.find(matchable, earlier, salt)

    def pages_still_needed(self, running: Iterable[Request]) -> int:
        """Pages that these requests still need for the rest of their feeds and their reserved output."""
        return sum(
            self._pages_still_needed(request, request.num_planned_tokens, len(request.lease.page_ids))
            for request in running
        )

    def needs_half_of_the_pool(self, request: Request) -> bool:
        """Whether an admission of the request needs more than half of all pages, cached ones included."""
        return 2 * self._pages_still_needed(request, 0, 0) > self._cache.num_usable_pages

    def try_admit(
        self, request: Request, matchable: np.ndarray, found: Match, pages_still_needed: int | None
    ) -> bool:
        """Give a request a row and its cached prefix, if its other pages fit beside the running requests.

        Args:
            matchable: the part of its feed that may come from the cache, int32 [tokens].
            found: what `find` found last for it.
            pages_still_needed: `pages_still_needed` of all running requests; None = admit it in any case.

        Returns:
            Whether the request was admitted; if not, nothing has changed.
        """
        lease = self._lease_if_it_fits(request, matchable, found, pages_still_needed)
        if lease is None:
            return False
        request.lease = lease
        request.uses_shared_pages = bool(lease.page_ids)
        request.row = self._free_rows.pop()
        request.account.num_rows += 1
        request.num_planned_tokens = len(lease.page_ids) * self.page_size
        request.decode_limit = 0
        self._row_inits.append(_row_init(request))
        if request.rules is not None:
            self._add_rules(request.row, rules_with_output(request.rules, request.output))
        if lease.page_ids:
            self._update_pages(request, 0, lease.page_ids)
            self._load_state(request)
        self.num_with_extras += request.has_extras
        return True

    def capacity_tokens(self, request: Request) -> int:
        """Tokens that the request could hold if it got every page that is available and not promised."""
        if self._groups is not None:
            self._groups.advance(request.lease, request.num_planned_tokens)
            return self._groups.most_pages(request.lease) * self.page_size
        return (len(request.lease.page_ids) + self.num_available_pages) * self.page_size

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Get pages for the request's first `num_tokens` tokens; False = too few pages, nothing changed."""
        if self._groups is not None:
            self._groups.advance(request.lease, request.num_planned_tokens)
            slot = self._groups.save_state(request.lease, request.num_planned_tokens, len(request.feed))
            if slot is not None:
                self._state_saves.append((request.row, slot))
        grown = self._cache.grow(request.lease, num_tokens)
        if grown is None:
            return False
        first_index, page_ids = grown
        if page_ids:
            self._update_pages(request, first_index, page_ids)
        capacity = len(request.lease.page_ids) * self.page_size
        request.decode_limit = (
            min(capacity, request.max_fed_tokens) if request.state is RequestState.DECODE else 0
        )
        return True

    def extend_match(self, request: Request, matchable: np.ndarray) -> None:
        """Use pages that were cached since the request was admitted, instead of computing their tokens.

        While the request's last page is partly filled, nothing changes.

        Args:
            matchable: as in `try_admit`.
        """
        first_index = len(request.lease.page_ids)
        if request.num_planned_tokens != first_index * self.page_size:
            return
        page_ids = self._cache.extend_match(request.lease, matchable)
        if page_ids:
            request.uses_shared_pages = True
            request.num_planned_tokens += len(page_ids) * self.page_size
            self._update_pages(request, first_index, page_ids)
            self._load_state(request)

    def end_of_chunk(self, request: Request, end: int) -> int:
        """Where the request's next chunk, of up to `end` tokens, should end."""
        if self._groups is None:
            return end
        return self._groups.end_of_chunk(request.lease, len(request.feed), request.num_planned_tokens, end)

    def save_inside(self, request: Request, end: int) -> tuple[int, int] | None:
        """The `Chunk.snapshot` of a chunk up to `end`, for which the request has its pages."""
        if self._groups is None:
            return None
        start = request.num_planned_tokens
        return self._groups.save_inside(request.lease, len(request.feed), start, end)

    @property
    def keeps_snapshots(self) -> bool:
        """Whether prefix hits need snapshots of states, and some may be kept."""
        return self._groups is not None and self._groups.keeps_snapshots

    def coming_snapshots(self, request: Request) -> Sequence[int]:
        """Where, in tokens, later plans may begin rows with a snapshot of this one, but this plan can't."""
        assert self._groups is not None
        return self._groups.coming_snapshots(request.lease, len(request.feed), request.num_planned_tokens)

    def want_snapshot(self, request: Request, end: int) -> bool:
        """Let the request's row be saved at `end`, because other prompts branch off there, if it can be."""
        assert self._groups is not None
        return self._groups.want_snapshot(request.lease, len(request.feed), end)

    def share(self, request: Request) -> None:
        """Put the planned tokens' full pages into the tree; the step being planned computes them."""
        self._cache.share(request.lease, request.feed, request.num_planned_tokens)

    def commit(self, request: Request, num_fed: int) -> None:
        """Put the full pages of the first `num_fed` computed tokens into the tree.

        Where the tree already has a page for the same tokens, the request uses that page from now on.
        """
        for index, page_id in self._cache.commit(request.lease, request.feed, num_fed):
            request.uses_shared_pages = True
            self._update_pages(request, index, array("i", [page_id]))

    def invalidate(self, request: Request) -> None:
        """Remove the request's pages from the cache's matches, because their keys and values may be wrong."""
        self._cache.invalidate(request.lease)

    def release(self, request: Request) -> None:
        """Take row and pages from a request without a step in flight; its computed pages stay cached."""
        tokens = request.tokens()
        self._cache.release(request.lease, tokens, min(request.num_planned_tokens, len(tokens)))
        self._row_inits = [init for init in self._row_inits if init.row != request.row]
        self._page_updates = [update for update in self._page_updates if update.row != request.row]
        self._state_loads.pop(request.row, None)
        self._drop_rules(request.row)
        self._free_rows.append(request.row)
        request.account.num_rows -= 1
        self.num_with_extras -= request.has_extras
        request.lease = None
        request.row = -1

    def drain_updates(self) -> TableUpdates:
        """Return the updates collected since the last call, and clear them."""
        row_rules = tuple(RowRules(tuple(rows), rules) for rules, rows in self._row_rules.values())
        loads = tuple((slot, row) for row, slot in self._state_loads.items())
        copies = StateCopies(tuple(self._state_saves), loads)
        updates = TableUpdates(tuple(self._row_inits), row_rules, tuple(self._page_updates), copies)
        if self._groups is not None:
            self._groups.planned()
            self._state_saves.clear()
            self._state_loads.clear()
        self._row_inits.clear()
        self._row_rules.clear()
        self.new_rules_cost_tokens = 0
        self._page_updates.clear()
        return updates

    def check_invariants(self, holders: Collection[Request]) -> None:
        """Recompute every invariant, given all requests that hold a row or pages; for tests.

        Raises:
            AssertionError: names the broken promise.
        """
        self._cache.check_invariants()
        rows = sorted([request.row for request in holders] + self._free_rows)
        assert rows == list(range(self.max_rows)), f"rows lost or held twice: {rows}"
        for request in holders:
            assert request.lease is not None, "a request with a row has no lease"
        with_extras = sum(request.has_extras for request in holders)
        assert self.num_with_extras == with_extras, "num_with_extras is off"
        cost_tokens = sum(rules.cost_tokens for rules, _ in self._row_rules.values())
        assert self.new_rules_cost_tokens == cost_tokens, "new_rules_cost_tokens is off"

    def _update_pages(self, request: Request, first_index: int, page_ids: array) -> None:
        """Collect the row's new page-table entries, which begin at `first_index`."""
        if self._groups is None:
            self._page_updates.append(PageUpdate(request.row, first_index, page_ids.tobytes()))
            return
        for group, index, ids in self._groups.tables(request.lease, first_index, len(page_ids)):
            self._page_updates.append(PageUpdate(request.row, index, ids.tobytes(), group))

    def _load_state(self, request: Request) -> None:
        """Let the request's row begin with the state behind its cached prefix, if the model has states."""
        slot = None if self._groups is None else self._groups.first_state(request.lease)
        if slot is not None:
            self._state_loads[request.row] = slot

    def _add_rules(self, row: int, rules: LogitRules) -> None:
        if id(rules) not in self._row_rules:
            self._row_rules[id(rules)] = (rules, [])
            self.new_rules_cost_tokens += rules.cost_tokens
        self._row_rules[id(rules)][1].append(row)

    def _drop_rules(self, row: int) -> None:
        """Of a row that is given back before its rules were written."""
        for key, (rules, rows) in self._row_rules.items():
            if row in rows:
                rows.remove(row)
                if not rows:
                    del self._row_rules[key]
                    self.new_rules_cost_tokens -= rules.cost_tokens
                return

    def _lease_if_it_fits(
        self, request: Request, matchable: np.ndarray, found: Match, pages_still_needed: int | None
    ) -> Lease | None:
        lease = self._cache.admit(
            matchable, earlier=found, is_shareable=not request.is_isolated, salt=request.cache_salt
        )
        lacking = None
        if self._groups is not None:
            lacking = self._groups.reserve(lease, self._reserved_tokens(request, 0))
        if pages_still_needed is not None:
            own = self._pages_still_needed(request, 0, len(lease.page_ids))
            available = self.num_available_pages
            if pages_still_needed + own > available:
                lacking = (own, pages_still_needed, available)
            if lacking is not None:
                self.lacking = Lacking(*lacking)
                self._cache.release(lease, request.feed, len(lease.page_ids) * self.page_size)
                return None
        return lease

    def _pages_still_needed(self, request: Request, num_planned_tokens: int, num_held_pages: int) -> int:
        """Pages that a request still needs for the rest of its feed and the reserved part of its output."""
        tokens = self._reserved_tokens(request, num_planned_tokens)
        return max(pages_for(tokens, self.page_size) - num_held_pages, 0)

    def _reserved_tokens(self, request: Request, num_planned_tokens: int) -> int:
        """The tokens of a request's feed and of the reserved part of its output."""
        fed = max(num_planned_tokens, len(request.feed))
        remaining = request.max_fed_tokens - fed
        return fed + min(remaining, self._output_reserve_tokens)


def _row_init(request: Request) -> RowInit:
    """The initial sampling state of the request's new row."""
    params = request.params
    return RowInit(
        request.row, params.temperature, max(params.top_k, 0), params.top_p, params.min_p, request.seed
    )
