"""Decides which request may use which page: admit, grow, share, commit, invalidate, release.

Promise: at any moment every usable page is free, owned by exactly one lease, or in the radix tree once; and a
page that a lease can reach is never evicted.

The manager moves page ids, never keys or values. The caller has two duties: release a lease only when no step
in flight uses it, and write the pages that `commit` exchanges to the row's page table before any later step,
because the old pages may have another owner by then.
"""

from array import array
from dataclasses import dataclass

import numpy as np

from minisgl.errors import ConfigError
from minisgl.kvcache.page_allocator import SCRATCH_PAGE, BrokenInvariantError, PageAllocator
from minisgl.kvcache.page_changes import PageChange, PageChanges
from minisgl.kvcache.radix_tree import Match, Node, RadixTree, TokenIds, Tokens, int32_tokens

_NO_TOKENS: Tokens = np.empty(0, np.int32)


class LeaseError(Exception):
    """A lease was used after its release, with another manager, or with impossible token counts."""


@dataclass(eq=False, slots=True)
class Lease:
    """The right of one request to use its pages, released exactly once. Only the manager writes to it.

    The first `num_tree_pages` of `page_ids` are in the tree and locked; this lease owns the others.
    """

    page_ids: array
    """int32; page i holds the tokens from i * page_size on; empty after the release."""
    num_cached_tokens: int
    """Tokens found in the tree at admission: whole pages, fewer than the prompt has."""
    num_tree_pages: int
    node: Node
    """The tree node where the lease's tree pages end; the lease holds a lock on it."""
    is_shareable: bool = True
    """Whether other requests may use its keys and values."""


