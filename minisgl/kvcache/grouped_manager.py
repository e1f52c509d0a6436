"""The pages of a model whose layers keep different parts of a row: `KVCacheManager` for KV groups.

Promise: a row has the pages of its window in every window group, and a prefix hit is as long as the shortest
of what all groups still have. A page is free, or belongs to one place, in each group.

The tree and the leases are those of a `KVCacheManager`, whose pages are called places here. They are the
pages of the group that keeps all tokens, if there is one, else numbers without memory. Every window group
maps places to pages of its own (`WindowPages`); a place in the tree may be without. A group of states
has snapshots at some places (`Snapshots`), and a hit ends only there.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minisgl.kvcache.manager import KVCacheManager, Lease
from minisgl.kvcache.page_allocator import BrokenInvariantError
from minisgl.kvcache.page_changes import PageChange
from minisgl.kvcache.radix_tree import Match, TokenIds, int32_tokens
from minisgl.kvcache.snapshots import Snapshots
from minisgl.kvcache.window_pages import WindowPages

ENDING_TOKENS = 2
"""A prompt's snapshot leaves out at least so many of its last tokens. Where a template leaves thoughts of
earlier turns out, as Qwen's does, the next turn has others there than "<think>" and a line break."""


class WindowGroup(NamedTuple):
    """What the manager has to know of a window group."""

    window: int
    num_pages: int


class _Held:
    """What a lease holds in the window groups, and its snapshots of states."""

    __slots__ = (
        "base_tokens",
        "first",
        "horizon_pages",
        "promised",
        "replaceable",
        "snapshot",
        "snapshot_tokens",
        "wanted_tokens",
    )

    def __init__(self, num_groups: int) -> None:
        self.first = [0] * num_groups
        """Of each group: the lease needs the pages from this index on."""
        self.promised = [0] * num_groups
        """Of each group: the pages that the lease may still need beside those that it has."""
        self.horizon_pages = 0
        """Pages of the row when it has all the tokens that its admission expects."""
        self.snapshot = 0
        """The place where the row began, or where its prompt was saved last; 0 = none."""
        self.snapshot_tokens = 0
        """Tokens up to there."""
        self.base_tokens = 0
        """Tokens up to the snapshot before that one, without those that go first."""
        self.wanted_tokens = 0
        """Where prompts turned out to branch and a hit could not end; 0 = nowhere."""
        self.replaceable = 0
        """The place of the last snapshot while it decoded; 0 = none."""


