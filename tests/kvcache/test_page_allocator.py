"""The free list: each page once, misuse is an error at that call."""

import pytest

from minisgl.errors import ConfigError
from minisgl.kvcache.page_allocator import SCRATCH_PAGE, BrokenInvariantError, PageAllocator


def test_the_scratch_page_is_never_handed_out():
    assert SCRATCH_PAGE == 0
    allocator = PageAllocator(9)
    assert sorted(allocator.allocate(8)) == list(range(1, 9))
    assert allocator.num_free_pages == 0


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_without_a_usable_page_is_a_config_error(num_pages: int):
    with pytest.raises(ConfigError, match="at least 2 pages"):
        PageAllocator(num_pages)


@pytest.mark.parametrize("count", [-1, 5])
def test_asking_for_more_pages_than_are_free_takes_none(count: int):
    allocator = PageAllocator(5)
    with pytest.raises(ValueError, match="4 are free"):
        allocator.allocate(count)
    assert allocator.num_free_pages == 4
    allocator.check_invariants()


def test_allocating_nothing_from_an_empty_list_gives_nothing():
    allocator = PageAllocator(2)
    allocator.allocate(1)
    assert allocator.allocate(0) == []


def test_a_page_freed_twice_is_an_error_at_the_second_call():
    allocator = PageAllocator(4)
    page_id, _ = allocator.allocate(2)
    allocator.free([page_id])
    with pytest.raises(BrokenInvariantError, match=f"page {page_id} is free already"):
        allocator.free([page_id])
    allocator.check_invariants()
    assert allocator.num_free_pages == 2


@pytest.mark.parametrize("page_id", [-1, SCRATCH_PAGE, 4, 10**9])
def test_a_page_that_was_never_handed_out_can_not_be_freed(page_id: int):
    allocator = PageAllocator(4)
    with pytest.raises(BrokenInvariantError, match="only pages that were handed out"):
        allocator.free([page_id])
    allocator.check_invariants()


def test_every_page_comes_round_again():
    allocator = PageAllocator(6)
    first = allocator.allocate(5)
    allocator.free(first[1:4])
    assert set(allocator.allocate(3)) == set(first[1:4])
    assert allocator.free_page_ids() == ()