class KVCacheManager:
    """The pages of one pool and the prefixes cached in them.

    Args:
        num_pages: pages of the whole pool; page 0 is the scratch page and is never handed out.
        page_size: tokens per page.
        prefix_cache: False = no page is shared or kept after a release.
        notes_changes: `take_changes` tells which prefixes are cached. False = it tells nothing.

    Raises:
        ConfigError: there are fewer than two pages, or a page has no tokens.
    """

    def __init__(
        self, *, num_pages: int, page_size: int, prefix_cache: bool = True, notes_changes: bool = False
    ) -> None:
        if page_size < 1:
            raise ConfigError(
                f"the page size must be at least 1 token, got {page_size}; 16 suits most models"
            )
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.allocator = PageAllocator(num_pages)
        self._changes = PageChanges() if notes_changes else None
        self.tree = RadixTree(page_size, self._changes)
        self._leases: dict[Lease, None] = {}

    @property
    def num_usable_pages(self) -> int:
        return self.allocator.num_usable_pages

    @property
    def num_free_pages(self) -> int:
        return self.allocator.num_free_pages

    @property
    def num_evictable_pages(self) -> int:
        """Tree pages that no lease has locked; `grow` evicts them when too few pages are free."""
        return self.tree.num_unlocked_pages

    @property
    def num_cached_pages(self) -> int:
        return self.tree.num_pages

    def find(self, token_ids: TokenIds, earlier: Match | None = None, salt: str = "") -> Match:
        """Find the cached prefix that `admit` would lock now; changes nothing.

        Args:
            earlier: the last match of the same tokens; pages that it found are not compared again.
            salt: leases with different salts share no page.
        """
        matchable = self._matchable(token_ids) if self.prefix_cache else _NO_TOKENS
        return self.tree.find(matchable, earlier, salt)

    def match_length(self, token_ids: TokenIds, salt: str = "") -> int:
        """How many leading tokens `admit` would find in the tree now; changes nothing."""
        return self.find(token_ids, salt=salt).num_pages * self.page_size

    def admit(
        self,
        token_ids: TokenIds,
        *,
        earlier: Match | None = None,
        is_shareable: bool = True,
        salt: str = "",
    ) -> Lease:
        """Lock the longest cached prefix that leaves at least one token to compute; allocates no page.

        Args:
            earlier, salt: as for `find`.
            is_shareable: False = the lease gets no cached page and shares none.
        """
        if self.prefix_cache and is_shareable:
            node, page_ids = self.tree.lock(self._matchable(token_ids), earlier, salt)
        else:
            node, page_ids = self.tree.lock(_NO_TOKENS, None, salt)
        lease = Lease(page_ids, len(page_ids) * self.page_size, len(page_ids), node, is_shareable)
        self._leases[lease] = None
        return lease

    def extend_match(self, lease: Lease, token_ids: TokenIds) -> array:
        """Add to the lease the tree's pages for the tokens after its last page; returns the added pages.

        A lease with pages outside the tree, or an invalidated one, gets none.
        """
        self._require_live(lease)
        first = len(lease.page_ids)
        if not self.prefix_cache or not lease.is_shareable or lease.num_tree_pages < first:
            return array("i")
        lease.node, found = self.tree.lock_below(lease.node, self._matchable(token_ids, first))
        lease.page_ids.extend(found)
        lease.num_tree_pages += len(found)
        return found

    def grow(self, lease: Lease, num_tokens: int) -> tuple[int, array] | None:
        """Give `lease` pages for its first `num_tokens` tokens; evicts tree pages if too few are free.

        Returns:
            The index in `lease.page_ids` of the first new page, and the new pages (possibly none). None if
            too few pages are free or evictable; nothing has changed then.
        """
        self._require_live(lease)
        first = len(lease.page_ids)
        needed = -(-num_tokens // self.page_size) - first
        if needed <= 0:
            return first, array("i")
        missing = needed - self.num_free_pages
        if missing > self.num_evictable_pages:
            return None
        if missing > 0:
            self.allocator.free(self.tree.evict(missing))
        new = array("i", self.allocator.allocate(needed))
        lease.page_ids.extend(new)
        return first, new

    def share(self, lease: Lease, token_ids: TokenIds, num_planned_tokens: int) -> None:
        """Put the full pages of the first `num_planned_tokens` tokens into the tree before they are computed.

        The caller may read such a page only in the step that computes it, or in a later one. If the tree
        already has pages for these tokens, nothing changes; `commit` exchanges them later.

        Raises:
            LeaseError: as for `commit`.
        """
        first, end = self._full_pages(lease, token_ids, num_planned_tokens)
        if end <= first:
            return
        tokens = int32_tokens(token_ids, first * self.page_size, end * self.page_size)
        if self.tree.has_page_below(lease.node, tokens):
            return
        lease.node, _ = self.tree.extend(lease.node, tokens, lease.page_ids[first:end])
        lease.num_tree_pages = end

    def commit(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> list[tuple[int, int]]:
        """Put the full pages of the first `num_computed_tokens` tokens into the tree, unless invalidated.

        Returns:
            (index in `lease.page_ids`, page id to use from now on) for each page whose tokens were already
            in the tree. The lease's own page is free now, and `lease.page_ids` names the tree's page.

        Raises:
            LeaseError: the lease is not live, or has no pages or tokens for `num_computed_tokens`.
        """
        first, end = self._full_pages(lease, token_ids, num_computed_tokens)
        if end <= first:
            return []
        tokens = int32_tokens(token_ids, first * self.page_size, end * self.page_size)
        own = lease.page_ids[first:end]
        lease.node, found = self.tree.extend(lease.node, tokens, own)
        lease.num_tree_pages = end
        lease.page_ids[first : first + len(found)] = found
        self.allocator.free(own[: len(found)])
        return list(enumerate(found, first))

    def invalidate(self, lease: Lease) -> None:
        """Share no page of `lease` from now on, because its keys and values may be wrong (NaN, for example).

        Any of its pages may be wrong, so its whole prefix and all pages cached after it match no request any
        more. Other leases keep the pages that they share with it; unlocked pages wait to be evicted.

        Raises:
            LeaseError: the lease is not live.
        """
        self._require_live(lease)
        lease.is_shareable = False
        self.tree.detach(lease.node)

    def release(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        """Commit the full computed pages and free the others; the lease can't be used afterwards.

        Raises:
            LeaseError: as for `commit`; nothing has changed then.
        """
        self.commit(lease, token_ids, num_computed_tokens)
        del self._leases[lease]
        self.allocator.free(lease.page_ids[lease.num_tree_pages :])
        self.tree.unlock(lease.node)
        del lease.page_ids[:]

    def reset(self) -> None:
        """Forget every lease and every cached prefix, so that all pages are free. Only while no request runs.

        The engine calls it to go on after it found a broken page count.
        """
        self.allocator = PageAllocator(self.allocator.num_usable_pages + 1)
        self.tree = RadixTree(self.page_size, self._changes)
        self._leases = {}
        if self._changes is not None:
            self._changes.cleared()

    def flush(self) -> int:
        """Evict every cached page that no lease has locked; returns how many pages that freed."""
        if self._changes is not None and self.num_evictable_pages == self.num_cached_pages:
            self._changes.cleared()
        page_ids = self.tree.evict(self.num_evictable_pages)
        self.allocator.free(page_ids)
        return len(page_ids)

    def take_changes(self) -> list[PageChange]:
        """Which prefixes were cached since the last call, and which are not any more, in order."""
        return self._changes.take() if self._changes is not None else []

    def check_invariants(self) -> None:
        """Recompute the whole bookkeeping, in time linear in the pages of the pool and of all leases.

        Raises:
            BrokenInvariantError: names the promise that is broken.
        """
        self.allocator.check_invariants()
        self.tree.check_invariants([lease.node for lease in self._leases])
        owner: dict[int, str] = {}

        def claim(page_id: int, by: str) -> None:
            if not SCRATCH_PAGE < page_id <= self.num_usable_pages:
                raise BrokenInvariantError(f"only usable pages are used: page {page_id} is {by}")
            if page_id in owner:
                raise BrokenInvariantError(
                    f"a page has one owner: page {page_id} is {owner[page_id]} and {by}"
                )
            owner[page_id] = by

        for page_id in self.allocator.free_page_ids():
            claim(page_id, "free")
        for node in self.tree.nodes():
            for page_id in node.page_ids:
                claim(page_id, "in the tree")
        for number, lease in enumerate(self._leases):
            for page_id in lease.page_ids[lease.num_tree_pages :]:
                claim(page_id, f"owned by lease {number}")
            if lease.page_ids[: lease.num_tree_pages] != self.tree.path_page_ids(lease.node):
                raise BrokenInvariantError(f"a lease points at the tree's pages: lease {number} does not")
        if len(owner) != self.num_usable_pages:
            lost = sorted(set(range(SCRATCH_PAGE + 1, self.num_usable_pages + 1)) - owner.keys())
            raise BrokenInvariantError(
                f"no page is lost: pages {lost[:8]} ({len(lost)} in all) have no owner"
            )

    def _full_pages(self, lease: Lease, token_ids: TokenIds, num_tokens: int) -> tuple[int, int]:
        """The lease's full pages outside the tree for these tokens, as a range of indices (first, end)."""
        self._require_live(lease)
        if not 0 <= num_tokens <= min(len(token_ids), len(lease.page_ids) * self.page_size):
            raise LeaseError(
                f"{num_tokens} tokens can't be computed: there are {len(token_ids)} tokens "
                f"and {len(lease.page_ids)} pages of {self.page_size}"
            )
        may_enter = self.prefix_cache and lease.is_shareable
        return lease.num_tree_pages, num_tokens // self.page_size if may_enter else 0

    def _matchable(self, token_ids: TokenIds, first_page: int = 0) -> Tokens:
        """The tokens of the full pages that may come from the tree; at least one token is left to compute."""
        num_pages = max(0, len(token_ids) - 1) // self.page_size
        return int32_tokens(token_ids, first_page * self.page_size, num_pages * self.page_size)

    def _require_live(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise LeaseError("this lease was released, or another manager gave it")