class GroupedCacheManager:
    """`KVCacheManager` with window groups; what is not described here is as there.

    Args:
        num_places: as `num_pages` of `KVCacheManager`.
        keeps_all: a group keeps all tokens, and its pages are the places. It is group 0 then, and the window
            groups follow; else the window groups begin with 0.
        windows: the window groups.
        tile_tokens: see `WindowPages`.
        num_snapshots: of the states of linear attention; None = the model has no states.
        snapshot_pages: a row that decodes is saved after each so many pages.

    Raises:
        ConfigError: there are too few pages for one request, or a page has no tokens.
    """

    def __init__(
        self,
        *,
        num_places: int,
        page_size: int,
        keeps_all: bool,
        windows: Sequence[WindowGroup],
        prefix_cache: bool = True,
        tile_tokens: int = 1,
        num_snapshots: int | None = None,
        snapshot_pages: int = 4,
    ) -> None:
        self.page_size = page_size
        self._num_snapshots, self._snapshot_pages = num_snapshots, snapshot_pages
        self.prefix_cache = prefix_cache
        self.keeps_all = keeps_all
        self._num_places, self._groups, self._tile_tokens = num_places, tuple(windows), tile_tokens
        self.reset()

    def reset(self) -> None:
        """Forget every lease and every cached prefix, so that all pages are free."""
        self._freed: list[int] = []
        self.places = KVCacheManager(
            num_pages=self._num_places, page_size=self.page_size, prefix_cache=self.prefix_cache
        )
        self.places.allocator.freed = self._freed
        self.windows = [
            WindowPages(
                window=group.window,
                num_pages=group.num_pages,
                num_places=self._num_places,
                page_size=self.page_size,
                tile_tokens=self._tile_tokens,
            )
            for group in self._groups
        ]
        self.snapshots = None
        if self._num_snapshots is not None:
            self.snapshots = Snapshots(self._num_snapshots, self._num_places)
        self._held: dict[Lease, _Held] = {}

    @property
    def num_usable_pages(self) -> int:
        """Places; so are the other numbers of pages."""
        return self.places.num_usable_pages

    @property
    def num_free_pages(self) -> int:
        return self.places.num_free_pages

    @property
    def num_evictable_pages(self) -> int:
        return self.places.num_evictable_pages

    @property
    def num_cached_pages(self) -> int:
        return self.places.num_cached_pages

    @property
    def availability(self) -> tuple[int, ...]:
        """Free and evictable pages: the places, then those of each window group."""
        groups = [group.num_available_pages for group in self.windows]
        return (self.num_free_pages + self.num_evictable_pages, *groups)

    def find(self, token_ids: TokenIds, earlier: Match | None = None, salt: str = "") -> Match:
        """Find the cached prefix that `admit` would lock now; changes nothing."""
        match = self.places.find(token_ids, earlier, salt)
        return _shorter(match, self._usable(self.matched_places(match)))

    def matched_places(self, match: Match) -> array:
        """The places of what the tree found last."""
        tree = self.places.tree
        return array("i") if match.node is None else tree.path_page_ids(match.node)[: match.num_pages]

    def match_length(self, token_ids: TokenIds, salt: str = "") -> int:
        """How many leading tokens `admit` would find now; changes nothing."""
        return self.find(token_ids, salt=salt).num_pages * self.page_size

    def admit(
        self,
        token_ids: TokenIds,
        *,
        earlier: Match | None = None,
        is_shareable: bool = True,
        salt: str = "",
    ) -> Lease:
        """Lock the longest cached prefix whose end all groups have; allocates no page."""
        wanted = 0
        if self.prefix_cache and is_shareable:
            match = self.places.find(token_ids, earlier, salt)
            places = self.matched_places(match)
            num_pages = self._usable(places)
            if num_pages < len(places):
                if self.places.tree.goes_on(match):
                    wanted = len(places) * self.page_size
                for group in self.windows:
                    group.mark(places[group.first_needed(len(places) * self.page_size) :])
            token_ids, earlier = self._first_pages(token_ids, num_pages), _shorter(match, num_pages)
        lease = self.places.admit(token_ids, earlier=earlier, is_shareable=is_shareable, salt=salt)
        held = self._held[lease] = _Held(len(self.windows))
        for number, group in enumerate(self.windows):
            held.first[number] = group.first_needed(lease.num_cached_tokens)
            group.use(lease.page_ids[held.first[number] :])
        held.wanted_tokens = wanted
        return lease

    def first_state(self, lease: Lease) -> int | None:
        """The slot whose state the row of a new or extended lease begins with; None = it has no tokens."""
        if self.snapshots is None or not lease.page_ids:
            return None
        held, tokens = self._held[lease], len(lease.page_ids) * self.page_size
        held.base_tokens = self.snapshots.pass_by(lease.page_ids[:-1]) * self.page_size
        held.snapshot, held.snapshot_tokens = lease.page_ids[-1], tokens
        return self.snapshots.load(held.snapshot, tokens - held.base_tokens)

    def end_of_chunk(self, lease: Lease, feed_tokens: int, start: int, end: int) -> int:
        """Where a chunk from `start` on, of up to `end` tokens, should end: its step saves one state inside.

        Args:
            feed_tokens: tokens of the whole feed, whose last page end is wanted.
        """
        if not self.snapshots:
            return end
        first, last = self._wanted_ends(lease, feed_tokens)
        # Where a chunk does not reach the feed's end, another one comes anyway.
        has_another = start < first < last or end < feed_tokens
        return last if start < last < end and has_another else end

    @property
    def keeps_snapshots(self) -> bool:
        """Whether prefix hits need snapshots, and some may be kept."""
        return self.prefix_cache and bool(self.snapshots)

    def coming_snapshots(self, lease: Lease, feed_tokens: int, num_tokens: int) -> list[int]:
        """Where, in tokens, hits will end soon, but not yet, as a row with `num_tokens` is saved there."""
        snapshots = self.snapshots
        if snapshots is None or not lease.is_shareable:
            return []

        def is_taken(page: int) -> bool:
            """By the step being planned; or, the tree has another page of these tokens until `commit`."""
            place, is_outside = lease.page_ids[page - 1], page > lease.num_tree_pages
            return snapshots.has(place) and (is_outside or not snapshots.is_ready(place))

        wanted = self._wanted_ends(lease, feed_tokens)
        return [at for at in wanted if at >= num_tokens or (at and is_taken(at // self.page_size))]

    def want_snapshot(self, lease: Lease, feed_tokens: int, num_tokens: int) -> bool:
        """Let a new lease's row be saved at this page end; False = it has another such place."""
        held, (_, last) = self._held[lease], self._wanted_ends(lease, feed_tokens)
        if num_tokens < last and not held.wanted_tokens:
            held.wanted_tokens = num_tokens
        return num_tokens in (held.wanted_tokens, last)

    def _wanted_ends(self, lease: Lease, feed_tokens: int) -> tuple[int, int]:
        """The page ends of a prompt, in tokens, where its state is to be saved."""
        last = max(feed_tokens - ENDING_TOKENS, 0) // self.page_size * self.page_size
        return min(self._held[lease].wanted_tokens, last), last

    def save_inside(self, lease: Lease, feed_tokens: int, start: int, end: int) -> tuple[int, int] | None:
        """The state that a chunk of a grown lease saves on its way: behind how many tokens, and the slot."""
        if not self.snapshots:
            return None
        for at in self._wanted_ends(lease, feed_tokens):
            if start < at < end:
                slot = self.save_state(lease, at, feed_tokens, is_coming=True)
                return None if slot is None else (at - start, slot)
        return None

    def save_state(
        self, lease: Lease, num_tokens: int, feed_tokens: int, *, is_coming: bool = False
    ) -> int | None:
        """A slot for the row's state after its first `num_tokens` tokens, if it should be saved.

        Args:
            feed_tokens: tokens of the feed; behind them, the row decodes.
            is_coming: the step that is being planned saves it. Else, it is the row's before that step, whose
                plan copies it to the slot.
        """
        if self.snapshots is None or not num_tokens or num_tokens % self.page_size or not self.prefix_cache:
            return None
        held, page = self._held[lease], num_tokens // self.page_size
        place = lease.page_ids[page - 1]
        decodes = num_tokens >= feed_tokens
        ends = self._wanted_ends(lease, feed_tokens)
        is_wanted = page % self._snapshot_pages == 0 if decodes else num_tokens in ends
        if not is_wanted or not lease.is_shareable or self.snapshots.has(place):
            return None
        if held.replaceable and decodes:
            self.snapshots.replace(held.replaceable)
        if self.snapshots.has(held.snapshot) and (decodes or self.snapshots.pass_by((held.snapshot,))):
            before = held.snapshot_tokens
        else:
            before = held.base_tokens
        num_users = 2 if num_tokens == held.wanted_tokens else 0
        slot = self.snapshots.save(
            place, num_tokens - before, is_answer=decodes, num_users=num_users, is_coming=is_coming
        )
        if decodes:
            held.replaceable = place if slot is not None else 0
        elif slot is not None:
            held.base_tokens, held.snapshot, held.snapshot_tokens = before, place, num_tokens
        return slot

    def planned(self) -> None:
        """A plan is made: the slots of snapshots that it reads and writes are free for the next one's."""
        if self.snapshots is not None:
            self.snapshots.planned()

    def reserve(self, lease: Lease, num_tokens: int) -> tuple[int, int, int, int] | None:
        """Expect a new lease to grow to `num_tokens` tokens, as far as admissions are concerned.

        Returns:
            None if all window groups have room for it beside the leases before it. Else, of a group that
            lacks room: the pages that it needs, those that the other leases do, those that are available, and
            the window.
        """
        held = self._held[lease]
        held.horizon_pages = -(-num_tokens // self.page_size)
        self._promise(lease, held)
        for own, group in zip(held.promised, self.windows, strict=True):
            if group.num_promised > group.num_available_pages:
                return own, group.num_promised - own, group.num_available_pages, group.window
        return None

    def advance(self, lease: Lease, num_tokens: int) -> None:
        """Give back the pages that the lease's windows have passed, as its row has `num_tokens` tokens now.

        Steps that were planned before may still read these pages: they run before the next owner's writes.
        """
        held = self._held[lease]
        size = len(lease.page_ids)
        for number, group in enumerate(self.windows):
            first, needed = held.first[number], group.first_needed(num_tokens)
            if needed > first:
                in_tree = max(lease.num_tree_pages - first, 0)
                group.pass_by(lease.page_ids[first : min(needed, size)], in_tree)
                held.first[number] = needed
        self._promise(lease, held)

    def most_pages(self, lease: Lease) -> int:
        """To how many pages `grow` could bring the lease without taking any that other leases will need."""
        size = len(lease.page_ids)
        most = size + self.num_free_pages + self.num_evictable_pages
        for own, group in zip(self._held[lease].promised, self.windows, strict=True):
            most = min(most, size + max(group.num_available_pages - (group.num_promised - own), 0))
        return most

    def grow(self, lease: Lease, num_tokens: int) -> tuple[int, array] | None:
        """Give `lease` pages in all groups for its first `num_tokens` tokens; `advance` comes first.

        Returns:
            The index in `lease.page_ids` of the first new place, and the new places (possibly none). None if
            a group has too few pages; nothing has changed then.
        """
        needed = -(-num_tokens // self.page_size) - len(lease.page_ids)
        if any(group.num_available_pages < needed for group in self.windows):
            return None
        grown = self.places.grow(lease, num_tokens)
        if self._freed:
            self._settle()
        if grown is not None and grown[1]:
            for group in self.windows:
                group.allocate(grown[1])
            self._promise(lease, self._held[lease])
        return grown

    def tables(self, lease: Lease, first: int, count: int) -> Iterator[tuple[int, int, array]]:
        """The page table entries of `count` pages from index `first` on: group, first index, page ids."""
        places = lease.page_ids[first : first + count]
        if self.keeps_all:
            yield 0, first, places
        for number, group in enumerate(self.windows, int(self.keeps_all)):
            skipped = max(self._held[lease].first[number - self.keeps_all] - first, 0)
            if skipped < count:
                yield number, first + skipped, group.pages(places[skipped:])

    def extend_match(self, lease: Lease, token_ids: TokenIds) -> array:
        """Add to the lease the tree's places after its last page, as far as a hit could reach.

        Returns the added places. A lease with pages outside the tree, or an invalidated one, gets none.
        """
        size = len(lease.page_ids)
        if not self.prefix_cache or not lease.is_shareable or lease.num_tree_pages < size:
            return array("i")
        last = max(len(token_ids) - 1, 0) // self.page_size
        tokens = int32_tokens(token_ids, size * self.page_size, last * self.page_size)
        below = self.places.tree.pages_below(lease.node, tokens)
        if not below:
            return below
        num_pages = self._usable(lease.page_ids + below)
        if num_pages <= size:
            return array("i")
        self.advance(lease, num_pages * self.page_size)
        added = self.places.extend_match(lease, self._first_pages(token_ids, num_pages))
        held = self._held[lease]
        for number, group in enumerate(self.windows):
            group.use(lease.page_ids[max(held.first[number], size) :])
        self._promise(lease, held)
        return added

    def share(self, lease: Lease, token_ids: TokenIds, num_planned_tokens: int) -> None:
        """See `KVCacheManager.share`."""
        self.places.share(lease, token_ids, num_planned_tokens)

    def commit(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> list[tuple[int, int]]:
        """See `KVCacheManager.commit`; `tables` has the pages of the exchanged places."""
        begin = lease.num_tree_pages
        own = lease.page_ids[begin:]
        exchanged = self.places.commit(lease, token_ids, num_computed_tokens)
        if exchanged:
            held = self._held[lease]
            for number, group in enumerate(self.windows):
                for index, place in exchanged:
                    if index >= held.first[number]:
                        group.exchange(own[index - begin], place)
            for index, place in exchanged:
                if self.snapshots is not None:
                    self.snapshots.exchange(own[index - begin], place)
                if held.replaceable == own[index - begin]:
                    held.replaceable = 0
                if held.snapshot == own[index - begin]:
                    held.snapshot = place
            self._settle()
        return exchanged

    def invalidate(self, lease: Lease) -> None:
        """See `KVCacheManager.invalidate`."""
        self.places.invalidate(lease)

    def release(self, lease: Lease, token_ids: TokenIds, num_computed_tokens: int) -> None:
        """Commit the full computed pages and free the others; the lease can't be used afterwards."""
        self.commit(lease, token_ids, num_computed_tokens)
        held = self._held.pop(lease)
        for number, group in enumerate(self.windows):
            first = held.first[number]
            group.leave(lease.page_ids[first:], max(lease.num_tree_pages - first, 0))
            group.num_promised -= held.promised[number]
        self.places.release(lease, token_ids, num_computed_tokens)
        self._settle()

    def flush(self) -> int:
        """Evict every cached place that no lease has locked; returns how many that were."""
        num_freed = self.places.flush()
        self._settle()
        return num_freed

    def take_changes(self) -> list[PageChange]:
        """None: what a prompt can find depends on all groups, which the notes can't tell."""
        return []

    def check_invariants(self) -> None:
        """Recompute the whole bookkeeping.

        Raises:
            BrokenInvariantError: names the promise that is broken.
        """
        self.places.check_invariants()
        self._check_snapshots()
        in_tree = {place for node in self.places.tree.nodes() for place in node.page_ids}
        for number, group in enumerate(self.windows):
            needed = [
                place for lease, held in self._held.items() for place in lease.page_ids[held.first[number] :]
            ]
            group.check_invariants(needed, in_tree)
            if group.num_promised != sum(held.promised[number] for held in self._held.values()):
                raise BrokenInvariantError("num_promised is the sum of what leases were promised")

    def _check_snapshots(self) -> None:
        if self.snapshots is not None:
            self.snapshots.check_invariants(set(self.places.allocator.free_page_ids()))

    def _usable(self, places: array) -> int:
        """How many of the first places a hit can have: all groups must have what comes before its end."""
        num_pages = len(places)
        while num_pages:
            if self.snapshots is not None and not self.snapshots.is_ready(places[num_pages - 1]):
                num_pages -= 1
                continue
            for group in self.windows:
                missing = group.last_missing(
                    places, group.first_needed(num_pages * self.page_size), num_pages
                )
                if missing >= 0:
                    num_pages = missing
                    break
            else:
                break
        return num_pages

    def _first_pages(self, token_ids: TokenIds, num_pages: int) -> TokenIds:
        """Tokens of which at most `num_pages` pages may come from the tree: one is always left to compute."""
        return token_ids[: num_pages * self.page_size + 1]

    def _promise(self, lease: Lease, held: _Held) -> None:
        """Count anew what the lease will still need of each window group."""
        size = len(lease.page_ids)
        for number, group in enumerate(self.windows):
            has = max(size - held.first[number], 0)
            promised = max(min(held.horizon_pages, group.most_row_pages) - has, 0)
            group.num_promised += promised - held.promised[number]
            held.promised[number] = promised

    def _settle(self) -> None:
        """Let the window groups know which places became free."""
        for group in self.windows:
            group.forget(self._freed)
        if self.snapshots is not None:
            self.snapshots.forget(self._freed)
        self._freed.clear()


def _shorter(match: Match, num_pages: int) -> Match:
    return match._replace(num_pages=num_pages) if num_pages else Match(0, None, 0)


Cache = KVCacheManager | GroupedCacheManager
