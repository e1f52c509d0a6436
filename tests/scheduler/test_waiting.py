"""What an admission costs: tokens of a cached prefix are compared once, not once for each admission."""

import numpy as np
import pytest
from scheduler_rig import build, drain

from minisgl.kvcache.radix_tree import Node, RadixTree, Tokens
from minisgl.request import SamplingParams
from minisgl.scheduler.queue.policy import MAX_ADMISSIONS_PER_STEP


def count_compared_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, a list of how many tokens the radix tree compares at a time."""
    compared: list[int] = []
    real = RadixTree._num_same_pages

    def counted(tree: RadixTree, node: Node, first: int, tokens: Tokens) -> int:
        compared.append(min((len(node.page_ids) - first) * tree.page_size, len(tokens)))
        return real(tree, node, first, tokens)

    monkeypatch.setattr(RadixTree, "_num_same_pages", counted)
    return compared


@pytest.mark.parametrize("tail", [3, 9], ids=["all cached but the last tokens", "uncached pages at the end"])
@pytest.mark.parametrize("num_pages", [1000, 264], ids=["free pages", "each choice evicts a page"])
def test_the_cached_prefix_of_a_call_is_compared_once_for_all_of_its_choices(
    tail: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_choices = 32
    scheduler, executor, cache = build(num_pages=num_pages, max_rows=num_choices, max_step_tokens=1024)
    other = np.arange(240, dtype=np.int32) % 50
    prefix = np.arange(800, dtype=np.int32) * 7 % 50
    for request_id, prompt in enumerate((other, prefix)):
        scheduler.add(request_id, prompt, SamplingParams(max_tokens=1))
        drain(scheduler, executor)
    assert (cache.num_free_pages < num_choices) == (num_pages == 264)
    prompt = np.concatenate([prefix, np.full(tail, 4, np.int32)])
    compared = count_compared_tokens(monkeypatch)
    scheduler.add_call(10, [prompt], SamplingParams(max_tokens=2), num_choices, 0, True, range(num_choices))
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.chunks) == num_choices
    assert sum(compared) < 2 * len(prompt)
    scheduler.apply(plan, executor.execute(plan))
    scheduler.check_invariants()


def test_requests_behind_a_long_cached_prefix_compare_it_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    num_requests = 24
    scheduler, executor, _ = build(num_pages=1000, max_rows=num_requests, max_step_tokens=1024)
    prefix = np.arange(800, dtype=np.int32) * 7 % 50
    scheduler.add(0, prefix, SamplingParams(max_tokens=1))
    drain(scheduler, executor)
    compared = count_compared_tokens(monkeypatch)
    for request_id in range(1, 1 + num_requests):
        question = np.full(9, request_id, np.int32)
        scheduler.add(request_id, np.concatenate([prefix, question]), SamplingParams(max_tokens=2))
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.chunks) == num_requests
    assert sum(compared) < 1.2 * num_requests * len(prefix)
    scheduler.apply(plan, executor.execute(plan))
    scheduler.check_invariants()


def test_a_step_admits_so_few_requests_that_it_does_not_wait_for_the_host() -> None:
    num_requests = MAX_ADMISSIONS_PER_STEP + 10
    scheduler, executor, _ = build(num_pages=1000, max_rows=num_requests, max_step_tokens=4096)
    prompt, params = np.arange(9, dtype=np.int32), SamplingParams(max_tokens=4)
    scheduler.add_call(0, [prompt], params, num_requests, 0, False, range(num_requests))
    num_chunks = []
    for _ in range(3):
        plan = scheduler.plan()
        assert plan is not None
        num_chunks.append(len(plan.chunks))
        scheduler.apply(plan, executor.execute(plan))
        scheduler.check_invariants()
    assert num_chunks == [MAX_ADMISSIONS_PER_STEP, 10, 0]
