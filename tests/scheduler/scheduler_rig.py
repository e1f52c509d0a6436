"""The scheduler with the real KV manager and a fake engine whose tokens betray any wrong page."""

from collections.abc import Sequence

import numpy as np

from minisgl.kvcache.grouped_manager import Cache, GroupedCacheManager, WindowGroup
from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import RequestOutput
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulator import FakeExecutor, FakeModel

EOS = 3


def prompt_of(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def build(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_rows: int = 8,
    max_step_tokens: int = 32,
    chunk_tokens: int = 32,
    mixed_step_tokens: int = 16,
    max_context_tokens: int | None = None,
    prefix_cache: bool = True,
    eos_one_in: int = 0,
    output_reserve_tokens: int = 64,
    vocab_size: int = 50,
    notes_changes: bool = False,
    windows: Sequence[WindowGroup] = (),
    keeps_all: bool = True,
    tile_tokens: int = 1,
    num_snapshots: int | None = None,
    least_saved_tokens: int = 512,
) -> tuple[Scheduler, FakeExecutor, Cache]:
    cache: Cache
    if windows or num_snapshots is not None:
        cache = GroupedCacheManager(
            num_places=num_pages,
            page_size=page_size,
            keeps_all=keeps_all,
            windows=windows,
            prefix_cache=prefix_cache,
            tile_tokens=tile_tokens,
            num_snapshots=num_snapshots,
            snapshot_pages=2,
        )
    else:
        cache = KVCacheManager(
            num_pages=num_pages, page_size=page_size, prefix_cache=prefix_cache, notes_changes=notes_changes
        )
    config = SchedulerConfig(
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        chunk_tokens=chunk_tokens,
        mixed_step_tokens=mixed_step_tokens,
        max_context_tokens=max_context_tokens or (num_pages - 1) * page_size,
        vocab_size=vocab_size,
        output_reserve_tokens=output_reserve_tokens,
        least_saved_tokens=least_saved_tokens,
        eos_token_ids=(EOS,),
    )
    model = FakeModel(vocab_size=vocab_size, eos_token_id=EOS, eos_one_in=eos_one_in)
    executor = FakeExecutor(
        model,
        num_pages=num_pages if keeps_all else 0,
        page_size=page_size,
        max_rows=max_rows,
        windows=windows,
        num_snapshots=num_snapshots,
    )
    return Scheduler(config, cache), executor, cache


def drain(scheduler: Scheduler, executor: FakeExecutor, max_steps: int = 10_000) -> list[RequestOutput]:
    """Run serially to the end."""
    outputs = scheduler.take_outputs()
    for _ in range(max_steps):
        if not scheduler.has_work:
            return outputs
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(plan, executor.execute(plan))
        scheduler.check_invariants()
        outputs += scheduler.take_outputs()
    raise AssertionError("the scheduler does not come to an end")


def tokens_of(outputs: list[RequestOutput], request_id: int) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.token_ids]
