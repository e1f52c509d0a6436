"""The free list of the KV pool's pages.

Promise: a page has one owner at a time. Freeing a page twice, or a page that is not part of the pool, raises
an error in that very call.
"""

from collections.abc import Sequence

from minisgl.errors import ConfigError

SCRATCH_PAGE = 0
"""Never handed out. Padding rows write to this page, and unset page-table entries point to it."""


class BrokenInvariantError(Exception):
    """The page bookkeeping contradicts itself; the message names the broken promise."""


class PageAllocator:
    """The free list of a pool of `num_pages` pages without page 0 (scratch). It neither evicts nor shares.

    Raises:
        ConfigError: there are fewer than two pages, so none is left beside the scratch page.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ConfigError(
                f"the KV pool needs at least 2 pages (one is the scratch page), got {num_pages}; "
                "give it more memory or use smaller pages"
            )
        self.num_pages = num_pages
        self.freed: list[int] | None = None
        """Gets every page that comes back; None: nothing does."""
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))  # a stack: lowest ids go first
        self._is_free = bytearray(b"\x01") * num_pages
        self._is_free[SCRATCH_PAGE] = 0

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    @property
    def num_usable_pages(self) -> int:
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, the most recently freed first.

        Raises:
            ValueError: `count` is negative or fewer pages are free; nothing has changed then.
        """
        if not 0 <= count <= len(self._free):
            raise ValueError(f"asked for {count} pages, {len(self._free)} are free")
        if count == 0:
            return []
        page_ids = self._free[-count:]
        page_ids.reverse()
        del self._free[-count:]
        for page_id in page_ids:
            self._is_free[page_id] = 0
        return page_ids

    def free(self, page_ids: Sequence[int]) -> None:
        """Take pages back.

        Raises:
            BrokenInvariantError: a page is already free, or can never have been handed out; the pages
                before it in `page_ids` are free then.
        """
        for page_id in page_ids:
            if not SCRATCH_PAGE < page_id < self.num_pages:
                raise BrokenInvariantError(f"only pages that were handed out come back: page {page_id}")
            if self._is_free[page_id]:
                raise BrokenInvariantError(f"a page is freed once: page {page_id} is free already")
            self._is_free[page_id] = 1
            self._free.append(page_id)
        if self.freed is not None:
            self.freed.extend(page_ids)

    def check_invariants(self) -> None:
        """Recount the free list in O(pages).

        Raises:
            BrokenInvariantError: the list and the marks of free pages disagree.
        """
        if self._is_free[SCRATCH_PAGE]:
            raise BrokenInvariantError("the scratch page is never free")
        if len(set(self._free)) != len(self._free):
            raise BrokenInvariantError("a page stands on the free list once")
        if sum(self._is_free) != len(self._free) or not all(self._is_free[page] for page in self._free):
            raise BrokenInvariantError("the free list holds exactly the pages that are marked free")

    def free_page_ids(self) -> tuple[int, ...]:
        """Every free page, in no particular order."""
        return tuple(self._free)
