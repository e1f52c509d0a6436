"""What a start leaves behind is no longer looked at by Python's collector."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from minisgl.engine.start.gc_freeze import pause_then_freeze_gc


class Node:
    """Something that can be in a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_a_start_leaves_is_kept_out_of_collections_and_its_garbage_is_not_left() -> None:
    with pause_then_freeze_gc():
        assert not gc.isenabled()
        kept = Node()
        garbage = weakref.ref(Node())
    assert gc.isenabled()
    assert garbage() is None
    assert all(one is not kept for one in gc.get_objects())


def test_garbage_is_collected_again_after_the_start() -> None:
    with pause_then_freeze_gc():
        pass
    garbage = weakref.ref(Node())
    gc.collect()
    assert garbage() is None


def test_a_start_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ValueError, match="no GPU"), pause_then_freeze_gc():
        raise ValueError("no GPU")
    assert gc.isenabled()
