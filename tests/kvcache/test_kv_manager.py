"""Directed tests of admit, grow, commit and release, each named after the promise it keeps."""

import gc
import sys
from array import array
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from minisgl.errors import ConfigError
from minisgl.kvcache.manager import KVCacheManager, Lease, LeaseError
from minisgl.kvcache.page_allocator import BrokenInvariantError

PAGE_SIZES = (1, 4, 16, 256)


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens, dtype=np.int32)


def computed(manager: KVCacheManager, tokens: np.ndarray) -> Lease:
    """A lease whose tokens are all in the pool, not committed yet."""
    lease = manager.admit(tokens)
    assert manager.grow(lease, len(tokens)) is not None
    return lease


def run(manager: KVCacheManager, tokens: np.ndarray) -> int:
    """A whole request; returns its cached tokens."""
    lease = computed(manager, tokens)
    manager.release(lease, tokens, len(tokens))
    return lease.num_cached_tokens


def snapshot(manager: KVCacheManager) -> tuple[object, ...]:
    return (
        manager.num_free_pages,
        manager.num_evictable_pages,
        manager.num_cached_pages,
        [
            (id(node), list(node.page_ids), list(node.tokens), node.lock_count)
            for node in manager.tree.nodes()
        ],
        [id(node) for node in manager.tree._eviction_order],
    )


def test_sizes_that_can_not_work_are_config_errors():
    with pytest.raises(ConfigError, match="at least 2 pages"):
        KVCacheManager(num_pages=1, page_size=16)
    with pytest.raises(ConfigError, match="page size"):
        KVCacheManager(num_pages=9, page_size=0)


