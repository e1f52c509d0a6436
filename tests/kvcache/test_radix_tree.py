"""Directed tests of the radix tree; the brute-force comparison is in test_radix_tree_model.py."""

import gc
from array import array
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from minisgl.kvcache.page_allocator import BrokenInvariantError
from minisgl.kvcache.radix_tree import Node, RadixTree, Tokens

PAGE_SIZES = (1, 3, 16)


def pages(letters: str, page_size: int) -> Tokens:
    """One page per letter; pages of different letters differ in their last token only."""
    tokens = np.zeros((len(letters), page_size), np.int32)
    tokens[:, -1] = [ord(letter) for letter in letters]
    return tokens.reshape(-1)


class Cache:
    """A tree, with page ids counted up, so that a test can speak in letters."""

    def __init__(self, page_size: int) -> None:
        self.tree = RadixTree(page_size)
        self.page_size = page_size
        self.fresh = count(1)

    def put(self, letters: str) -> array:
        """Insert as one request would, and give the lock up again; returns the pages of the path."""
        node, found = self.tree.lock(pages(letters, self.page_size))
        rest = letters[len(found) :]
        own = array("i", [next(self.fresh) for _ in rest])
        node, duplicates = self.tree.extend(node, pages(rest, self.page_size), own)
        assert not duplicates
        path = self.tree.path_page_ids(node)
        self.tree.unlock(node)
        self.tree.check_invariants([])
        return path

    def match(self, letters: str) -> int:
        return self.tree.find(pages(letters, self.page_size)).num_pages

    def lock(self, letters: str) -> tuple[Node, array]:
        return self.tree.lock(pages(letters, self.page_size))


