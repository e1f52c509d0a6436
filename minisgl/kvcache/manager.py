"""Who may use which page: admit, grow, commit, release.

Promise: every usable page is, at any moment, free, or owned by exactly one lease, or in the radix tree
once; and a page that a lease can reach is never evicted.

The manager moves page ids, never keys or values. Two things are left to the caller: a lease is
released only when no step in flight uses it, and the pages that `commit` exchanges are written to
the row's page table before any later step, because the old ones may belong to someone else by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minisgl.errors import ConfigError
from minisgl.kvcache.page_allocator import SCRATCH_PAGE, BrokenInvariantError, PageAllocator
from minisgl.kvcache.radix_tree import Node, RadixTree, Tokens

TokenIds = Sequence[int] | NDArray[np.integer]
"""Token ids >= 0 and < 2**31; an int32 array (numpy's or array("i")) is read without conversion."""


class LeaseError(Exception):
    """A lease was used after its release, with another manager, or with numbers that can't be its own."""


@dataclass(eq=False, slots=True)
class Lease:
    """The right of one request to use its pages, given back exactly once. Read it; only the manager writes.

    The first `num_tree_pages` of `page_ids` are in the tree, locked; the others are this lease's own.
    """

    page_ids: list[int]
    """Page i holds tokens i * page_size and on; empty after the release."""
    num_cached_tokens: int
    """Tokens found in the tree at admission: whole pages, fewer than the prompt has."""
    num_tree_pages: int
    node: Node
    """Where the pages in the tree end."""


class KVCacheManager:
    """The pages of one pool and the prefixes cached in them.

    Args:
        num_pages: of the whole pool; page 0 is the scratch page and never handed out.
        page_size: tokens per page.
        prefix_cache: False is the naive mode: nothing is shared and nothing is kept.

    Raises:
        ConfigError: fewer than two pages, or a page of no tokens.
    """

    def __init__(self, *, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        if page_size < 1:
            raise ConfigError(
                f"the page size must be at least 1 token, got {page_size}; 16 suits most models"
            )
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixTree(page_size)
        self._leases: dict[Lease, None] = {}

    @property
    def num_usable_pages(self) -> int:
        return self._allocator.num_usable_pages

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free_pages

    @property
    def num_evictable_pages(self) -> int:
        """Pages in the tree that no lease has locked: `grow` takes them when no page is free."""
        return self._tree.num_unlocked_pages

    @property
    def num_cached_pages(self) -> int:
        return self._tree.num_pages

    def match_length(self, token_ids: TokenIds) -> int:
        """How many leading tokens `admit` would find in the tree now; changes nothing."""
        if not self.prefix_cache:
            return 0
        return self._tree.match_length(self._matchable(token_ids)) * self.page_size

    def admit(self, token_ids: TokenIds) -> Lease:
        """Lock the longest cached prefix that leaves at least one token to compute; allocates nothing."""
        node, page_ids = self._tree.root, []
        if self.prefix_cache:
            node, page_ids = self._tree.lock(self._matchable(token_ids))
        lease = Lease(page_ids, len(page_ids) * self.page_size, len(page_ids), node)
        self._leases[lease] = None
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> tuple[int, tuple[int, ...]] | None:
        """Give `lease` pages for its first `num_tokens` tokens, from the tree if too few are free.

        Returns:
            The index in `lease.page_ids` of the first new page, and the new pages, () if none was
            needed. None if there are not enough even so; nothing has changed then.
        """
        self._require_live(lease)
        first = len(lease.page_ids)
        needed = -(-num_tokens // self.page_size) - first
        if needed <= 0:
            return first, ()
        missing = needed - self.num_free_pages
        if missing > self.num_evictable_pages:
            return None
        if missing > 0:
            self._allocator.free(self._tree.evict(missing))
        new = self._allocator.allocate(needed)
        lease.page_ids.extend(new)
        return first, tuple(new)

    def commit(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> list[tuple[int, int]]:
        """Put the full pages among the first `num_computed_tokens` tokens into the tree.

        Returns:
            (index in `lease.page_ids`, page id to use from now on) where the tree had a page with the
            same tokens already: ours is free now, and `lease.page_ids` has the tree's.

        Raises:
            LeaseError: the lease is not live, or has no pages or tokens for `num_computed_tokens`.
        """
        self._require_live(lease)
        if not 0 <= num_computed_tokens <= min(len(token_ids), len(lease.page_ids) * self.page_size):
            raise LeaseError(
                f"{num_computed_tokens} tokens can't be computed: there are {len(token_ids)} tokens "
                f"and {len(lease.page_ids)} pages of {self.page_size}"
            )
        first, end = lease.num_tree_pages, num_computed_tokens // self.page_size
        if not self.prefix_cache or end <= first:
            return []
        tokens = _int32(token_ids, first * self.page_size, end * self.page_size)
        own = lease.page_ids[first:end]
        lease.node, found = self._tree.extend(lease.node, tokens, own)
        lease.num_tree_pages = end
        lease.page_ids[first : first + len(found)] = found
        self._allocator.free(own[: len(found)])
        return list(enumerate(found, first))

    def release(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        """Commit what is full and give back everything else; the lease is dead afterwards.

        Raises:
            LeaseError: as for `commit`; nothing has changed then.
        """
        self.commit(lease, token_ids, num_computed_tokens)
        del self._leases[lease]
        self._allocator.free(lease.page_ids[lease.num_tree_pages :])
        self._tree.unlock(lease.node)
        lease.page_ids.clear()

    def start_over(self) -> None:
        """Forget every lease and every cached prefix: all pages are free. Only when nothing runs.

        For a caller that found a broken count and would rather go on than end.
        """
        self._allocator = PageAllocator(self._allocator.num_usable_pages + 1)
        self._tree = RadixTree(self.page_size)
        self._leases = {}

    def flush(self) -> int:
        """Drop every cached page that no lease has locked; returns how many are free now because of it."""
        page_ids = self._tree.evict(self.num_evictable_pages)
        self._allocator.free(page_ids)
        return len(page_ids)

    def check_invariants(self) -> None:
        """Recompute the whole bookkeeping in O(pages, counted once per lease that holds them).

        Raises:
            BrokenInvariantError: names the promise that is broken.
        """
        self._allocator.check_invariants()
        self._tree.check_invariants([lease.node for lease in self._leases])
        owner: dict[int, str] = {}

        def claim(page_id: int, by: str) -> None:
            if not SCRATCH_PAGE < page_id <= self.num_usable_pages:
                raise BrokenInvariantError(f"only usable pages are used: page {page_id} is {by}")
            if page_id in owner:
                raise BrokenInvariantError(
                    f"a page has one owner: page {page_id} is {owner[page_id]} and {by}"
                )
            owner[page_id] = by

        for page_id in self._allocator.free_page_ids():
            claim(page_id, "free")
        for node in self._tree.nodes():
            for page_id in node.page_ids:
                claim(page_id, "in the tree")
        for number, lease in enumerate(self._leases):
            for page_id in lease.page_ids[lease.num_tree_pages :]:
                claim(page_id, f"owned by lease {number}")
            if lease.page_ids[: lease.num_tree_pages] != self._tree.path_page_ids(lease.node):
                raise BrokenInvariantError(f"a lease points at the tree's pages: lease {number} does not")
        if len(owner) != self.num_usable_pages:
            lost = sorted(set(range(SCRATCH_PAGE + 1, self.num_usable_pages + 1)) - owner.keys())
            raise BrokenInvariantError(
                f"no page is lost: pages {lost[:8]} ({len(lost)} in all) have no owner"
            )

    def _matchable(self, token_ids: TokenIds) -> Tokens:
        """The whole pages of `token_ids` that may come from the tree: one token is always left."""
        num_pages = max(0, len(token_ids) - 1) // self.page_size
        return _int32(token_ids, 0, num_pages * self.page_size)

    def _require_live(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise LeaseError("this lease was released, or another manager gave it")


def _int32(token_ids: TokenIds, start: int, stop: int) -> Tokens:
    """`token_ids[start:stop]` as int32.

    Raises:
        ValueError: a value is no int32, so that it would stand for another token.
    """
    part = np.asarray(token_ids[start:stop])
    if part.dtype == np.int32:
        return part
    if part.size == 0 or part.dtype.kind in "iu":
        tokens = part.astype(np.int32)
        if np.array_equal(tokens, part):
            return tokens
    raise ValueError("token ids must be integers that fit into 32 bits")
