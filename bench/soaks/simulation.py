"""The scheduler and the KV cache with a fake engine: its tokens betray any wrong page, row or order of steps.

`run_slice` serves some thousand requests and checks that nothing is lost, duplicated or held afterwards.
"""

import gc
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
from soaks.requests import Asked, RequestMix, random_requests, soak

from minisgl.benchmark.reports.report import Cell
from minisgl.ipc.messages import AddRequest
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.page_changes import AllPagesCleared, PagesRemoved, PagesStored
from minisgl.request import RequestOutput
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.plan import StepPlan
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.simulator import FakeExecutor, FakeModel

VOCAB_SIZE = 50
NO_EOS = VOCAB_SIZE  # the fake model never samples it
MIX = RequestMix(
    max_prompt_tokens=64, max_output_tokens=32, aborted=0.05, shared=0.4, salted=0.1, prior=0.05, special=0.1
)


class Pool(NamedTuple):
    """One kind of engine; small, so that requests wait and are preempted."""

    page_size: int
    num_pages: int
    max_rows: int
    chunk_tokens: int
    overlap: bool
    prefix_cache: bool


POOLS = (
    Pool(4, 60, 8, 24, True, True),
    Pool(1, 160, 6, 64, True, True),
    Pool(16, 24, 12, 33, False, True),
    Pool(8, 40, 8, 64, True, False),
)


class SimulatedEngine:
    """Scheduler, cache and fake executor behind the engine's `add`, `abort` and `step`."""

    def __init__(self, pool: Pool) -> None:
        context = (pool.num_pages - 1) * pool.page_size
        self.pool = pool
        self.context = min(context, 128)
        self.cache = KVCacheManager(
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            prefix_cache=pool.prefix_cache,
            notes_changes=True,
        )
        config = SchedulerConfig(
            max_rows=pool.max_rows,
            max_step_tokens=64,
            chunk_tokens=pool.chunk_tokens,
            mixed_step_tokens=32,
            max_context_tokens=self.context,
            vocab_size=VOCAB_SIZE,
            output_reserve_tokens=1,
            eos_token_ids=(NO_EOS,),
        )
        self.scheduler = Scheduler(config, self.cache)
        self.model = FakeModel(vocab_size=VOCAB_SIZE, eos_token_id=NO_EOS)
        self._executor = FakeExecutor(
            self.model, num_pages=pool.num_pages, page_size=pool.page_size, max_rows=pool.max_rows
        )
        self._cached: set[int] = set()  # the pages that routers know of
        self._launched: deque[tuple[StepPlan, list[int]]] = deque()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: AddRequest) -> None:
        prompt = np.frombuffer(request.prompt_ids, "<i4").astype(np.int32)
        self.scheduler.add_call(
            request.request_id,
            [prompt],
            request.params,
            1,
            request.priority,
            request.streamed,
            cache_salt=request.cache_salt,
        )

    def abort(self, request_id: int) -> None:
        self.scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        plan = self.scheduler.plan()
        if plan is not None:
            self._launched.append((plan, self._executor.execute(plan)))
        while len(self._launched) > (1 if self.pool.overlap and plan is not None else 0):
            self.scheduler.apply(*self._launched.popleft())
        self.scheduler.journal.take()
        self._follow_changes()
        return self.scheduler.take_outputs()

    def expected(self, asked: Asked) -> list[int]:
        """The tokens that the request gets if nobody aborts it."""
        params = asked.params
        tokens = self.model.expected_tokens(asked.prompt.tolist(), params.max_tokens or 0, params.seed or 0)
        ends = [place for place, token in enumerate(tokens) if token in params.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens

    def _follow_changes(self) -> None:
        for change in self.cache.take_changes():
            match change:
                case PagesStored():
                    assert change.parent is None or change.parent in self._cached, "a page without its prefix"
                    assert self._cached.isdisjoint(change.page_ids), "a page is stored twice"
                    self._cached.update(change.page_ids)
                case PagesRemoved(page_ids):
                    assert self._cached.issuperset(page_ids), "a page is removed twice"
                    self._cached.difference_update(page_ids)
                case AllPagesCleared():
                    self._cached.clear()

    def held(self) -> list[str]:
        """What an idle engine holds though it should not, one line each; empties the prefix cache."""
        self.scheduler.check_invariants()
        wrong = len(self._cached) - self.cache.num_cached_pages
        self.cache.flush()
        self._follow_changes()
        self.cache.check_invariants()
        lost = self.cache.num_usable_pages - self.cache.num_free_pages
        counts = {
            "pages": lost,
            "rows": self.scheduler.num_held_rows,
            "requests": len(self.scheduler.open_requests()[0]),
            "steps": len(self._launched),
            "pages that routers know": len(self._cached) or abs(wrong),
        }
        return [f"{count} {name} are held though nothing runs" for name, count in counts.items() if count]


def run_slice(engine: SimulatedEngine, seed: int, index: int, num_requests: int) -> dict[str, Cell]:
    """One line of the report's table; `problems` are in it as text."""
    rng = np.random.default_rng([seed, index])
    requests = list(random_requests(rng, num_requests, MIX, engine.context, VOCAB_SIZE))
    stats = engine.scheduler.stats
    before = (stats.num_steps, stats.num_preemptions, stats.num_cached_tokens, stats.num_output_tokens)
    began = time.perf_counter()
    problems = soak(engine, requests, rng, 3 * engine.pool.max_rows, expected=engine.expected)
    elapsed_s = time.perf_counter() - began
    problems += engine.held()
    after = (stats.num_steps, stats.num_preemptions, stats.num_cached_tokens, stats.num_output_tokens)
    grown = [now - then for now, then in zip(after, before, strict=True)]
    num_leaving = sum(one.leaves_after is not None for one in requests)
    del requests
    gc.collect()
    return {
        "slice": index,
        "pool": POOLS.index(engine.pool),
        "num_requests": num_requests,
        "num_leaving": num_leaving,
        "num_steps": grown[0],
        "num_preemptions": grown[1],
        "num_cached_tokens": grown[2],
        "num_output_tokens": grown[3],
        "elapsed_s": round(elapsed_s, 2),
        "rss_bytes": resident_bytes(),
        "num_blocks": sys.getallocatedblocks(),
        "problems": "; ".join(problems[:10]),
    }


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process, in bytes (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no resident memory")