def count_compared_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, a list of how many pages each comparison may look at."""
    compared: list[int] = []
    real = RadixTree._num_same_pages

    def counted(tree: RadixTree, node: Node, first: int, tokens: Tokens) -> int:
        compared.append(min(len(node.page_ids) - first, len(tokens) // tree.page_size))
        return real(tree, node, first, tokens)

    monkeypatch.setattr(RadixTree, "_num_same_pages", counted)
    return compared


def shape(node: Node) -> object:
    """Everything one can see of a tree, by value."""
    return (
        list(node.tokens),
        list(node.page_ids),
        node.lock_count,
        node.last_used,
        {key: shape(child) for key, child in node.children.items()},
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_match_leaves_the_tree_unchanged(page_size: int):
    cache = Cache(page_size)
    for letters in ("abcdef", "abcxyz", "q"):
        cache.put(letters)
    before = shape(cache.tree.roots[""]), [id(node) for node in cache.tree._eviction_order]
    assert [cache.match(letters) for letters in ("abcd", "abzz", "abcxyzzz", "", "r", "qq")] == [
        4,
        2,
        6,
        0,
        0,
        1,
    ]
    assert (shape(cache.tree.roots[""]), [id(node) for node in cache.tree._eviction_order]) == before
    assert cache.tree.evict(1) == [6], "matching abcd must not have made it recent"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_earlier_match_counts_no_page_that_eviction_took_and_another_replaced(page_size: int):
    cache = Cache(page_size)
    cache.put("abc")
    wanted = pages("abc", page_size)
    earlier = cache.tree.find(wanted)
    assert earlier.num_pages == 3
    assert earlier.node is not None
    cache.tree.evict(1)
    cache.put("abd")
    assert len(earlier.node.page_ids) == 3, "the same node holds abd now"
    assert cache.tree.find(wanted, earlier).num_pages == 2
    node, page_ids = cache.tree.lock(wanted, earlier)
    assert len(page_ids) == 2
    cache.tree.check_invariants([node])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_an_earlier_match_is_found_again_without_comparing_its_tokens(
    page_size: int, monkeypatch: pytest.MonkeyPatch
):
    cache = Cache(page_size)
    cache.put("abcdef")
    wanted = pages("abcdyz", page_size)
    earlier = cache.tree.find(wanted)
    compared = count_compared_pages(monkeypatch)
    cache.tree.unlock(cache.lock("ab")[0])  # splits the run that the match ends in, before its end
    cache.put("abcdxy")  # and where it ends
    compared.clear()
    assert cache.tree.find(wanted, earlier).num_pages == 4
    assert sum(compared) == 0
    cache.put("abcdyz")
    compared.clear()
    assert cache.tree.find(wanted, earlier).num_pages == 6
    assert sum(compared) == 2, "only the pages that are new to the match"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_lock_returns_the_matched_node_and_exactly_its_pages(page_size: int):
    cache = Cache(page_size)
    path = cache.put("abcdef")
    node, page_ids = cache.lock("abcq")
    assert page_ids == path[:3] == cache.tree.path_page_ids(node)
    assert node is not cache.tree.roots[""]
    cache.tree.check_invariants([node])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_lock_covers_the_matched_node_itself_and_nothing_behind_it(page_size: int):
    cache = Cache(page_size)
    path = cache.put("abcdef")
    node, page_ids = cache.lock("abc")
    assert cache.tree.num_unlocked_pages == 3
    assert sorted(cache.tree.evict(100)) == list(path[3:])
    assert cache.match("abcdef") == 3
    cache.tree.check_invariants([node])
    cache.tree.unlock(node)
    assert sorted(cache.tree.evict(100)) == list(page_ids)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_extend_returns_the_pages_to_use_and_keeps_only_the_new_ones(page_size: int):
    cache = Cache(page_size)
    path = cache.put("abcdef")
    root, _ = cache.lock("")
    node, found = cache.tree.extend(root, pages("abcxy", page_size), array("i", [91, 92, 93, 94, 95]))
    assert found == path[:3]
    assert list(cache.tree.path_page_ids(node)) == [*path[:3], 94, 95]
    assert cache.tree.num_pages == 8
    cache.tree.check_invariants([node])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_split_keeps_every_lock_on_its_pages(page_size: int):
    cache = Cache(page_size)
    path = cache.put("abcdef")
    deep, _ = cache.lock("abcdef")
    high, _ = cache.lock("ab")
    middle, _ = cache.lock("abcd")
    cache.tree.check_invariants([deep, high, middle])
    assert cache.tree.path_page_ids(deep) == path
    assert cache.tree.evict(100) == []
    cache.tree.unlock(deep)
    assert sorted(cache.tree.evict(100)) == list(path[4:])
    cache.tree.unlock(middle)
    assert sorted(cache.tree.evict(100)) == list(path[2:4])
    cache.tree.unlock(high)
    cache.tree.check_invariants([])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_eviction_takes_the_exact_number_of_pages_from_the_end_of_the_oldest_run(page_size: int):
    cache = Cache(page_size)
    old, new = cache.put("abcdef"), cache.put("uvwxyz")
    assert sorted(cache.tree.evict(2)) == list(old[4:])
    assert (cache.match("abcdef"), cache.match("uvwxyz")) == (4, 6)
    cache.tree.check_invariants([])
    assert sorted(cache.tree.evict(5)) == sorted([*old[:4], new[5]])
    cache.tree.check_invariants([])


def test_eviction_follows_the_last_use_and_not_the_insertion():
    cache = Cache(4)
    a, b, c = (list(cache.put(letter)) for letter in "abc")
    node, _ = cache.lock("a")
    cache.tree.unlock(node)
    assert [cache.tree.evict(1) for _ in range(4)] == [b, c, a, []]


def test_a_parent_is_evicted_after_its_children_and_before_what_was_used_later():
    cache = Cache(2)
    abx = cache.put("abx")
    aby = cache.put("aby")
    other = cache.put("o")
    assert abx[:2] == aby[:2]
    assert [cache.tree.evict(1)[0] for _ in range(5)] == [abx[2], aby[2], aby[1], aby[0], other[0]]


def test_a_growing_prefix_of_one_request_stays_one_run():
    cache = Cache(2)
    node, _ = cache.lock("")
    for index in range(500):
        node, found = cache.tree.extend(node, pages("z", 2), array("i", [index + 1]))
        assert not found
    assert len(list(cache.tree.nodes())) == 1
    cache.tree.check_invariants([node])


def test_a_run_that_someone_else_has_locked_is_not_made_longer():
    cache = Cache(2)
    cache.put("ab")
    mine, _ = cache.lock("ab")
    yours, _ = cache.lock("ab")
    mine, _ = cache.tree.extend(mine, pages("c", 2), array("i", [77]))
    cache.tree.unlock(mine)
    assert cache.tree.evict(9) == [77], "the other lock covers ab, not c"
    cache.tree.check_invariants([yours])


def test_the_tree_keeps_its_own_copy_of_the_tokens():
    tree = RadixTree(2)
    tokens = np.array([1, 2, 3, 4], np.int32)
    node, _ = tree.extend(tree.lock(tokens[:0])[0], tokens, array("i", [1, 2]))
    tokens[:] = 9
    tree.check_invariants([node])
    assert tree.find(np.array([1, 2, 3, 4], np.int32)).num_pages == 2
    assert tree.find(tokens).num_pages == 0


def test_a_lock_given_up_twice_is_an_error():
    cache = Cache(2)
    cache.put("ab")
    node, _ = cache.lock("ab")
    cache.tree.unlock(node)
    with pytest.raises(BrokenInvariantError, match="given up once"):
        cache.tree.unlock(node)


def test_a_very_deep_tree_needs_no_recursion():
    depth = 5_000
    tree = RadixTree(1)
    tokens = np.arange(depth, dtype=np.int32)
    node, _ = tree.extend(tree.lock(tokens[:0])[0], tokens, array("i", range(1, depth + 1)))
    tree.unlock(node)
    for length in range(depth - 1, 0, -1):  # each cuts one page off the first run
        node, _ = tree.lock(tokens[:length])
        tree.unlock(node)
    assert len(list(tree.nodes())) == depth

    node, page_ids = tree.lock(tokens)
    assert page_ids == tree.path_page_ids(node) == array("i", range(1, depth + 1))
    tree.check_invariants([node])
    tree.unlock(node)
    assert tree.evict(depth // 2) == list(range(depth, depth // 2, -1))
    tree.check_invariants([])
    del tree, node
    gc.collect()


def test_salts_share_nothing_and_leave_nothing_behind():
    cache = Cache(2)
    path = cache.put("abc")
    tokens = pages("abc", 2)
    assert cache.tree.find(tokens, None, "s") == (0, None, 0)
    node, found = cache.tree.lock(tokens, None, "s")
    assert not found
    node, duplicates = cache.tree.extend(node, tokens, array("i", [91, 92, 93]))
    assert not duplicates, "the same tokens with another salt are other pages"
    assert cache.tree.find(tokens, None, "s").num_pages == 3
    assert cache.tree.find(tokens, cache.tree.find(tokens), "s").num_pages == 3
    assert cache.tree.find(tokens, None, "t").num_pages == 0
    cache.tree.check_invariants([node])
    cache.tree.unlock(node)
    assert sorted(cache.tree.evict(6)) == sorted([*path, 91, 92, 93])
    assert not cache.tree.roots, "no root stays for a salt that nobody uses any more"
    early = cache.tree.lock(tokens, None, "s")[0]
    late = cache.tree.lock(tokens, None, "s")[0]
    cache.tree.unlock(early)
    assert cache.tree.extend(late, tokens, array("i", [1, 2, 3]))[0] is not late
    assert cache.tree.find(tokens, None, "s").num_pages == 3, "a root with a lock is the salt's one root"


def test_check_invariants_notices_each_broken_promise():
    def broken(promise: str, damage: Callable[[RadixTree, Node, Node], object]) -> None:
        cache = Cache(2)
        cache.put("abc")
        cache.put("abd")
        cache.put("xy")
        locked, _ = cache.lock("xy")
        cache.tree.check_invariants([locked])
        parent = next(node for node in cache.tree.nodes() if node.children)
        damage(cache.tree, parent, next(iter(parent.children.values())))
        with pytest.raises(BrokenInvariantError, match=promise):
            cache.tree.check_invariants([locked])

    broken("counts the pages in the tree", lambda tree, parent, child: setattr(tree, "num_pages", 5))
    broken("counts the unlocked pages", lambda tree, parent, child: setattr(tree, "num_unlocked_pages", 5))
    broken("a node counts the locks", lambda tree, parent, child: setattr(parent, "lock_count", 1))
    broken("a node counts the locks", lambda tree, parent, child: tree.lock(pages("ab", 2)))
    broken("every page has S tokens", lambda tree, parent, child: child.tokens.pop())
    broken("found by the tokens", lambda tree, parent, child: child.tokens.__setitem__(0, 99))
    broken("knows its parent", lambda tree, parent, child: setattr(child, "parent", tree.roots[""]))
    broken("in the tree once", lambda tree, parent, child: child.page_ids.__setitem__(0, parent.page_ids[0]))
    broken("every unlocked node", lambda tree, parent, child: tree._eviction_order.pop(parent))
    broken("child is evicted before", lambda tree, parent, child: tree._eviction_order.move_to_end(child))
    broken("a root counts the locks", lambda tree, parent, child: setattr(tree.roots[""], "lock_count", 9))
    unused = Node(array("i"), array("i"), None, salt="s")
    broken("root without locks and pages", lambda tree, parent, child: tree.roots.update(s=unused))
    broken("found by its salt", lambda tree, parent, child: setattr(tree.roots[""], "salt", "s"))
    broken("least recently used", lambda tree, parent, child: setattr(child, "last_used", 99))
