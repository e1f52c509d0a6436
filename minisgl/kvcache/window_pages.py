"""The pages of layers with a window: which place of the prefix tree has one, and who needs it.

Promise: a place has at most one page here and a page one place; a page that a lease needs stays. A page that
no lease needs is kept for later prefix hits until another place needs it.

A place is a page of tokens behind one prefix, as `KVCacheManager` hands them out; S tokens make a page.
"""

from array import array
from collections.abc import Iterable, Sequence

from minisgl.errors import ConfigError
from minisgl.kvcache.page_allocator import SCRATCH_PAGE, BrokenInvariantError, PageAllocator

NO_PAGE = SCRATCH_PAGE


class WindowPages:
    """The pages of one group of layers.

    Args:
        window: tokens that a token sees, itself included.
        num_pages: pages of the group's pool; page 0 is the scratch page and is never handed out.
        num_places: one more than the largest place.
        page_size: tokens per page.
        tile_tokens: attention reads keys in whole tiles of so many tokens, a power of two, and must find
            numbers there even where its mask hides them. A row keeps the pages of its first tile.

    Raises:
        ConfigError: the pool is too small for the window of one row.
    """

    def __init__(
        self, *, window: int, num_pages: int, num_places: int, page_size: int, tile_tokens: int = 1
    ) -> None:
        self.window = window
        self.page_size = page_size
        self._tile_tokens = tile_tokens
        self._allocator = PageAllocator(num_pages)
        self._page_of = array("i", bytes(4 * num_places))  # by place; NO_PAGE = none
        self._num_users = array("i", bytes(4 * num_places))  # by place: leases that need its page
        self._ends_hits = bytearray(num_places)  # by place: whether a prefix hit needed its page
        # Places whose page nobody needs, the next to lose it first. Those that a window passed go first: only
        # a prompt that branches off there could use them.
        self._passed: dict[int, None] = {}
        self._kept: dict[int, None] = {}
        self.num_promised = 0
        """Pages that leases will still need, as `GroupedCacheManager.reserve` counts them."""
        if self.num_usable_pages < self.most_row_pages:
            raise ConfigError(
                f"layers with a window of {window} tokens need {self.most_row_pages + 1} pages of "
                f"{page_size} tokens for one request, and get {num_pages}; give the pool more memory"
            )

    @property
    def num_usable_pages(self) -> int:
        return self._allocator.num_usable_pages

    @property
    def num_free_pages(self) -> int:
        return self._allocator.num_free_pages

    @property
    def num_evictable_pages(self) -> int:
        """Pages that no lease needs; another place may get them."""
        return len(self._passed) + len(self._kept)

    @property
    def num_available_pages(self) -> int:
        """Free and evictable pages."""
        return self.num_free_pages + self.num_evictable_pages

    @property
    def most_row_pages(self) -> int:
        """Most pages that a row needs for one more page of tokens."""
        return most_row_pages(self.window, self.page_size, self._tile_tokens)

    def first_needed(self, num_tokens: int) -> int:
        """The first page, as an index of a row's pages, that a row of `num_tokens` tokens still needs.

        It counts from the row's last page end, where the next request can go on.
        """
        begin = num_tokens // self.page_size * self.page_size - self.window + 1
        return max(begin, 0) // self._tile_tokens * self._tile_tokens // self.page_size

    def last_missing(self, places: Sequence[int], begin: int, end: int) -> int:
        """The last index in begin : end whose place has no page; -1 = all have one."""
        page_of = self._page_of
        for index in range(end - 1, begin - 1, -1):
            if page_of[places[index]] == NO_PAGE:
                return index
        return -1

    def pages(self, places: Iterable[int]) -> array:
        """The page of each place, int32; each must have one."""
        page_ids = array("i", [self._page_of[place] for place in places])
        assert NO_PAGE not in page_ids, "a row needs a page that is gone"
        return page_ids

    def allocate(self, places: Sequence[int]) -> None:
        """Give each place a page, which one lease needs. There must be enough available pages."""
        missing = len(places) - self.num_free_pages
        if missing > 0:
            self._evict(missing)
        for place, page_id in zip(places, self._allocator.allocate(len(places)), strict=True):
            assert self._page_of[place] == NO_PAGE, "a new place has a page"
            self._page_of[place] = page_id
            self._num_users[place] = 1

    def use(self, places: Iterable[int]) -> None:
        """One more lease needs the pages of these places, because its prefix hit ends behind them."""
        for place in places:
            assert self._page_of[place] != NO_PAGE, "a hit needs a page that is gone"
            if not self._num_users[place]:
                self._forget_unneeded(place)
            self._num_users[place] += 1
            self._ends_hits[place] = True

    def mark(self, places: Iterable[int]) -> None:
        """Note that a prefix hit could have ended behind these places, if all of them had pages."""
        for place in places:
            self._ends_hits[place] = True

    def pass_by(self, places: Iterable[int], num_in_tree: int) -> None:
        """A lease needs these pages no more, because its window has passed them.

        Args:
            num_in_tree: how many of them are in the prefix tree; the others' pages become free.
        """
        for number, place in enumerate(places):
            if self._release(place):
                if number >= num_in_tree:
                    self._free(place)
                elif self._ends_hits[place]:
                    self._kept[place] = None
                else:
                    self._passed[place] = None

    def leave(self, places: Iterable[int], num_in_tree: int) -> None:
        """A lease ends that needed these pages. Arguments as `pass_by`."""
        for number, place in enumerate(places):
            if self._release(place):
                if number >= num_in_tree:
                    self._free(place)
                else:
                    self._kept[place] = None

    def exchange(self, own: int, tree: int) -> None:
        """Use the place `tree` instead of `own`, which has the same tokens and only one lease."""
        assert self._num_users[own] == 1, "a place outside the tree has one lease"
        if self._page_of[tree] == NO_PAGE:
            self._page_of[tree], self._num_users[tree] = self._page_of[own], 1
            self._page_of[own], self._num_users[own] = NO_PAGE, 0
            return
        self._num_users[own] = 0
        self._free(own)
        if not self._num_users[tree]:
            self._forget_unneeded(tree)
        self._num_users[tree] += 1

    def forget(self, places: Iterable[int]) -> None:
        """These places are free now; their next tokens will be others."""
        for place in places:
            self._ends_hits[place] = False
            if self._page_of[place] != NO_PAGE:
                if self._num_users[place]:
                    raise BrokenInvariantError(f"a page that a row needs stays: that of place {place} goes")
                self._forget_unneeded(place)
                self._free(place)

    def check_invariants(self, needed: Sequence[int], in_tree: set[int]) -> None:
        """Recompute everything, in time linear in the places.

        Args:
            needed: the places that leases need, once for each lease.
            in_tree: the places in the prefix tree.

        Raises:
            BrokenInvariantError: names the promise that is broken.
        """

        def require(holds: bool, promise: str) -> None:
            if not holds:
                raise BrokenInvariantError(f"window of {self.window} tokens: {promise}")

        self._allocator.check_invariants()
        counts: dict[int, int] = {}
        for place in needed:
            counts[place] = counts.get(place, 0) + 1
        users = {place: count for place, count in enumerate(self._num_users) if count}
        require(users == counts, "a page counts the leases that need it")
        holders = {place: page_id for place, page_id in enumerate(self._page_of) if page_id != NO_PAGE}
        require(counts.keys() <= holders.keys(), "a page that a row needs is there")
        owned = [*holders.values(), *self._allocator.free_page_ids()]
        require(len(set(owned)) == len(owned), "a page is free or has one place")
        require(len(owned) == self.num_usable_pages, "no page is lost")
        unneeded = [*self._passed, *self._kept]
        require(len(set(unneeded)) == len(unneeded), "a page that nobody needs is listed once")
        require(set(unneeded) == holders.keys() - counts.keys(), "all pages that nobody needs are listed")
        require(set(unneeded) <= in_tree, "a page outside the tree is somebody's")

    def _release(self, place: int) -> bool:
        """Whether nobody needs the place's page any more."""
        self._num_users[place] -= 1
        assert self._num_users[place] >= 0, "a page is given up once"
        return not self._num_users[place]

    def _free(self, place: int) -> None:
        self._allocator.free((self._page_of[place],))
        self._page_of[place] = NO_PAGE

    def _forget_unneeded(self, place: int) -> None:
        if place in self._passed:
            del self._passed[place]
        else:
            del self._kept[place]

    def _evict(self, count: int) -> None:
        for _ in range(count):
            queue = self._passed or self._kept
            place = next(iter(queue))
            del queue[place]
            self._free(place)


def most_row_pages(window: int, page_size: int, tile_tokens: int) -> int:
    """Most pages of a window group that a row needs for one more page of tokens."""
    before = window - 1 + (tile_tokens - 1 if tile_tokens > page_size else 0)
    return -(-before // page_size) + 1
