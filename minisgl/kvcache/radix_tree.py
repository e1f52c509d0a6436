"""Which pages hold the keys and values of which token prefix.

Promise: a page is in the tree once, under exactly the tokens that lead to it, and leaves it only
through `evict`, which never takes a page that someone has locked.

An edge holds a run of pages; S tokens make a page, and every length here is in whole pages. Nodes are
locked along their path to the root, so what hangs below an unlocked node is unlocked too. The order
of eviction holds every unlocked node, the least recently used first and a child always before its
parent; so its head is always a leaf, and eviction needs neither a scan nor a heap.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from minisgl.kvcache.page_allocator import BrokenInvariantError

Tokens = NDArray[np.int32]


class Node:
    """A run of pages below `parent`; the tree alone changes it."""

    __slots__ = ("children", "last_used", "lock_count", "page_ids", "parent", "tokens")

    def __init__(self, tokens: array, page_ids: list[int], parent: "Node | None", lock_count: int) -> None:
        self.tokens = tokens  # int32 [len(page_ids) * S]
        self.page_ids = page_ids
        self.parent = parent  # None: the root
        self.children: dict[bytes, Node] = {}  # by the tokens of the child's first page
        self.lock_count = lock_count  # locks on this node or below it; the root's stays 0
        self.last_used = 0  # the tree's clock when the last lock went


class RadixTree:
    """Page-aligned prefixes of token ids. Token arguments are int32 [n * S], whole pages only.

    `num_pages` and `num_unlocked_pages` (those that `evict` could take) are kept up to date.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_unlocked_pages = 0
        self.root = Node(array("i"), [], None, 0)
        self._clock = 0
        self._eviction_order: OrderedDict[Node, None] = OrderedDict()

    def match_length(self, tokens: Tokens) -> int:
        """How many leading pages of `tokens` are in the tree; changes nothing, not even recency."""
        return sum(matched for _, matched in self._walk(self.root, tokens))

    def lock(self, tokens: Tokens) -> tuple[Node, list[int]]:
        """Lock the longest prefix of `tokens` in the tree; returns where it ends and its page ids.

        Every `lock` needs one `unlock` of the node it returned, or of the one `extend` made of it.
        """
        return self._lock_below(self.root, tokens)

    def extend(self, node: Node, tokens: Tokens, page_ids: list[int]) -> tuple[Node, list[int]]:
        """Add pages below `node` and move the caller's lock of `node` to where they end.

        Args:
            node: what `lock` or `extend` returned to this caller last.
            tokens: int32 [len(page_ids) * S], the tokens that follow `node`.
            page_ids: pages that hold them.

        Returns:
            The node locked now, and the pages the tree had already for the first of these tokens. As
            many of the caller's own `page_ids` stay the caller's; the tree owns the others now.
        """
        end, found = self._lock_below(node, tokens)
        if len(found) == len(page_ids):
            return end, found
        run = array("i")
        run.frombytes(tokens[len(found) * self.page_size :].tobytes())
        own = page_ids[len(found) :]
        self.num_pages += len(own)
        if end.lock_count == 1 and not end.children:  # nobody else is here: make the run longer
            end.tokens.extend(run)
            end.page_ids.extend(own)
            return end, found
        leaf = Node(run, own, end, 1)
        end.children[self._key(leaf)] = leaf
        return leaf, found

    def unlock(self, node: Node) -> None:
        """Give up one lock; what no one else has locked is now the most recently used."""
        self._clock += 1
        while node.parent is not None:
            if node.lock_count < 1:
                raise BrokenInvariantError("a lock is given up once: this node has none left")
            node.lock_count -= 1
            if node.lock_count == 0:
                node.last_used = self._clock
                self._eviction_order[node] = None
                self.num_unlocked_pages += len(node.page_ids)
            node = node.parent

    def evict(self, count: int) -> list[int]:
        """Drop the `count` least recently used unlocked pages, or all if there are fewer; O(count).

        A run loses its last pages first, so what is left is still a prefix.
        """
        evicted: list[int] = []
        while len(evicted) < count and self._eviction_order:
            node = next(iter(self._eviction_order))
            surplus = len(node.page_ids) - (count - len(evicted))
            if surplus > 0:
                evicted.extend(node.page_ids[surplus:])
                del node.page_ids[surplus:]
                del node.tokens[surplus * self.page_size :]
            else:
                evicted.extend(node.page_ids)
                assert node.parent is not None
                del node.parent.children[self._key(node)]
                del self._eviction_order[node]
                node.parent = None
        self.num_pages -= len(evicted)
        self.num_unlocked_pages -= len(evicted)
        return evicted

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before their children."""
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def path_page_ids(self, node: Node) -> list[int]:
        """The pages from the root down to the end of `node`."""
        runs: list[list[int]] = []
        while node.parent is not None:
            runs.append(node.page_ids)
            node = node.parent
        return [page_id for run in reversed(runs) for page_id in run]

    def check_invariants(self, locked: Iterable[Node]) -> None:
        """Recompute everything from the nodes and from the locks that are out, in O(pages).

        Args:
            locked: for every lock that has not been given up, its node.

        Raises:
            BrokenInvariantError: names the promise that is broken.
        """
        nodes = list(self.nodes())
        locks_below = Counter(locked)
        unlocked_pages = 0
        for node in reversed(nodes):  # children before their parents
            _require(len(node.page_ids) > 0, "no node but the root is empty")
            _require(len(node.tokens) == len(node.page_ids) * self.page_size, "every page has S tokens")
            _require(node.lock_count == locks_below[node], "a node counts the locks on it and below it")
            if node.parent is not None:
                locks_below[node.parent] += locks_below[node]
            if node.lock_count == 0:
                unlocked_pages += len(node.page_ids)
        for node in [self.root, *nodes]:
            for key, child in node.children.items():
                _require(child.parent is node, "a child knows its parent")
                _require(key == self._key(child), "a child is found by the tokens of its first page")
        _require(locks_below.keys() <= {self.root, *nodes}, "a locked node is in the tree")
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

    def _walk(self, node: Node, tokens: Tokens) -> Iterator[tuple[Node, int]]:
        """The nodes below `node` that `tokens` lead through, each with its number of equal pages (>= 1).

        Only the last may be matched in part. The tree must not change before the walk has ended.
        """
        size = self.page_size
        position = 0
        while len(tokens) - position >= size:
            child = node.children.get(tokens[position : position + size].tobytes())
            if child is None:
                return
            run = len(child.page_ids)
            matched = min(run, (len(tokens) - position) // size)
            if matched > 1:  # the first page is equal, or the key would not have been
                window = tokens[position : position + matched * size]
                differs = np.frombuffer(child.tokens, np.int32, matched * size) != window
                first = int(differs.argmax())
                if differs[first]:
                    matched = first // size
            yield child, matched
            if matched < run:
                return
            position += matched * size
            node = child

    def _lock_below(self, node: Node, tokens: Tokens) -> tuple[Node, list[int]]:
        """Lock what `tokens` lead to below `node`, but not `node` itself: where it ends, its page ids."""
        found: list[int] = []
        end, matched = node, len(node.page_ids)
        for end, matched in self._walk(node, tokens):
            found.extend(end.page_ids[:matched])
        if matched < len(end.page_ids):
            end = self._split(end, matched)
        step = end
        while step is not node:
            if step.lock_count == 0:
                self.num_unlocked_pages -= len(step.page_ids)
                self._eviction_order.pop(step, None)  # a node that _split just made is not in there
            step.lock_count += 1
            assert step.parent is not None
            step = step.parent
        return end, found

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut off the first pages of a run as a node of their own, which the caller locks at once.

        `node` stays the lower part: whoever has locked it keeps the same pages.
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


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise BrokenInvariantError(promise)
