"""The scheduler with window groups: test_scheduler_workloads.py's machine, whose fake engine checks windows.

Every step fails whose new tokens would see anything but their own prefix in a window group's pages.
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from scheduler_rig import build, drain, prompt_of
from snapshot_checks import WaitChecks
from test_scheduler_workloads import OverlappedScheduler

from minisgl.kvcache.grouped_manager import GroupedCacheManager, WindowGroup
from minisgl.kvcache.window_pages import most_row_pages
from minisgl.request import SamplingParams
from minisgl.scheduler.simulator import Arrival, simulate


class SchedulerWithWindows(OverlappedScheduler):
    """Any history, with one or two window groups whose pools may be just large enough for one row."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        pool_tokens=st.integers(24, 96),
        max_rows=st.integers(1, 6),
        max_step_tokens=st.integers(5, 40),
        chunk_tokens=st.integers(1, 40),
        mixed_step_tokens=st.integers(1, 16),
        output_reserve_tokens=st.sampled_from([0, 0, 4, 64]),
        prefix_cache=st.booleans(),
        eos_one_in=st.sampled_from([0, 3, 12]),
        windows=st.lists(st.integers(2, 20), max_size=2, unique=True),
        num_snapshots=st.sampled_from([None, None, 1, 4, 20]),
        least_saved_tokens=st.sampled_from([1, 5, 512]),
        more_pages=st.integers(0, 20),
        keeps_all=st.booleans(),
        tile_tokens=st.sampled_from([1, 8]),
    )
    def start(  # type: ignore[override]
        self,
        page_size: int,
        pool_tokens: int,
        prefix_cache: bool,
        eos_one_in: int,
        windows: list[int],
        more_pages: int,
        keeps_all: bool,
        tile_tokens: int,
        num_snapshots: int | None,
        least_saved_tokens: int,
        **limits: int,
    ) -> None:
        limits["max_rows"] = min(limits["max_rows"], limits["max_step_tokens"])
        limits["chunk_tokens"] = min(limits["chunk_tokens"], limits["max_step_tokens"])
        limits["mixed_step_tokens"] = min(limits["mixed_step_tokens"], limits["max_step_tokens"])
        self.scheduler, self.executor, self.cache = build(
            num_pages=max(pool_tokens // page_size, 3) + 1,
            page_size=page_size,
            prefix_cache=prefix_cache,
            notes_changes=False,
            eos_one_in=eos_one_in,
            vocab_size=8,
            windows=[
                WindowGroup(window, most_row_pages(window, page_size, tile_tokens) + 1 + more_pages)
                for window in windows
            ],
            keeps_all=keeps_all or not windows,
            tile_tokens=tile_tokens,
            num_snapshots=num_snapshots,
            least_saved_tokens=least_saved_tokens,
            **limits,
        )
        self.waits = WaitChecks(self.scheduler)
        self.launched = []
        self.asked = {}
        self.got = {}
        self.final = {}
        self.prompt_logprobs = {}
        self.aborted = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=4, max_size=30),
        ends=st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=2, max_size=6),
        users=st.booleans(),
    )
    def add_prompts_that_begin_alike(self, prompt: list[int], ends: list[list[int]], users: bool) -> None:
        for number, end in enumerate(ends):
            self.add(prompt + end, 5, 0, True, user="ab"[number % 2] if users else "")

    @precondition(lambda self: len(self.launched) < 2)
    @rule()
    def launch(self) -> None:
        num_before = len(self.launched)
        super().launch()
        self.waits.check(self.launched[-1][0] if len(self.launched) > num_before else None)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "cache"):
            if not isinstance(self.cache, GroupedCacheManager):
                return
            for group in self.cache.windows:
                assert group.num_available_pages == group.num_usable_pages
                assert group.num_promised == 0


SchedulerWithWindows.TestCase.settings = settings(max_examples=70, stateful_step_count=30, deadline=None)
TestSchedulerWithWindows = SchedulerWithWindows.TestCase


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("keeps_all", [False, True])
def test_a_workload_gets_its_tokens_from_windows_that_free_their_pages(
    overlap: bool, keeps_all: bool
) -> None:
    scheduler, executor, _ = build(
        num_pages=200, page_size=4, eos_one_in=40, windows=[WindowGroup(12, 40)], keeps_all=keeps_all
    )
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 50, 60)
    arrivals = []
    for index in range(50):
        own = rng.integers(0, 50, int(rng.integers(1, 60)))
        prompt = np.concatenate([shared[: int(rng.integers(0, 60))], own]).astype(np.int32)
        params = SamplingParams(max_tokens=int(rng.integers(1, 60)), seed=index)
        arrivals.append(Arrival(float(rng.uniform(0, 500)), prompt, params))
    served = simulate(scheduler, executor, arrivals, overlap=overlap)
    for arrival, result in zip(arrivals, served, strict=True):
        room = min(scheduler.config.max_context_tokens - len(arrival.prompt), arrival.params.max_tokens or 0)
        expected = executor.model.expected_tokens(arrival.prompt.tolist(), room, arrival.params.seed or 0)
        assert result.token_ids == expected
    scheduler.check_invariants()
    assert sum(result.num_cached_tokens for result in served) > 300


def test_a_row_holds_its_window_and_not_its_length() -> None:
    scheduler, executor, _ = build(num_pages=64, page_size=4, windows=[WindowGroup(8, 6)])
    scheduler.add(0, prompt_of(*range(50)), SamplingParams(max_tokens=100, seed=1))
    outputs = drain(scheduler, executor)
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == executor.model.expected_tokens(list(range(50)), 100, 1)
    assert scheduler.stats.num_preemptions == 0


