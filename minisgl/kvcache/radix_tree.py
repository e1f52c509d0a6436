"""Finds the pages that hold the keys and values of a token prefix.

Promise: a page is in the tree once, under exactly the tokens that lead to it, and leaves it only through
`evict`, which never takes a locked page. A detached node matches no tokens. Tokens with different salts never
share a page: each salt has a root of its own, for as long as that has pages or locks.

An edge holds a run of pages; S tokens make a page, and every length here is in full pages. A lock covers a
node's path to the root, so all nodes below an unlocked node are unlocked, too. The eviction order holds every
unlocked node, least recently used first and a child before its parent; its head is always a leaf.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.kvcache.page_allocator import BrokenInvariantError
from minisgl.kvcache.page_changes import PageChanges

Tokens = NDArray[np.int32]
TokenIds = Sequence[int] | NDArray[np.integer]
"""Token ids >= 0 and < 2**31; an int32 array (numpy's or array("i")) is read without conversion."""


class Node:
    """A run of pages below `parent`; only the tree changes it."""

    __slots__ = ("children", "last_used", "lock_count", "num_cuts", "page_ids", "parent", "salt", "tokens")

    def __init__(
        self,
        tokens: array,
        page_ids: array,
        parent: "Node | None",
        lock_count: int = 0,
        salt: str | None = None,
    ) -> None:
        self.tokens = tokens  # int32 [len(page_ids) * S]
        self.page_ids = page_ids  # int32
        self.parent = parent  # None: a root
        self.salt = salt  # of a root that tokens can match; None: other nodes
        self.children: dict[bytes, Node] = {}  # by the tokens of the child's first page
        self.lock_count = lock_count  # locks on this node or below it
        self.last_used = 0  # the tree's clock when the last lock was released
        self.num_cuts = 0  # how often eviction took pages from the end of the run


class Match(NamedTuple):
    """The longest prefix of some tokens in the tree, as one search found it."""

    num_pages: int
    node: (
        Node | None
    )  # the match ends in its run, or in a parent's if the node was split since; None: no match
    num_cuts: int  # the node's at the search


class RadixTree:
    """Page-aligned prefixes of token ids. Token arguments are int32 [n * S], page ids int32, full pages only.

    `num_pages` and `num_unlocked_pages` (the evictable ones) are always up to date.

    Args:
        changes: is told which pages `find` can find from now on, and which not any more; None: nobody is.
    """

    def __init__(self, page_size: int, changes: PageChanges | None = None) -> None:
        self.page_size = page_size
        self._changes = changes
        self.num_pages = 0
        self.num_unlocked_pages = 0
        self.roots: dict[str, Node] = {}  # by salt; none is without pages and locks
        self._clock = 0
        self._eviction_order: OrderedDict[Node, None] = OrderedDict()
        self._detached: dict[Node, None] = {}  # roots of detached subtrees

    def find(self, tokens: Tokens, earlier: Match | None = None, salt: str = "") -> Match:
        """Find the longest prefix of `tokens` in the tree; changes nothing, not even recency.

        Args:
            earlier: the last match of these same tokens; pages that it found are not compared again.
            salt: only pages that were added with the same one match.
        """
        root = self.roots.get(salt)
        if root is None:
            return Match(0, None, 0)
        node, in_run, num_pages = self._resume(root, earlier)
        node, _, more = self._walk(node, in_run, tokens[num_pages * self.page_size :])
        return Match(num_pages + more, node, node.num_cuts)

    def goes_on(self, match: Match) -> bool:
        """Whether the tree has pages behind the end of a match that `find` has just returned."""
        node = match.node
        if node is None:
            return False
        return bool(node.children) or sum(len(one.page_ids) for one in _path(node)) > match.num_pages

    def lock(self, tokens: Tokens, earlier: Match | None = None, salt: str = "") -> tuple[Node, array]:
        """Lock the longest prefix of `tokens` in the tree; returns its last node and its page ids.

        Every `lock` needs one `unlock`, with the node that the last call for this lock returned: `lock`,
        `lock_below` or `extend`.

        Args:
            earlier, salt: as for `find`.
        """
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = Node(array("i"), array("i"), None, salt=salt)
        root.lock_count += 1
        node, in_run, num_pages = self._resume(root, earlier)
        node, in_run, _ = self._walk(node, in_run, tokens[num_pages * self.page_size :])
        return self._lock_between(root, node, in_run)

    def lock_below(self, node: Node, tokens: Tokens) -> tuple[Node, array]:
        """Move the caller's lock of `node` to the end of the longest run of `tokens` below it.

        Args:
            node: what `lock`, `lock_below` or `extend` returned to this caller last.

        Returns:
            The node that is locked now, and the page ids of the run.
        """
        end, in_run, _ = self._walk(node, len(node.page_ids), tokens)
        return self._lock_between(node, end, in_run)

    def pages_below(self, node: Node, tokens: Tokens) -> array:
        """The pages that `lock_below` would find."""
        end, _, num_pages = self._walk(node, len(node.page_ids), tokens)
        page_ids = array("i")
        for step in reversed(_path(end, node)):
            page_ids.extend(step.page_ids)
        return page_ids[:num_pages]

    def has_page_below(self, node: Node, tokens: Tokens) -> bool:
        """Whether the tree has the first page of `tokens` below `node`."""
        return tokens[: self.page_size].tobytes() in node.children

    def extend(self, node: Node, tokens: Tokens, page_ids: array) -> tuple[Node, array]:
        """Add pages below `node` and move the caller's lock of `node` to where they end.

        Args:
            node: what `lock`, `lock_below` or `extend` returned to this caller last.
            tokens: int32 [len(page_ids) * S], the tokens that follow `node`.
            page_ids: the pages that hold these tokens.

        Returns:
            The node that is locked now, and the n pages that the tree already had for the first of these
            tokens. The caller keeps its first n `page_ids`; the tree owns the others now.
        """
        end, found = self.lock_below(node, tokens)
        if len(found) == len(page_ids):
            return end, found
        data = tokens[len(found) * self.page_size :].tobytes()
        run = array("i")
        run.frombytes(data)
        own = page_ids[len(found) :]
        self.num_pages += len(own)
        if self._changes is not None and (end.page_ids or end.salt is not None):
            parent = end.page_ids[-1] if end.page_ids else None
            self._changes.stored(parent, end.salt or "", data, own[:])
        # If only this caller has locked it, make its run longer. A root has none.
        if end.lock_count == 1 and not end.children and end.parent is not None:
            end.tokens.extend(run)
            end.page_ids.extend(own)
            return end, found
        leaf = Node(run, own, end, 1)
        end.children[self._key(leaf)] = leaf
        return leaf, found

    def unlock(self, node: Node) -> None:
        """Release one lock; nodes without any lock become the most recently used ones."""
        self._clock += 1
        above: Node | None = node
        while above is not None:
            node, above = above, above.parent
            if node.lock_count < 1:
                raise BrokenInvariantError("a lock is given up once: this node has none left")
            node.lock_count -= 1
            if node.lock_count == 0 and above is not None:
                node.last_used = self._clock
                self._eviction_order[node] = None
                self.num_unlocked_pages += len(node.page_ids)
        self._forget_if_unused(node)

    def detach(self, node: Node) -> None:
        """Remove the whole subtree that contains `node`, up to its root, from all later matches.

        Its locks stay, and `extend` may add pages to it. Its unlocked pages are evicted like all others.
        """
        top = node
        while top.parent is not None and top.parent.parent is not None:
            top = top.parent
        root = top.parent
        if root is None or root in self._detached:  # `node` is a root, or is detached already
            return
        key = self._key(top)
        del root.children[key]
        root.lock_count -= top.lock_count
        top.parent = Node(array("i"), array("i"), None, top.lock_count)
        top.parent.children[key] = top
        self._detached[top.parent] = None
        if self._changes is not None:
            for gone in _subtree(top):
                self._changes.removed(gone.page_ids)
        self._forget_if_unused(root)

    def evict(self, count: int) -> list[int]:
        """Remove and return the `count` least recently used unlocked pages, or all of fewer; O(count).

        A run loses its last pages first, so the rest is still a prefix.
        """
        evicted: list[int] = []
        while len(evicted) < count and self._eviction_order:
            node = next(iter(self._eviction_order))
            surplus = len(node.page_ids) - (count - len(evicted))
            if surplus > 0:
                evicted.extend(node.page_ids[surplus:])
                del node.page_ids[surplus:]
                del node.tokens[surplus * self.page_size :]
                node.num_cuts += 1
            else:
                evicted.extend(node.page_ids)
                assert node.parent is not None
                del node.parent.children[self._key(node)]
                self._forget_if_unused(node.parent)
                del self._eviction_order[node]
                node.parent = None
        self.num_pages -= len(evicted)
        self.num_unlocked_pages -= len(evicted)
        if self._changes is not None:
            self._changes.removed(evicted)
        return evicted

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before their children."""
        for root in self._all_roots:
            for child in root.children.values():
                yield from _subtree(child)

    def path_page_ids(self, node: Node) -> array:
        """The pages from the node's root to the end of `node`."""
        page_ids = array("i")
        for step in reversed(_path(node)):
            page_ids.extend(step.page_ids)
        return page_ids

    def check_invariants(self, locked: Iterable[Node]) -> None:
        """Recompute everything from the nodes and the held locks, in O(pages).

        Args:
            locked: the node of each held lock.

        Raises:
            BrokenInvariantError: names the promise that is broken.
        """
        nodes = list(self.nodes())
        locks_below = Counter(locked)
        unlocked_pages = 0
        for node in reversed(nodes):  # children before their parents
            _require(len(node.page_ids) > 0, "no node but a root is empty")
            _require(len(node.tokens) == len(node.page_ids) * self.page_size, "every page has S tokens")
            _require(node.lock_count == locks_below[node], "a node counts the locks on it and below it")
            if node.parent is not None:
                locks_below[node.parent] += locks_below[node]
            if node.lock_count == 0:
                unlocked_pages += len(node.page_ids)
        for root in self._all_roots:
            _require(not root.page_ids and root.parent is None, "a root has no pages")
            _require(root.lock_count == locks_below[root], "a root counts the locks on it and below it")
            _require(bool(root.lock_count or root.children), "a root without locks and pages is forgotten")
        _require(all(root.salt == salt for salt, root in self.roots.items()), "a root is found by its salt")
        for node in [*self._all_roots, *nodes]:
            for key, child in node.children.items():
                _require(child.parent is node, "a child knows its parent")
                _require(key == self._key(child), "a child is found by the tokens of its first page")
        _require(locks_below.keys() <= {*self._all_roots, *nodes}, "a locked node is in the tree")
        page_ids = [page_id for node in nodes for page_id in node.page_ids]
        _require(len(set(page_ids)) == len(page_ids), "a page is in the tree once")
        _require(self.num_pages == len(page_ids), "num_pages counts the pages in the tree")
        _require(self.num_unlocked_pages == unlocked_pages, "num_unlocked_pages counts the unlocked pages")

        earlier: set[Node] = set()
        for node in self._eviction_order:
            _require(node.parent not in earlier, "a child is evicted before its parent")
            earlier.add(node)
        _require(
            earlier == {node for node in nodes if node.lock_count == 0},
            "the eviction order holds every unlocked node and no other",
        )
        times = [node.last_used for node in self._eviction_order]
        _require(times == sorted(times), "the least recently used is evicted first")

    @property
    def _all_roots(self) -> list[Node]:
        return [*self.roots.values(), *self._detached]

    def _forget_if_unused(self, node: Node) -> None:
        """Forget a root that has neither locks nor pages; any other node stays."""
        if node.parent is None and not node.lock_count and not node.children:
            if node.salt is None:
                del self._detached[node]
            else:
                del self.roots[node.salt]

    def _resume(self, root: Node, match: Match | None) -> tuple[Node, int, int]:
        """Where to search on after an earlier match below the same root: a node, how many pages of its run
        match, and how many pages match in all.

        The pages of a node that is still in the tree, and the path to them, have the same tokens as before,
        unless eviction cut the run, which may have got other pages since. Then the search starts anew.
        """
        if match is None or match.node is None:
            return root, 0, 0
        path = _path(match.node)
        top = path[-1].parent if path else match.node
        if top is root and match.node.num_cuts == match.num_cuts:
            left = match.num_pages
            for node in reversed(path):
                if left <= len(node.page_ids):
                    return node, left, match.num_pages
                left -= len(node.page_ids)
        return root, 0, 0

    def _walk(self, node: Node, in_run: int, tokens: Tokens) -> tuple[Node, int, int]:
        """Follow `tokens` down the tree, from behind the first `in_run` pages of the run of `node`.

        Returns:
            The last node that matches, how many pages of its run match, and the number of pages followed.
        """
        size = self.page_size
        position = 0
        while True:
            if in_run < len(node.page_ids):
                same = self._num_same_pages(node, in_run, tokens[position:])
                in_run += same
                position += same * size
                if in_run < len(node.page_ids):
                    break
            child = node.children.get(tokens[position : position + size].tobytes())
            if child is None:
                break
            node, in_run = child, 0
        return node, in_run, position // size

    def _num_same_pages(self, node: Node, first: int, tokens: Tokens) -> int:
        """How many pages of the node's run, from page `first` on, hold the first of `tokens`."""
        size = self.page_size
        num_pages = min(len(node.page_ids) - first, len(tokens) // size)
        if num_pages == 0:
            return 0
        run = np.frombuffer(node.tokens, np.int32, num_pages * size, first * size * node.tokens.itemsize)
        differs = run != tokens[: num_pages * size]
        position = int(differs.argmax())
        return position // size if differs[position] else num_pages

    def _lock_between(self, top: Node, end: Node, in_run: int) -> tuple[Node, array]:
        """Lock the path from below `top` to the first `in_run` pages of `end`.

        Returns:
            The path's last node, and its page ids.
        """
        if in_run < len(end.page_ids):
            end = self._split(end, in_run)
        path = _path(end, top)
        page_ids = array("i")
        for node in reversed(path):
            page_ids.extend(node.page_ids)
        for node in path:
            if node.lock_count == 0:
                self.num_unlocked_pages -= len(node.page_ids)
                self._eviction_order.pop(node, None)  # a new node from _split is not in it
            node.lock_count += 1
        return end, page_ids

    def _split(self, node: Node, num_pages: int) -> Node:
        """Move the first pages of a run into a new parent node and return it; the caller locks it at once.

        `node` remains the lower part, so its locks still cover the same pages.
        """
        assert node.parent is not None
        cut = num_pages * self.page_size
        key = self._key(node)
        upper = Node(node.tokens[:cut], node.page_ids[:num_pages], node.parent, node.lock_count)
        node.parent.children[key] = upper
        del node.tokens[:cut]
        del node.page_ids[:num_pages]
        node.parent = upper
        upper.children[self._key(node)] = node
        return upper

    def _key(self, node: Node) -> bytes:
        return node.tokens[: self.page_size].tobytes()


def int32_tokens(token_ids: TokenIds, start: int, stop: int) -> Tokens:
    """`token_ids[start:stop]` as int32.

    Raises:
        ValueError: a value does not fit into int32 and would become another token.
    """
    part = np.asarray(token_ids[start:stop])
    if part.dtype == np.int32:
        return part
    if part.size == 0 or part.dtype.kind in "iu":
        tokens = part.astype(np.int32)
        if np.array_equal(tokens, part):
            return tokens
    raise ValueError("token ids must be integers that fit into 32 bits")


def _subtree(top: Node) -> Iterator[Node]:
    """`top` and every node below it, parents before their children."""
    pending = [top]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())


def _path(node: Node, top: Node | None = None) -> list[Node]:
    """The nodes from `node` up to the one below `top`, or below the root."""
    path = []
    while node is not top and node.parent is not None:
        path.append(node)
        node = node.parent
    return path


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise BrokenInvariantError(promise)
