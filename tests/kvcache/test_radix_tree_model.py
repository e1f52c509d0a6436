"""The radix tree against a brute-force model: a dict from a prefix's tokens to its last page.

The model knows no nodes, runs or splits. It counts locks and times of last use page by page, so it
says exactly which pages an eviction must take.
"""

from array import array
from dataclasses import dataclass
from itertools import count

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minisgl.kvcache.radix_tree import Match, Node, RadixTree, Tokens

PAGE_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 63, 64)
LETTERS = st.text("abc", max_size=7) | st.text("ab", min_size=3, max_size=5)
PICKS = st.integers(0, 5)
SALTS = st.sampled_from(["", "", "s", "t"])


@dataclass
class Page:
    page_id: int
    locks: int = 0
    last_used: int = 0


Model = dict[tuple[int, ...], Page]


@dataclass
class Lock:
    node: Node
    prefix: tuple[int, ...]  # tokens
    model: Model  # that has the prefix: the tree's, or one that was detached


class RadixTreeMachine(RuleBasedStateMachine):
    @initialize(page_size=st.sampled_from(PAGE_SIZES))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.models: dict[str, Model] = {"": {}, "s": {}, "t": {}}  # by salt
        self.detached: list[Model] = []
        self.locks: list[Lock] = []
        self.matches: dict[tuple[str, str], Match] = {}  # what the tree found last, however long ago
        self.clock = 0
        self.fresh = count(1)

    def tokens(self, letters: str) -> Tokens:
        """One page per letter; a and b differ in their last token, c from both in its first."""
        table = np.zeros((len(letters), self.page_size), np.int32)
        for row, letter in zip(table, letters, strict=True):
            row[-1] = letter == "b"
            row[0] = 2 if letter == "c" else row[0]
        return table.reshape(-1)

    def prefixes(self, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tokens[:end] for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def longest(self, tokens: tuple[int, ...], salt: str) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        for prefix in self.prefixes(tokens):
            if prefix not in self.models[salt]:
                break
            found = prefix
        return found

    @rule(letters=LETTERS, salt=SALTS, remembers=st.booleans())
    def lock(self, letters: str, salt: str = "", remembers: bool = False) -> None:
        tokens, model = self.tokens(letters), self.models[salt]
        prefix = self.longest(tuple(tokens.tolist()), salt)
        earlier = self.matches.get((salt, letters)) if remembers else None
        node, page_ids = self.tree.lock(tokens, earlier, salt)
        assert list(page_ids) == [model[step].page_id for step in self.prefixes(prefix)]
        for step in self.prefixes(prefix):
            model[step].locks += 1
        self.locks.append(Lock(node, prefix, model))

    @rule(pick=PICKS, letters=LETTERS)
    def extend(self, pick: int, letters: str) -> None:
        if not self.locks:
            self.lock("")
        lock = self.locks[pick % len(self.locks)]
        more = self.tokens(letters)
        own = [next(self.fresh) for _ in letters]
        lock.node, found = self.tree.extend(lock.node, more, array("i", own))
        expected = []
        before = len(lock.prefix)
        lock.prefix += tuple(more.tolist())
        for step in self.prefixes(lock.prefix):
            if len(step) <= before:
                continue
            page_id = own.pop(0)
            if step in lock.model:
                expected.append(lock.model[step].page_id)
            else:
                lock.model[step] = Page(page_id)
            lock.model[step].locks += 1
        assert list(found) == expected

    @rule(pick=PICKS)
    def unlock(self, pick: int) -> None:
        if not self.locks:
            return
        lock = self.locks.pop(pick % len(self.locks))
        self.tree.unlock(lock.node)
        self.clock += 1
        for step in self.prefixes(lock.prefix):
            lock.model[step].locks -= 1
            lock.model[step].last_used = self.clock

    @rule(pick=PICKS)
    def detach(self, pick: int) -> None:
        if not self.locks:
            self.lock("ab")
        lock = self.locks[pick % len(self.locks)]
        self.tree.detach(lock.node)
        first = lock.prefix[: self.page_size]
        found = [salt for salt, model in self.models.items() if model is lock.model]
        if not first or not found:
            return
        model = lock.model
        alike = [prefix for prefix in model if prefix[: self.page_size] == first]
        moved = {prefix: model.pop(prefix) for prefix in alike}
        self.detached.append(moved)
        for other in self.locks:
            if other.model is model and other.prefix[: self.page_size] == first:
                other.model = moved
        assert self.tree.find(np.array(first, np.int32), None, found[0]).num_pages == 0

    @rule(letters=LETTERS, salt=SALTS)
    def visit(self, letters: str, salt: str) -> None:
        """A whole request: what it finds, what it adds, and its end."""
        self.lock(letters, salt)
        self.extend(-1, letters[len(self.locks[-1].prefix) // self.page_size :])
        self.unlock(-1)

    @rule(number=st.integers(0, 9))
    def evict(self, number: int) -> None:
        evicted = self.tree.evict(number)
        expected = []
        for _ in range(number):
            leaves: list[tuple[int, Model, tuple[int, ...]]] = []
            for model in (*self.models.values(), *self.detached):
                parents = {prefix[: -self.page_size] for prefix in model}
                leaves += [
                    (page.last_used, model, prefix)
                    for prefix, page in model.items()
                    if page.locks == 0 and prefix not in parents
                ]
            if not leaves:
                break
            _, model, oldest = min(leaves, key=lambda leaf: leaf[0])
            expected.append(model.pop(oldest).page_id)
        assert sorted(evicted) == sorted(expected)

    @rule(letters=LETTERS, salt=SALTS)
    def match(self, letters: str, salt: str) -> None:
        tokens = self.tokens(letters)
        expected = len(self.longest(tuple(tokens.tolist()), salt))
        assert self.tree.find(tokens, None, salt).num_pages * self.page_size == expected
        found = self.tree.find(tokens, self.matches.get((salt, letters)), salt)
        self.matches[salt, letters] = found
        assert found.num_pages * self.page_size == expected

    @rule(again=st.booleans())
    def match_all_again(self, again: bool) -> None:
        for salt, letters in list(self.matches) if again else ():
            self.match(letters, salt)

    @invariant()
    def the_tree_holds_what_the_model_holds(self) -> None:
        self.tree.check_invariants([lock.node for lock in self.locks])
        pages = [page for model in (*self.models.values(), *self.detached) for page in model.values()]
        assert self.tree.num_pages == len(pages)
        assert self.tree.num_unlocked_pages == sum(page.locks == 0 for page in pages)
        for salt, model in self.models.items():
            root = self.tree.roots.get(salt)
            content: dict[tuple[int, ...], int] = {}
            pending: list[tuple[tuple[int, ...], Node]] = [((), root)] if root else []
            while pending:
                above, node = pending.pop()
                for index, page_id in enumerate(node.page_ids, 1):
                    content[above + tuple(node.tokens[: index * self.page_size])] = page_id
                below = above + tuple(node.tokens)
                pending.extend((below, child) for child in node.children.values())
            assert content == {prefix: page.page_id for prefix, page in model.items()}
            assert (root is None) == (not model and not any(lock.model is model for lock in self.locks))
        held = sorted(page_id for node in self.tree.nodes() for page_id in node.page_ids)
        assert held == sorted(page.page_id for page in pages)
        for lock in self.locks:
            path = [lock.model[prefix].page_id for prefix in self.prefixes(lock.prefix)]
            assert list(self.tree.path_page_ids(lock.node)) == path


TestRadixTreeAgainstTheModel = RadixTreeMachine.TestCase
TestRadixTreeAgainstTheModel.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