def test_a_conversation_goes_on_behind_its_last_answer() -> None:
    """The pages of a row's last window stay when it ends, so the next turn computes only what is new."""
    scheduler, executor, _ = build(num_pages=64, page_size=4, windows=[WindowGroup(8, 8)])
    scheduler.add(0, prompt_of(*range(30)), SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    answer = [token for output in drain(scheduler, executor) for token in output.token_ids]
    scheduler.add(1, prompt_of(*range(30), *answer, 7, 7), SamplingParams(max_tokens=2, seed=1))
    outputs = drain(scheduler, executor)
    assert outputs[-1].num_cached_tokens == 48, "the 49 tokens that were fed have 12 full pages"


def test_prompts_that_wait_for_each_others_windows_end_by_a_preemption() -> None:
    """Prompts share a window of pages, so more get in than later have room for windows of their own."""
    scheduler, executor, _ = build(
        num_pages=64,
        page_size=2,
        windows=[WindowGroup(4, 5)],
        chunk_tokens=2,
        max_step_tokens=4,
        output_reserve_tokens=0,
    )
    prompts = [[0, 1, 2, 3, 4] + [20 + number] * 5 * (number > 0) for number in range(4)]
    scheduler.add(0, prompt_of(*prompts[0]), SamplingParams(max_tokens=1, seed=0))
    drain(scheduler, executor)
    for number in (1, 2, 3):
        scheduler.add(number, prompt_of(*prompts[number]), SamplingParams(max_tokens=1, seed=number))
    for output in drain(scheduler, executor):
        number = output.request_id
        assert output.token_ids == executor.model.expected_tokens(prompts[number], 1, number)
    assert scheduler.stats.num_preemptions == 2, "no request decodes, so they gave way to prompts"


def test_a_conversation_of_linear_attention_goes_on_from_a_snapshot() -> None:
    """At the last page end of the prompt, at one of the answer, and where a prompt branched off."""
    scheduler, executor, _ = build(num_pages=200, page_size=4, num_snapshots=8)
    prompt = list(range(30))

    def cached(*tokens: int) -> int:
        scheduler.add(len(counts), prompt_of(*tokens), SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
        outputs = drain(scheduler, executor)
        answers.append([token for output in outputs for token in output.token_ids])
        assert answers[-1] == executor.model.expected_tokens(list(tokens), 20, 1, stops=False)
        counts.append(outputs[-1].num_cached_tokens)
        return counts[-1]

    counts: list[int] = []
    answers: list[list[int]] = []
    assert cached(*prompt) == 0
    assert cached(*prompt, 1) == 28, "the prompt's last page end"
    assert cached(*prompt, *answers[0], 2) == 48, "the answer's last second page"
    assert cached(*prompt[:20], 3, 3, 3, 3) == 0, "no snapshot is where it branches off"
    assert cached(*prompt[:20], 4, 4, 4, 4) == 20, "but now one is"


def test_snapshots_that_conversations_left_behind_go_first() -> None:
    """Six conversations in turn, with two snapshots for each: every turn finds the one before."""
    scheduler, executor, _ = build(num_pages=2000, page_size=4, num_snapshots=12)
    rng = np.random.default_rng(0)
    told = [rng.integers(4, 50, 40).tolist() for _ in range(6)]
    params = SamplingParams(max_tokens=17, seed=1, ignore_eos=True)
    for turn in range(5):
        for number, prompt in enumerate(told):
            scheduler.add(6 * turn + number, prompt_of(*prompt), params)
            outputs = drain(scheduler, executor)
            assert turn == 0 or outputs[-1].num_cached_tokens >= len(prompt) - 6 - 16
            prompt += [token for output in outputs for token in output.token_ids]
            prompt += rng.integers(4, 50, 6).tolist()


def test_where_a_system_prompt_ends_a_snapshot_stays() -> None:
    scheduler, executor, _ = build(num_pages=2000, page_size=4, num_snapshots=4)
    system = list(range(20))
    cached = []
    for number in range(12):
        own = [4 + number, *range(number, number + 9)]
        scheduler.add(number, prompt_of(*system, *own), SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
        cached.append(drain(scheduler, executor)[-1].num_cached_tokens)
    assert cached == [0, 0, *[20] * 10]


def test_a_prompt_leaves_a_snapshot_at_its_last_page_end_and_is_not_cut() -> None:
    """Not where the conversation so far ends: nothing else branches there. Without snapshots, none."""
    for num_snapshots, expected in ((8, [(30, 28), (11, 8)]), (0, [(30, 0), (51, 0)])):
        scheduler, executor, _ = build(
            num_pages=200, page_size=4, num_snapshots=num_snapshots, max_step_tokens=64, chunk_tokens=64
        )
        found = []
        prompt = list(range(30))
        for number in range(2):
            params = SamplingParams(max_tokens=19, seed=1, ignore_eos=True)
            scheduler.add(number, prompt_of(*prompt), params)
            while scheduler.has_work:
                plan = scheduler.plan()
                assert plan is not None
                found += [(one.num_new_tokens, (one.snapshot or (0, 0))[0]) for one in plan.chunks]
                scheduler.apply(plan, executor.execute(plan))
                prompt += [token for output in scheduler.take_outputs() for token in output.token_ids]
            prompt += [7, 7]
        assert found == expected
