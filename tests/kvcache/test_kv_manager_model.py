"""The manager under random requests, with a simulated pool that knows what every slot really holds.

A slot holds a number that stands for the whole prefix up to its token, as keys and values do. New
pages come poisoned, so a page that is shared wrongly, exchanged wrongly, evicted or freed while a
request still uses it shows up as wrong content.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm_events import Router, cached_prefixes

from minisgl.engine.page_events import PageEventEncoder
from minisgl.kvcache.manager import KVCacheManager, Lease, LeaseError

PAGE_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 63, 64)
LETTERS = st.text("ab", max_size=5) | st.text("ab", min_size=3, max_size=6)
LIMITS = st.sampled_from([1, 5, 17, 64, 200, 10**6, 10**6])
PICKS = st.integers(0, 6)
SALTS = st.sampled_from(["", "", "", "s"])
POISON = -1
MAX_SESSIONS = 6


@dataclass
class Session:
    """One request, and the page table as the device has it: built from what the manager returned."""

    lease: Lease
    tokens: list[int]
    page_table: list[int]
    num_computed_tokens: int
    salt: str


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from(PAGE_SIZES),
        num_pages=st.integers(2, 40),
        prefix_cache=st.sampled_from([True, True, True, True, False]),
    )
    def start(self, page_size: int, num_pages: int, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.manager = KVCacheManager(
            num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache, notes_changes=True
        )
        self.encoder, self.router = PageEventEncoder(page_size), Router()
        self.pool = np.full(num_pages * page_size, POISON)
        self.sessions: list[Session] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self.suspect: set[int] = set()  # pages of invalidated leases that nobody has got anew since

    def prefix_numbers(self, tokens: list[int], salt: str) -> np.ndarray:
        """For each token, a number that is equal for the same token behind the same salt and prefix only."""
        number, numbers = -2 - len(salt), []
        for token in tokens:
            number = self.numbers.setdefault((number, token), len(self.numbers) + 1)
            numbers.append(number)
        return np.array(numbers, np.int64)

    def spell(self, letters: str, tail: int) -> list[int]:
        """A page per letter (a and b differ in the last token only), then a partial page."""
        page = {letter: [0] * (self.page_size - 1) + [ord(letter)] for letter in "ab"}
        return [token for letter in letters for token in page[letter]] + [0] * min(tail, self.page_size)

    def slots(self, session: Session, start: int, stop: int) -> np.ndarray:
        positions = np.arange(start, stop)
        pages = np.array(session.page_table, np.int64)
        return pages[positions // self.page_size] * self.page_size + positions % self.page_size

    def counters(self) -> tuple[int, ...]:
        manager = self.manager
        return manager.num_free_pages, manager.num_evictable_pages, manager.num_cached_pages

    def pick(self, number: int) -> Session:
        if not self.sessions:
            self.admit("ab", 1)
        return self.sessions[number % len(self.sessions)]

    def take_in(self, tokens: list[int], salt: str) -> Session:
        free, _, cached = self.counters()
        expected = self.manager.match_length(tokens, salt)
        lease = self.manager.admit(np.array(tokens, np.int32), salt=salt)
        assert lease.num_cached_tokens == expected == len(lease.page_ids) * self.page_size
        assert expected < len(tokens), "one token must be left to compute"
        assert (self.manager.num_free_pages, self.manager.num_cached_pages) == (free, cached)
        assert not self.suspect & set(lease.page_ids), "a request got keys and values that may be wrong"
        session = Session(lease, tokens, list(lease.page_ids), lease.num_cached_tokens, salt)
        self.sessions.append(session)
        return session

    @rule(letters=LETTERS, tail=st.integers(0, 3), salt=SALTS)
    def admit(self, letters: str, tail: int, salt: str = "") -> None:
        if len(self.sessions) == MAX_SESSIONS:
            self.release(0)
        self.take_in(self.spell(letters, tail) or [7], salt)

    @rule(number=PICKS, letters=LETTERS)
    def generate(self, number: int, letters: str) -> None:
        self.pick(number).tokens += self.spell(letters, 1)

    @rule(number=PICKS, limit=LIMITS, shares=st.booleans())
    def compute_chunk(self, number: int, limit: int, shares: bool = False) -> None:
        """With `shares`, others may have the pages before they are written."""
        session = self.pick(number)
        start = session.num_computed_tokens
        stop = min(start + limit, len(session.tokens))
        free, evictable, cached = self.counters()
        needed = max(0, -(-stop // self.page_size) - len(session.page_table))
        grown = self.manager.grow(session.lease, stop)
        if needed > free + evictable:
            assert grown is None
            assert self.counters() == (free, evictable, cached)
            return
        assert grown is not None
        first, new = grown
        assert (first, len(new)) == (len(session.page_table), needed)
        evicted = max(0, needed - free)
        assert self.counters() == (max(0, free - needed), evictable - evicted, cached - evicted)
        session.page_table += new
        self.suspect -= set(new)
        self.pool.reshape(-1, self.page_size)[list(new)] = POISON
        if shares:
            self.manager.share(session.lease, session.tokens, stop)
            assert session.page_table == list(session.lease.page_ids), "sharing exchanges nothing"
        self.pool[self.slots(session, start, stop)] = self.prefix_numbers(session.tokens, session.salt)[
            start:stop
        ]
        session.num_computed_tokens = stop

    @rule(number=PICKS)
    def commit(self, number: int) -> None:
        session = self.pick(number)
        for index, page_id in self.manager.commit(session.lease, session.tokens, session.num_computed_tokens):
            assert session.page_table[index] != page_id
            session.page_table[index] = page_id
        assert self.manager.commit(session.lease, session.tokens, session.num_computed_tokens) == []

    def is_shareable(self, session: Session) -> bool:
        """Whether neither its lease nor one that it shares pages with is invalidated."""
        return session.lease.is_shareable and not self.suspect & set(session.page_table)

    @rule(number=PICKS)
    def invalidate(self, number: int) -> None:
        session = self.pick(number)
        before, was_trusted = self.counters(), self.is_shareable(session)
        self.manager.invalidate(session.lease)
        assert self.counters() == before
        self.suspect |= set(session.page_table)
        if session.lease.num_tree_pages and was_trusted:
            assert self.manager.match_length(session.tokens, session.salt) == 0
        assert self.manager.commit(session.lease, session.tokens, session.num_computed_tokens) == []

    @rule(number=PICKS)
    def extend_match(self, number: int) -> None:
        session = self.pick(number)
        full = len(session.page_table) * self.page_size
        if session.num_computed_tokens != full:
            return
        all_in_tree = session.lease.num_tree_pages * self.page_size == full
        can_match = all_in_tree and session.lease.is_shareable
        expected = self.manager.match_length(session.tokens, session.salt) if can_match else 0
        session.page_table += self.manager.extend_match(session.lease, session.tokens)
        session.num_computed_tokens = len(session.page_table) * self.page_size
        if self.is_shareable(session) or not can_match:
            assert session.num_computed_tokens == max(expected, full)

    @rule(letters=LETTERS, tail=st.integers(1, 3), count=st.integers(2, 4))
    def a_burst_with_one_prompt_in_one_step(self, letters: str, tail: int, count: int) -> None:
        """Each but the first finds the full pages of the first, before anything is computed."""
        tokens = self.spell(letters, tail)
        for index in range(count):
            self.admit(letters, tail)
            session = self.sessions[-1]
            if index and self.manager.prefix_cache:
                reusable = (len(tokens) - 1) // self.page_size
                assert len(session.page_table) >= min(reusable, self.sessions[-2].lease.num_tree_pages)
            self.compute_chunk(-1, 10**6, shares=True)

    @rule(number=PICKS)
    def release(self, number: int) -> None:
        session = self.pick(number)
        self.sessions.remove(session)
        self.manager.release(session.lease, session.tokens, session.num_computed_tokens)
        before = self.counters()
        with pytest.raises(LeaseError):
            self.manager.release(session.lease, session.tokens, session.num_computed_tokens)
        assert self.counters() == before
        full = session.num_computed_tokens // self.page_size * self.page_size
        found = self.manager.match_length([*session.tokens, 0], session.salt)
        if not self.manager.prefix_cache:
            assert found == 0
        elif self.is_shareable(session):
            assert found >= full

    @rule(number=PICKS)
    def preempt_and_admit_again(self, number: int) -> None:
        session = self.pick(number)
        self.sessions.remove(session)
        self.manager.release(session.lease, session.tokens, session.num_computed_tokens)
        again = self.take_in(session.tokens, session.salt)
        reusable = min(session.num_computed_tokens, len(session.tokens) - 1) // self.page_size
        if self.manager.prefix_cache and self.is_shareable(session):
            assert again.num_computed_tokens >= reusable * self.page_size

    @rule(letters=LETTERS, tail=st.integers(1, 3), salt=SALTS)
    def serve(self, letters: str, tail: int, salt: str) -> None:
        """A whole request, from arrival to its end."""
        self.admit(letters, tail, salt)
        self.compute_chunk(-1, 10**6)
        self.release(-1)

    @rule(letters=LETTERS, tail=st.integers(1, 3))
    def two_equal_prompts_in_one_step(self, letters: str, tail: int) -> None:
        self.admit(letters, tail)
        self.admit(letters, tail)
        for number in (-1, -2):
            self.compute_chunk(number, 10**6)
        for number in (-1, -2):
            self.commit(number)

    @rule(now=st.sampled_from([False, False, False, True]))
    def flush(self, now: bool) -> None:
        if not now:
            return
        free, evictable, cached = self.counters()
        assert self.manager.flush() == evictable
        assert self.counters() == (free + evictable, 0, cached - evictable)

    @invariant()
    def the_books_balance(self) -> None:
        self.manager.check_invariants()
        owned = sum(len(session.page_table) - session.lease.num_tree_pages for session in self.sessions)
        free, evictable, cached = self.counters()
        assert free + cached + owned == self.manager.num_usable_pages
        assert evictable <= cached
        if not self.sessions:
            assert evictable == cached

    @invariant()
    def the_events_tell_exactly_which_prefixes_are_cached(self) -> None:
        self.router.read(self.encoder.encode(self.manager.take_changes()))
        assert self.router.prefixes == cached_prefixes(self.manager)

    @invariant()
    def every_page_table_leads_to_the_right_content(self) -> None:
        for session in self.sessions:
            assert session.page_table == list(session.lease.page_ids)
            computed = session.num_computed_tokens
            content = self.pool[self.slots(session, 0, computed)]
            assert np.array_equal(content, self.prefix_numbers(session.tokens[:computed], session.salt))

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for session in self.sessions:
            self.manager.release(session.lease, session.tokens, session.num_computed_tokens)
        self.manager.flush()
        assert self.manager.num_free_pages == self.manager.num_usable_pages


TestManagerAgainstASimulatedPool = ManagerMachine.TestCase
TestManagerAgainstASimulatedPool.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