def test_the_scratch_page_belongs_to_nobody():
    manager = KVCacheManager(num_pages=5, page_size=2)
    assert (manager.num_usable_pages, manager.num_free_pages) == (4, 4)
    lease = computed(manager, prompt(8))
    assert sorted(lease.page_ids) == [1, 2, 3, 4]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_that_is_wholly_cached_leaves_one_token_to_compute(page_size: int, extra: int):
    manager = KVCacheManager(num_pages=16, page_size=page_size)
    tokens = prompt(max(1, 3 * page_size + extra))
    run(manager, tokens)
    lease = manager.admit(tokens)
    assert lease.num_cached_tokens == (len(tokens) - 1) // page_size * page_size
    assert manager.match_length(tokens) == lease.num_cached_tokens < len(tokens)
    manager.check_invariants()
    assert manager.grow(lease, len(tokens)) is not None
    # A full page that had to be computed again: commit finds the first copy and gives ours back.
    full = len(tokens) // page_size
    again = range(lease.num_cached_tokens // page_size, full)
    remaps = manager.commit(lease, tokens, len(tokens))
    assert [index for index, _ in remaps] == list(again)
    assert len(again) == (len(tokens) % page_size == 0)
    manager.release(lease, tokens, len(tokens))
    manager.check_invariants()
    assert manager.num_cached_pages == full


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_abort_during_prefill_leaves_no_page_in_two_places_and_no_lock_behind(page_size: int, share: float):
    manager = KVCacheManager(num_pages=32, page_size=page_size)
    run(manager, prompt(3 * page_size))
    tokens = np.concatenate([prompt(3 * page_size), prompt(5 * page_size + 1, seed=1)])
    lease = computed(manager, tokens)
    assert lease.num_cached_tokens == 3 * page_size
    manager.release(lease, tokens, int(len(tokens) * share))
    manager.check_invariants()
    assert manager.num_evictable_pages == manager.num_cached_pages
    manager.flush()
    assert manager.num_free_pages == manager.num_usable_pages


def test_an_abort_that_comes_with_the_end_can_not_release_a_second_time():
    manager = KVCacheManager(num_pages=9, page_size=2)
    tokens = prompt(7)
    lease, other = computed(manager, tokens), manager.admit(tokens)
    manager.release(lease, tokens, 7)
    before = snapshot(manager)
    for misuse in (
        lambda: manager.release(lease, tokens, 7),
        lambda: manager.release(lease, tokens, 0),
        lambda: manager.commit(lease, tokens, 0),
        lambda: manager.grow(lease, 1),
    ):
        with pytest.raises(LeaseError, match="was released"):
            misuse()
    assert snapshot(manager) == before
    manager.check_invariants()
    manager.release(other, tokens, 0)


def test_a_lease_of_another_manager_is_refused():
    one, two = (KVCacheManager(num_pages=9, page_size=2) for _ in range(2))
    lease = computed(one, prompt(5))
    with pytest.raises(LeaseError, match="another manager"):
        two.release(lease, prompt(5), 5)
    two.check_invariants()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_two_equal_prompts_computed_in_one_step_end_on_the_same_pages(page_size: int):
    manager = KVCacheManager(num_pages=32, page_size=page_size)
    tokens = prompt(4 * page_size + 1)
    one, two = computed(manager, tokens), computed(manager, tokens)
    table = list(two.page_ids)
    assert set(one.page_ids).isdisjoint(table)
    assert manager.commit(one, tokens, len(tokens)) == []
    free = manager.num_free_pages
    remaps = manager.commit(two, tokens, len(tokens))
    full = len(tokens) // page_size
    assert remaps == list(enumerate(one.page_ids[:full]))
    assert manager.num_free_pages == free + full
    for index, page_id in remaps:
        table[index] = page_id
    assert table == list(two.page_ids) == [*one.page_ids[:full], *two.page_ids[full:]]
    manager.check_invariants()
    # None of the pages that either row points at is handed out again.
    other = manager.admit(prompt(1, seed=5))
    grown = manager.grow(other, (manager.num_free_pages + manager.num_evictable_pages) * page_size)
    assert grown is not None
    assert set(grown[1]).isdisjoint({*one.page_ids, *table})


def test_equal_beginnings_computed_in_one_step_share_up_to_where_they_part():
    manager = KVCacheManager(num_pages=32, page_size=4)
    head = prompt(10)
    left, right = (np.concatenate([head, prompt(9, seed=seed)]) for seed in (1, 2))
    one, two = computed(manager, left), computed(manager, right)
    manager.commit(one, left, 19)
    own = list(two.page_ids)
    assert manager.commit(two, right, 19) == [(0, one.page_ids[0]), (1, one.page_ids[1])]
    assert list(two.page_ids[2:]) == own[2:]
    manager.check_invariants()
    assert manager.num_cached_pages == 6


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_not_computed_yet_are_never_found(page_size: int):
    manager = KVCacheManager(num_pages=32, page_size=page_size)
    tokens = prompt(6 * page_size + 1)
    lease = computed(manager, tokens)
    assert manager.match_length(tokens) == 0
    for num_tokens in range(0, len(tokens) + 1, max(1, page_size // 2)):
        manager.commit(lease, tokens, num_tokens)
        assert manager.match_length(tokens) == min(num_tokens, len(tokens) - 1) // page_size * page_size
        manager.check_invariants()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_grow_gives_pages_exactly_at_page_boundaries_also_after_preemption(page_size: int):
    manager = KVCacheManager(num_pages=64, page_size=page_size)
    tokens = prompt(9 * page_size + 1)
    lease = manager.admit(tokens)
    for start in (0, 3 * page_size + 1):
        for num_tokens in range(start, 6 * page_size + 2):
            pages = -(-num_tokens // page_size)
            before = len(lease.page_ids)
            assert manager.grow(lease, num_tokens) == (before, lease.page_ids[before:])
            assert len(lease.page_ids) == max(before, pages)
        manager.release(lease, tokens, 3 * page_size)
        lease = manager.admit(tokens)
        assert lease.num_cached_tokens == 3 * page_size


def test_a_prefix_that_grows_between_match_and_admit_does_no_harm():
    manager = KVCacheManager(num_pages=16, page_size=4)
    tokens = prompt(21)
    other = computed(manager, tokens)
    assert manager.match_length(tokens) == 0
    manager.commit(other, tokens, 21)
    lease = manager.admit(tokens)
    assert lease.num_cached_tokens == 20
    assert manager.grow(lease, 21) == (5, lease.page_ids[5:])
    manager.check_invariants()


def test_a_grow_that_fails_changes_nothing():
    manager = KVCacheManager(num_pages=11, page_size=4)
    run(manager, prompt(12))
    lease = computed(manager, prompt(9, seed=1))
    before, pages = snapshot(manager), list(lease.page_ids)
    room = manager.num_free_pages + manager.num_evictable_pages
    assert manager.grow(lease, (len(pages) + room) * 4 + 1) is None
    assert manager.grow(lease, 10**12) is None
    assert (snapshot(manager), list(lease.page_ids)) == (before, pages)
    grown = manager.grow(lease, (len(pages) + room) * 4)
    assert grown is not None
    assert len(grown[1]) == room
    manager.check_invariants()


def test_grow_evicts_no_more_than_it_needs():
    manager = KVCacheManager(num_pages=11, page_size=4)
    tokens = prompt(32)
    run(manager, tokens)
    lease = manager.admit(prompt(1, seed=1))
    assert manager.grow(lease, 5 * 4) is not None
    assert manager.num_cached_pages == 5
    assert manager.match_length(tokens) == 20, "what is left of a run is its beginning"


def test_many_requests_of_40_and_10_tokens_fit_pages_of_256_as_far_as_pages_go():
    manager = KVCacheManager(num_pages=129, page_size=256)
    leases = []
    for seed in range(200):
        lease = manager.admit(prompt(40, seed))
        if manager.grow(lease, 40) is None:
            manager.release(lease, prompt(40, seed), 0)
            break
        leases.append(lease)
    assert len(leases) == 128
    assert all(manager.grow(lease, 50) == (1, array("i")) for lease in leases)
    manager.check_invariants()


def test_match_has_no_side_effect_at_all():
    manager = KVCacheManager(num_pages=64, page_size=4)
    tokens = prompt(40)
    run(manager, tokens)
    run(manager, np.concatenate([tokens[:20], prompt(20, seed=1)]))
    before = snapshot(manager)
    for length in range(41):
        assert manager.match_length(tokens[:length]) == max(0, length - 1) // 4 * 4
    assert snapshot(manager) == before


def test_admit_makes_a_prefix_recent_and_match_does_not():
    manager = KVCacheManager(num_pages=64, page_size=4)
    first, second = prompt(9), prompt(9, seed=1)
    run(manager, first)
    run(manager, second)
    manager.match_length(first)
    lease = manager.admit(second)
    manager.release(lease, second, 0)
    lease = manager.admit(first)
    manager.release(lease, first, 0)
    needed = manager.num_free_pages + 2
    assert manager.grow(manager.admit(prompt(1, seed=2)), needed * 4) is not None
    assert (manager.match_length(first), manager.match_length(second)) == (8, 0)


def test_a_committed_page_stays_while_its_lease_lives():
    manager = KVCacheManager(num_pages=9, page_size=4)
    tokens = prompt(17)
    lease = computed(manager, tokens)
    manager.commit(lease, tokens, 17)
    assert (manager.num_cached_pages, manager.num_evictable_pages, manager.flush()) == (4, 0, 0)
    assert manager.grow(manager.admit(prompt(1, seed=1)), 4 * 4) is None
    assert manager.match_length(tokens) == 16


def test_a_finished_request_serves_the_next_turn_of_its_conversation():
    manager = KVCacheManager(num_pages=64, page_size=4)
    turn = prompt(10)
    for num_cached_tokens in (0, 12, 24, 36):
        lease = computed(manager, turn)
        assert lease.num_cached_tokens == num_cached_tokens
        answer = prompt(3, seed=len(turn))
        assert manager.grow(lease, len(turn) + 2) is not None
        whole = np.concatenate([turn, answer])
        manager.release(lease, whole, len(whole) - 1)  # the last token was never fed
        turn = np.concatenate([whole, prompt(9, seed=99)])
    assert len(list(manager.tree.nodes())) == 1, "one conversation is one run"


def test_commit_refuses_more_tokens_than_there_are():
    manager = KVCacheManager(num_pages=9, page_size=4)
    tokens = prompt(10)
    lease = manager.admit(tokens)
    manager.grow(lease, 5)
    for num_computed_tokens in (-1, 9, 11):
        with pytest.raises(LeaseError, match="can't be computed"):
            manager.release(lease, tokens, num_computed_tokens)
    manager.check_invariants()
    manager.release(lease, tokens, 5)
    assert manager.num_cached_pages == 1


def test_naive_mode_shares_nothing_and_keeps_nothing():
    manager = KVCacheManager(num_pages=33, page_size=4, prefix_cache=False)
    tokens = prompt(21)
    one, two = computed(manager, tokens), computed(manager, tokens)
    assert manager.commit(one, tokens, 21) == manager.commit(two, tokens, 21) == []
    assert set(one.page_ids).isdisjoint(two.page_ids)
    assert (manager.match_length(tokens), manager.num_cached_pages, manager.flush()) == (0, 0, 0)
    manager.check_invariants()
    manager.release(one, tokens, 21)
    manager.release(two, tokens, 3)
    assert manager.num_free_pages == 32


@pytest.mark.parametrize(
    "kind",
    [list, tuple, lambda t: array("i", t), lambda t: t.astype(np.int64), lambda t: np.repeat(t, 2)[::2]],
    ids=["list", "tuple", "array", "int64", "strided"],
)
def test_every_kind_of_integer_sequence_means_the_same_tokens(kind: Callable):
    manager = KVCacheManager(num_pages=33, page_size=4)
    tokens = prompt(21)
    run(manager, tokens)
    assert manager.match_length(kind(tokens)) == 20
    lease = manager.admit(kind(tokens))
    manager.grow(lease, 21)
    manager.release(lease, kind(tokens), 21)
    assert manager.num_cached_pages == 5


@pytest.mark.parametrize("value", [2**32, 2**31, -(2**31) - 1, 0.5, 2**70])
def test_a_value_that_is_no_int32_never_stands_for_another_token(value: float):
    manager = KVCacheManager(num_pages=9, page_size=2)
    run(manager, np.zeros(5, np.int32))
    with pytest.raises(ValueError, match="token ids"):
        manager.match_length([0, value, 0])  # pyright: ignore[reportArgumentType] (a mistake on purpose)


def test_an_array_that_was_committed_may_grow_and_change_afterwards():
    manager = KVCacheManager(num_pages=9, page_size=2)
    tokens = array("i", [1, 2, 3, 4])
    lease = manager.admit(tokens)
    manager.grow(lease, 4)
    manager.commit(lease, tokens, 4)
    tokens.extend([5, 6])  # an array that numpy still looks at refuses this
    tokens[0] = 9
    assert manager.match_length([1, 2, 3, 4, 5]) == 4


def test_the_cost_of_every_operation_is_independent_of_the_size_of_the_tree():
    def lines(work: Callable[[], object]) -> int:
        """Lines of Python that run inside `work`: a clock that never varies."""
        total = 0

        def tracer(frame: FrameType, event: str, argument: object) -> Callable:
            nonlocal total
            total += event == "line"
            return tracer

        before = sys.gettrace()
        gc.disable()  # a collection runs callbacks of other packages
        sys.settrace(tracer)
        try:
            work()
        finally:
            sys.settrace(before)
            gc.enable()
        return total

    def costs(num_requests: int) -> list[int]:
        manager = KVCacheManager(num_pages=num_requests * 4 + 3, page_size=4)
        head = prompt(8)
        for seed in range(num_requests):
            run(manager, np.concatenate([head, prompt(9, seed)]))
        tokens = np.concatenate([head, prompt(9, 5), prompt(8, 10**6)])
        leases: list[Lease] = []
        lease = manager.admit([1])
        manager.grow(lease, manager.num_free_pages * 4)
        assert manager.num_free_pages == 0
        result = [
            lines(lambda: manager.match_length(tokens)),
            lines(lambda: leases.append(manager.admit(tokens))),
            lines(lambda: manager.grow(leases[0], len(tokens))),
            lines(lambda: manager.commit(leases[0], tokens, len(tokens))),
            lines(lambda: manager.grow(lease, len(lease.page_ids) * 4)),
            lines(lambda: manager.release(leases[0], tokens, len(tokens))),
        ]
        manager.check_invariants()
        return result

    assert costs(10) == costs(1000)


def test_the_check_names_what_is_wrong():
    def broken(promise: str, damage: Callable[[KVCacheManager, Lease], object]) -> None:
        manager = KVCacheManager(num_pages=20, page_size=4)
        run(manager, prompt(9, seed=1))
        lease = computed(manager, prompt(14))
        manager.commit(lease, prompt(14), 8)
        manager.check_invariants()
        damage(manager, lease)
        with pytest.raises(BrokenInvariantError, match=promise):
            manager.check_invariants()

    broken("no page is lost", lambda manager, lease: lease.page_ids.pop())
    broken("no page is lost", lambda manager, lease: manager.allocator.allocate(1))
    broken("free and owned by lease 0", lambda manager, lease: manager.allocator.free(lease.page_ids[-1:]))
    broken("free and in the tree", lambda manager, lease: manager.allocator.free(lease.page_ids[:1]))
    broken("only usable pages", lambda manager, lease: lease.page_ids.__setitem__(-1, 0))
    broken("only usable pages", lambda manager, lease: lease.page_ids.__setitem__(-1, 20))
    broken("points at the tree's pages", lambda manager, lease: lease.page_ids.__setitem__(0, 9))
    broken("counts the locks", lambda manager, lease: manager._leases.clear())
    broken("counts the locks", lambda manager, lease: manager.tree.unlock(lease.node))
    broken("counts the pages in the tree", lambda manager, lease: setattr(manager.tree, "num_pages", 3))
    broken("exactly the pages that are marked", lambda manager, lease: manager.allocator._free.pop())
