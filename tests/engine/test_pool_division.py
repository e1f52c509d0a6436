"""How the pool is divided between layers that keep all tokens and layers with windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.engine.start.pool_division import (
    PoolLimits,
    PoolPart,
    cache_groups,
    check_parts,
    divide_pool,
    num_places,
    pages_beside,
)
from minisgl.errors import ConfigError
from minisgl.model_config.kv_groups import KVGroup

GIB = 1 << 30
LIMITS = PoolLimits(
    page_size=16, max_context_tokens=131072, max_rows=256, max_step_tokens=8192, tile_tokens=128
)
GEMMA_3_27B = [16 * 10 * 8192, 16 * 52 * 8192]
"""Bytes of a page in 10 layers that keep all tokens and in 52 with a window of 1,024."""


@given(
    free_mib=st.integers(0, 100_000),
    page_kib=st.lists(st.integers(1, 4000), min_size=1, max_size=4),
    window=st.integers(1, 5000),
    keeps_all=st.booleans(),
    context=st.integers(64, 300_000),
    rows=st.sampled_from([1, 7, 256]),
    step=st.sampled_from([16, 512, 8192]),
)
def test_the_parts_fit_and_no_window_has_more_than_the_group_for_all_tokens(
    free_mib: int, page_kib: list[int], window: int, keeps_all: bool, context: int, rows: int, step: int
) -> None:
    limits = PoolLimits(16, context, rows, step, 128)
    windows = [window * (index + 1) for index in range(len(page_kib))]
    windows[0] *= not keeps_all
    page_bytes = [size * 1024 for size in page_kib]
    free = free_mib << 20
    pages = divide_pool(free, page_bytes, windows, limits)
    if min(pages) >= 2:
        assert sum(own * size for own, size in zip(pages, page_bytes, strict=True)) <= free
    if keeps_all:
        assert max(pages) == pages[0]
    for number in (2, 100, 5000):
        beside = pages_beside(number, page_bytes, windows, limits)
        assert beside[0] == number
        assert min(beside) >= 2


def test_a_model_with_one_group_has_the_whole_pool() -> None:
    limits = LIMITS._replace(max_context_tokens=8192)
    assert divide_pool(10 * GIB, [1 << 20], [0], limits) == [10 * 1024]
    assert divide_pool(1000 * GIB, [1 << 20], [0], limits) == [2 * 256 * 512 + 1]


def test_the_longest_and_the_shortest_requests_both_get_half_of_the_best_division() -> None:
    free = 60 * GIB
    everything, windows = divide_pool(free, GEMMA_3_27B, [0, 1024], LIMITS)
    short = windows / (free / sum(GEMMA_3_27B))
    long = everything / (free / GEMMA_3_27B[0])
    assert short > 0.5
    assert long > 0.5
    before = free // sum(GEMMA_3_27B)
    assert everything > 3 * before


def test_with_much_memory_windows_get_what_all_rows_and_a_step_need_and_not_more() -> None:
    limits = LIMITS._replace(max_rows=8)
    _, windows = divide_pool(300 * GIB, GEMMA_3_27B, [0, 1024], limits)
    assert windows == 2 * 8 * limits.window_pages(1024) + 512 + 1


def test_a_window_that_gets_too_few_pages_for_one_request_is_refused() -> None:
    pages = divide_pool(50 << 20, GEMMA_3_27B, [0, 1024], LIMITS)
    parts = [PoolPart(*part) for part in zip([0, 1024], GEMMA_3_27B, pages, strict=True)]
    with pytest.raises(ConfigError, match="--memory-fraction or --num-pages"):
        check_parts(parts, LIMITS)


def test_layers_that_keep_their_windows_pages_join_the_group_for_all_tokens() -> None:
    groups = (KVGroup((1,), 0, 100), KVGroup((0, 2), 8, 300))
    assert cache_groups(groups, keep_windows=False) == groups
    assert cache_groups(groups, keep_windows=True) == (KVGroup((0, 1, 2), 0, 400),)
    assert cache_groups(groups[1:], keep_windows=True) == (KVGroup((0, 2), 0, 300),)
    assert cache_groups(groups[:1], keep_windows=True) == groups[:1]


def test_the_tree_names_more_places_than_a_model_of_windows_has_pages() -> None:
    parts = [PoolPart(1024, 1 << 20, 500)]
    assert num_places(parts, LIMITS._replace(max_rows=2)) == 2 * 2 * 8192 + 1
    assert num_places([PoolPart(0, 1 << 20, 500), *parts], LIMITS) == 500
