"""The manager of KV groups under random requests, with a simulated pool for each group.

A slot holds a number that stands for the whole prefix up to its token. Pages come poisoned, and a page that
a window has passed may have another owner in the same step, so one that goes too early shows.
A brute-force rule says how long each prefix hit must be.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minisgl.kvcache.grouped_manager import GroupedCacheManager, WindowGroup
from minisgl.kvcache.manager import Lease, LeaseError
from minisgl.kvcache.window_pages import NO_PAGE, most_row_pages

LETTERS = st.text("ab", max_size=6) | st.text("ab", min_size=3, max_size=8)
PICKS = st.integers(0, 5)
POISON = -1
MAX_SESSIONS = 5


@dataclass
class Session:
    """One request, with the page tables that the device has: built from what the manager returned."""

    lease: Lease
    tokens: list[int]
    tables: list[dict[int, int]]
    num_computed: int
    salt: str
    feed_tokens: int
    state: int
    """What linear attention has of the row: the number of its last token, or of none."""


class GroupedMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
        num_places=st.integers(8, 40),
        windows=st.lists(st.integers(1, 24), min_size=1, max_size=3, unique=True),
        more_pages=st.integers(0, 16),
        keeps_all=st.booleans(),
        tile_tokens=st.sampled_from([1, 1, 8]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        num_snapshots=st.sampled_from([None, None, 0, 1, 3, 8]),
    )
    def start(
        self,
        page_size: int,
        num_places: int,
        windows: list[int],
        more_pages: int,
        keeps_all: bool,
        tile_tokens: int,
        prefix_cache: bool,
        num_snapshots: int | None,
    ) -> None:
        self.states = [POISON] * (num_snapshots or 0)
        self.size = page_size
        self.tile = tile_tokens
        sizes = [most_row_pages(window, page_size, tile_tokens) + 1 + more_pages for window in windows]
        self.manager = GroupedCacheManager(
            num_places=num_places,
            page_size=page_size,
            keeps_all=keeps_all,
            windows=[WindowGroup(*group) for group in zip(windows, sizes, strict=True)],
            prefix_cache=prefix_cache,
            tile_tokens=tile_tokens,
            num_snapshots=num_snapshots,
            snapshot_pages=2,
        )
        self.windows = [0] * keeps_all + windows
        self.pools = [np.full(pages * page_size, POISON) for pages in [num_places] * keeps_all + sizes]
        self.sessions: list[Session] = []
        self.numbers: dict[tuple[int, int], int] = {}

    def prefix_numbers(self, tokens: list[int], salt: str) -> np.ndarray:
        number, numbers = -2 - len(salt), []
        for token in tokens:
            number = self.numbers.setdefault((number, token), len(self.numbers) + 1)
            numbers.append(number)
        return np.array(numbers, np.int64)

    def spell(self, letters: str, tail: int) -> list[int]:
        page = {letter: [0] * (self.size - 1) + [ord(letter)] for letter in "ab"}
        return [token for letter in letters for token in page[letter]] + [0] * min(tail, self.size)

    def write_tables(self, session: Session, first: int, count: int) -> None:
        for group, index, page_ids in self.manager.tables(session.lease, first, count):
            session.tables[group] |= dict(enumerate(page_ids, index))

    def slots(self, session: Session, group: int, start: int, stop: int) -> list[int]:
        table = session.tables[group]
        return [table[p // self.size] * self.size + p % self.size for p in range(start, stop)]

    def pick(self, number: int) -> Session:
        if not self.sessions:
            self.admit("ab", 1, "")
        return self.sessions[number % len(self.sessions)]

    def longest_hit(self, tokens: list[int], salt: str) -> int:
        """By brute force, in tokens: the longest prefix whose end every window group still has."""
        match = self.manager.places.find(tokens, salt=salt)
        places = self.manager.matched_places(match)
        snapshots = self.manager.snapshots
        for end in range(len(places), 0, -1):
            if snapshots is not None and snapshots._slot_of[places[end - 1]] < 0:
                continue
            if all(
                group._page_of[places[position // self.size]] != NO_PAGE
                for group in self.manager.windows
                for position in self.seen(group.window, end * self.size)
            ):
                return end * self.size
        return 0

    def seen(self, window: int, length: int) -> range:
        """The positions that tiles of attention touch for the token after `length`, without the new one."""
        return range(max(length - window + 1, 0) // self.tile * self.tile, length)

    def take_in(self, tokens: list[int], salt: str) -> Session:
        expected = self.longest_hit(tokens, salt)
        assert self.manager.match_length(tokens, salt) == expected
        lease = self.manager.admit(np.array(tokens, np.int32), salt=salt)
        assert lease.num_cached_tokens == expected == len(lease.page_ids) * self.size < len(tokens)
        tables: list[dict[int, int]] = [{} for _ in self.windows]
        session = Session(lease, tokens, tables, expected, salt, len(tokens), -2 - len(salt))
        self.write_tables(session, 0, len(lease.page_ids))
        self.begin_state(session)
        self.sessions.append(session)
        return session

    def begin_state(self, session: Session) -> None:
        slot = self.manager.first_state(session.lease)
        if slot is not None:
            session.state = self.states[slot]
        self.plan_ends()

    def plan_ends(self) -> None:
        self.manager.planned()

    @rule(letters=LETTERS, tail=st.integers(0, 3), salt=st.sampled_from(["", "", "", "s"]))
    def admit(self, letters: str, tail: int, salt: str) -> None:
        if len(self.sessions) == MAX_SESSIONS:
            self.release(0)
        session = self.take_in(self.spell(letters, tail) or [7], salt)
        self.manager.reserve(session.lease, len(session.tokens) + 3)

    @rule(number=PICKS, letters=LETTERS)
    def generate(self, number: int, letters: str) -> None:
        self.pick(number).tokens += self.spell(letters, 1)

    @rule(number=PICKS, limit=st.sampled_from([1, 3, 17, 200]), shares=st.booleans(), modest=st.booleans())
    def compute_chunk(self, number: int, limit: int, shares: bool = False, modest: bool = True) -> None:
        """With `modest`, it takes no page that another lease was promised; then `grow` must not fail."""
        session = self.pick(number)
        start = session.num_computed
        self.manager.advance(session.lease, start)
        stop = min(start + limit, len(session.tokens))
        if modest:
            stop = min(stop, self.manager.most_pages(session.lease) * self.size)
            if stop <= start:
                return
        stop = self.manager.end_of_chunk(session.lease, session.feed_tokens, start, stop)
        saved = self.manager.save_state(session.lease, start, session.feed_tokens)
        if saved is not None:
            self.states[saved] = session.state
        first = len(session.lease.page_ids)
        grown = self.manager.grow(session.lease, stop)
        if grown is None:
            assert not modest
            self.plan_ends()
            return
        assert grown[0] == first
        self.write_tables(session, first, len(grown[1]))
        for group, table in enumerate(session.tables):
            for index in range(first, len(session.lease.page_ids)):
                self.pools[group][table[index] * self.size : (table[index] + 1) * self.size] = POISON
        numbers = self.prefix_numbers(session.tokens, session.salt)[start:stop]
        inside = self.manager.save_inside(session.lease, session.feed_tokens, start, stop)
        if shares:
            self.manager.share(session.lease, session.tokens, stop)
        if inside is not None:
            before, slot = inside
            assert slot != saved
            place = session.lease.page_ids[(start + before) // self.size - 1]
            assert self.manager.snapshots is not None
            assert not self.manager.snapshots.is_ready(place), "this plan's step has not taken it yet"
            assert start + before in self.manager.coming_snapshots(session.lease, session.feed_tokens, stop)
            self.states[slot] = numbers[before - 1]
        self.plan_ends()
        for group, pool in enumerate(self.pools):
            pool[self.slots(session, group, start, stop)] = numbers
        session.state = numbers[-1] if len(numbers) else session.state
        session.num_computed = stop

    @rule(number=PICKS)
    def commit(self, number: int) -> None:
        session = self.pick(number)
        for index, _ in self.manager.commit(session.lease, session.tokens, session.num_computed):
            self.write_tables(session, index, 1)
        assert self.manager.commit(session.lease, session.tokens, session.num_computed) == []

    @rule(number=PICKS)
    def extend_match(self, number: int) -> None:
        session = self.pick(number)
        first = len(session.lease.page_ids)
        if session.num_computed != first * self.size:
            return
        added = self.manager.extend_match(session.lease, session.tokens)
        self.write_tables(session, first, len(added))
        session.num_computed += len(added) * self.size
        if added:
            self.begin_state(session)

    @rule(number=PICKS)
    def invalidate(self, number: int) -> None:
        self.manager.invalidate(self.pick(number).lease)

    @rule(number=PICKS)
    def release(self, number: int) -> None:
        session = self.pick(number)
        self.sessions.remove(session)
        lease = session.lease
        self.manager.release(lease, session.tokens, session.num_computed)
        with pytest.raises(LeaseError):
            self.manager.release(lease, session.tokens, session.num_computed)

    @rule(letters=LETTERS, tail=st.integers(1, 3), limit=st.sampled_from([3, 17, 200]))
    def serve_and_go_on(self, letters: str, tail: int, limit: int) -> None:
        """A whole request; a next turn finds all its full pages, because the last window stays for it."""
        self.admit(letters, tail, "")
        session = self.sessions[-1]
        while session.num_computed < len(session.tokens):
            before = session.num_computed
            self.compute_chunk(-1, limit)
            if session.num_computed == before:
                return
        trusted = all(other.lease.is_shareable for other in self.sessions)
        self.release(-1)
        if self.manager.prefix_cache and trusted and self.manager.snapshots is None:
            found = self.manager.match_length([*session.tokens, 0])
            assert found >= session.num_computed // self.size * self.size

    @rule(now=st.sampled_from([False, False, False, True]))
    def flush(self, now: bool) -> None:
        if now:
            self.manager.flush()

    @invariant()
    def the_books_balance(self) -> None:
        self.manager.check_invariants()

    @invariant()
    def every_row_sees_its_own_prefix(self) -> None:
        for session in self.sessions:
            computed = session.num_computed
            numbers = self.prefix_numbers(session.tokens[:computed], session.salt)
            if self.manager.snapshots is not None and computed:
                assert session.state == numbers[-1], "the row began from a state of other tokens"
            for group, window in enumerate(self.windows):
                seen = self.seen(window, computed) if window else range(computed)
                content = self.pools[group][self.slots(session, group, seen.start, computed)]
                assert np.array_equal(content, numbers[seen.start :]), f"group {group}"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for session in self.sessions:
            self.manager.release(session.lease, session.tokens, session.num_computed)
        self.manager.flush()
        assert self.manager.num_free_pages == self.manager.num_usable_pages
        for group in self.manager.windows:
            assert (group.num_free_pages, group.num_promised) == (group.num_usable_pages, 0)


TestGroupsAgainstSimulatedPools = GroupedMachine.TestCase
TestGroupsAgainstSimulatedPools.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
