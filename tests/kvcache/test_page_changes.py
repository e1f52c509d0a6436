"""What the cache notes of its pages, for routers. The manager's model test compares it with the tree."""

from array import array

import numpy as np

from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.page_changes import AllPagesCleared, PageChanges, PagesRemoved, PagesStored

SIZE = 2


def make(num_pages: int = 8) -> KVCacheManager:
    return KVCacheManager(num_pages=num_pages, page_size=SIZE, notes_changes=True)


def serve(manager: KVCacheManager, tokens: list[int], salt: str = "") -> None:
    lease = manager.admit(tokens, salt=salt)
    assert manager.grow(lease, len(tokens)) is not None
    manager.release(lease, tokens, len(tokens))


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_a_run_of_pages_is_one_change_and_a_known_prefix_none() -> None:
    manager = make()
    serve(manager, [1, 2, 3, 4, 5])
    [stored] = manager.take_changes()
    assert stored == PagesStored(None, "", ids(1, 2, 3, 4), array("i", [1, 2]))
    serve(manager, [1, 2, 3, 4, 9])
    assert manager.take_changes() == []
    serve(manager, [1, 2, 3, 4, 6, 7, 8])
    [stored] = manager.take_changes()
    assert stored == PagesStored(2, "", ids(6, 7), array("i", [3]))


def test_the_salt_comes_with_the_first_page_only() -> None:
    manager = make()
    serve(manager, [1, 2, 3], "s")
    serve(manager, [1, 2, 3, 4, 5], "s")
    first, second = manager.take_changes()
    assert first == PagesStored(None, "s", ids(1, 2), array("i", [1]))
    assert second == PagesStored(1, "", ids(3, 4), array("i", [2]))


def test_a_page_is_known_as_soon_as_it_can_be_found_not_only_when_it_is_computed() -> None:
    manager = make()
    lease = manager.admit([1, 2, 3])
    manager.grow(lease, 3)
    manager.share(lease, [1, 2, 3], 3)
    assert [type(change) for change in manager.take_changes()] == [PagesStored]


def test_evicted_pages_are_one_change() -> None:
    manager = make(num_pages=6)
    serve(manager, [1, 2, 9])
    serve(manager, [3, 4, 9])
    manager.take_changes()
    lease = manager.admit([5] * 10)
    manager.grow(lease, 10)
    [removed] = manager.take_changes()
    assert isinstance(removed, PagesRemoved)
    assert sorted(removed.page_ids) == [1, 2]


def test_invalidated_pages_are_removed_once_and_pages_behind_them_never_stored() -> None:
    manager = make()
    lease = manager.admit([1, 2, 3])
    manager.grow(lease, 3)
    manager.commit(lease, [1, 2, 3], 3)
    other = manager.admit([1, 2, 3, 4, 5])
    manager.grow(other, 5)
    manager.take_changes()
    manager.invalidate(lease)
    assert manager.take_changes() == [PagesRemoved(array("i", [1]))]
    manager.commit(other, [1, 2, 3, 4, 5], 5)  # below a page that nobody finds any more
    manager.release(other, [1, 2, 3, 4, 5], 5)
    manager.release(lease, [1, 2, 3], 3)
    manager.flush()
    assert manager.take_changes() == [AllPagesCleared()]


def test_a_flush_clears_all_or_removes_what_no_request_holds() -> None:
    manager = make()
    serve(manager, [1, 2, 9])
    lease = manager.admit([1, 2, 9])
    serve(manager, [3, 4, 9])
    manager.take_changes()
    manager.flush()
    assert [type(change) for change in manager.take_changes()] == [PagesRemoved]
    manager.release(lease, [1, 2, 9], 2)
    manager.flush()
    assert manager.take_changes() == [AllPagesCleared()]


def test_a_reset_clears_all() -> None:
    manager = make()
    serve(manager, [1, 2, 9])
    manager.take_changes()
    manager.reset()
    assert manager.take_changes() == [AllPagesCleared()]
    serve(manager, [1, 2, 9])
    assert [type(change) for change in manager.take_changes()] == [PagesStored]


def test_without_events_nothing_is_noted() -> None:
    manager = KVCacheManager(num_pages=8, page_size=SIZE)
    serve(manager, [1, 2, 3])
    manager.flush()
    assert manager.take_changes() == []


def test_pages_that_nobody_could_find_are_not_removed() -> None:
    changes = PageChanges()
    changes.removed([1, 2])
    changes.stored(7, "", ids(1, 2), array("i", [1]))
    assert changes.take() == []
