"""The engine: scheduler and model runner joined by one function, `step`.

Promise: everything that is added is answered through `step`, refusals and aborts included; serial and
overlapped execution are the same code and give the same tokens.
"""

import logging
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from compile_cache.store import OpenCache
from minisgl.config import ResolvedConfig
from minisgl.engine.compiled_code import seal
from minisgl.engine.model_runner import LaunchedStep, ModelRunner
from minisgl.engine.profiler import StepProfiler
from minisgl.engine.recording import RecordedSteps
from minisgl.engine.timeline import Timeline
from minisgl.errors import RequestError
from minisgl.kvcache.manager import KVCacheManager
from minisgl.kvcache.page_allocator import BrokenInvariantError
from minisgl.messages import AddRequest, Status
from minisgl.request import RequestOutput
from minisgl.scheduler.plan import StepPlan, StepResult
from minisgl.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from minisgl.engine.follower_link import FollowerLink, Started
    from minisgl.parallel.mesh import Ranks

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests step by step. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        config: ResolvedConfig,
        scheduler: Scheduler,
        cache: KVCacheManager,
        runner: ModelRunner,
        recorded: RecordedSteps,
        compile_cache: OpenCache | None,
        ranks: "Ranks | None",
        followers: "FollowerLink | None",
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        self.cache = cache
        self.runner = runner
        self._recorded = recorded
        self._compile_cache = compile_cache
        self._ranks = ranks
        self._followers = followers
        self._launched: deque[LaunchedStep] = deque()
        self.timeline = Timeline()
        self.profiler = StepProfiler(Path(config.profile_dir).expanduser() if config.profile_dir else None)
        self.num_broken_counts = 0  # times `check_at_idle` found pages lost
        self._num_sealed = self._num_compiled

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt + output of one request: the least of the model's, the flag's and the pool's."""
        return self._scheduler.config.max_context_tokens

    @property
    def num_pages(self) -> int:
        """Pages of the pool that requests can use."""
        return self.cache.num_usable_pages

    @property
    def weights_bytes(self) -> int:
        """Of this rank's share of the model."""
        return sum(parameter.nbytes for parameter in self.runner.model.parameters())

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or return anything."""
        return self._scheduler.has_work

    def add(self, request: AddRequest) -> None:
        """Take in a request; its first output, or its refusal, comes out of a later `step`."""
        prompt = np.frombuffer(request.prompt_ids, dtype="<i4").astype(np.int32)
        if request.params.changes_logits:
            try:
                self.runner.allocate_logit_tables()
            except torch.OutOfMemoryError:
                refusal = RequestError(
                    503,
                    "out_of_memory",
                    "no memory is left for penalties, biases and bans; start the server with a lower "
                    "--memory-fraction or --max-running-requests",
                )
                self._scheduler.refuse(request.request_id, refusal)
                return
        self._scheduler.add(request.request_id, prompt, request.params, request.priority, request.streamed)

    def abort(self, request_id: int) -> None:
        """Stop a request; a later `step` gives its final ABORT output. Unknown and ended ids are ignored."""
        self._scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Plan and launch a step, collect the one before (with overlap) or this one; what came of it.

        Raises:
            EngineDeadError: another rank has ended.
        """
        if self._followers is None:
            return self._step()
        try:
            self._followers.check()
            return self._step()
        except Exception as error:
            cause = self._followers.explain(error)
            raise cause from (error if cause is not error else None)

    def _step(self) -> list[RequestOutput]:
        begin_s = time.perf_counter()
        plan = self._scheduler.plan()
        planned_s = time.perf_counter()
        if plan is not None:
            step = self.launch(plan)
            self._launched.append(step)
            launched_s = time.perf_counter()
            self.timeline.launched(plan, step.graphs, begin_s, planned_s, launched_s)
            if self._recorded.late.is_due:
                self.record_graph()  # here, where the device has work meanwhile
        # With overlap one step stays in flight while the next is planned; without a plan nothing can.
        keep_in_flight = 1 if self.config.overlap and plan is not None else 0
        while len(self._launched) > keep_in_flight:
            step = self._launched.popleft()
            waiting_s = time.perf_counter()
            step.wait()
            collected_s = time.perf_counter()
            result = self.collect(step)
            self._scheduler.apply(step.plan, *result)
            self.timeline.applied(waiting_s, collected_s, time.perf_counter())
            self.profiler.step_is_over()
        return self._scheduler.take_outputs()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step on all ranks, whatever the scheduler has in mind: `step` is for serving."""
        if self._followers is not None:
            self._followers.send(plan)
        return self.runner.launch(plan)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a launched step; in the order of their launch."""
        result = self.runner.collect(step)
        if self._followers is not None:
            self._followers.note(result.token_ids)
        return result

    def fill_pool(self) -> None:
        """Put random keys and values everywhere, to measure with: zeros are no real data."""
        with torch.inference_mode():
            for attention in self.runner.model.attention_layers():
                attention.k_cache.normal_()
                attention.v_cache.normal_()

    def other_ranks(self) -> "list[Started]":
        """What the other ranks say of their start, once all are ready.

        Raises:
            EngineDeadError: one has ended.
        """
        return [] if self._followers is None else self._followers.wait_for_starts()

    @property
    def num_missing_graphs(self) -> int:
        """Graphs that `step` will record between others, or `record_graph` sooner."""
        return self._recorded.late.num_missing

    def record_graph(self) -> None:
        """Record one of the missing graphs: tens of milliseconds, so best called while nothing runs.

        With several ranks they all do, in the order of their steps.
        """
        if self._followers is not None:
            self._followers.record_graph()
        self._recorded.late.record_one()

    def record_graphs(self) -> None:
        """Record all that is missing, so that nothing disturbs what is measured next."""
        while self.num_missing_graphs:
            self.record_graph()

    def follow(self, plan: StepPlan) -> list[list[int]]:
        """Execute a plan of rank 0, as a further rank; the tokens of each step that is over by now."""
        if any(init.rules is not None for init in plan.row_inits):
            self.runner.allocate_logit_tables()
        self._launched.append(self.runner.launch(plan))
        over = []
        while len(self._launched) > (1 if self.config.overlap else 0):
            over.append(self.runner.collect(self._launched.popleft()).token_ids)
        return over

    def status(self, sequence: int) -> Status:
        """The answer to a ping."""
        stats = self._scheduler.stats
        decode, kernels = self._recorded.decode, self._recorded.kernels
        return Status(
            sequence,
            num_steps=stats.num_steps,
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_free_pages=self.cache.num_free_pages,
            num_cached_pages=self.cache.num_cached_pages,
            num_preemptions=stats.num_preemptions,
            num_recompiles=(decode.num_recompiles if decode else 0) + (kernels.count if kernels else 0),
            num_graph_misses=decode.num_graph_misses if decode else 0,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_output_tokens=stats.num_output_tokens,
            num_broken_counts=self.num_broken_counts,
            num_held_pages=self.cache.num_usable_pages
            - self.cache.num_free_pages
            - self.cache.num_evictable_pages,
            num_held_rows=self._scheduler.num_held_rows,
        )

    def check_at_idle(self) -> None:
        """Recount all pages while nothing runs: a broken count is logged, and the cache starts over.

        A lost page must not end a server that could go on; tests call the same check after every step.
        """
        if self.has_work:
            return
        try:
            self.cache.check_invariants()
            lost = self.cache.num_usable_pages - self.cache.num_free_pages - self.cache.num_evictable_pages
            problem = f"{lost} pages are held though nothing runs" if lost else ""
        except BrokenInvariantError as error:
            problem = str(error)
        if problem:
            logger.error(
                "the page count is broken (a bug, please report it): %s; the cache starts over", problem
            )
            self.num_broken_counts += 1
            self.cache.start_over()

    def flush_prefix_cache(self) -> int:
        """Forget the K/V of all finished requests; returns the pages freed."""
        return self.cache.flush()

    @property
    def _num_compiled(self) -> int:
        """What was compiled so far, and the compile cache has been sealed for or not."""
        decode, kernels = self._recorded.decode, self._recorded.kernels
        return (decode.num_recompiles if decode else 0) + (kernels.num_compiled if kernels else 0)

    def close(self) -> None:
        """Wait for launched steps, let go of them and of the compile cache. Open requests get no answer.

        What is closed may be closed again.
        """
        try:
            while self._launched:
                self.runner.collect(self._launched.popleft())
        finally:
            if self._ranks is not None:
                self._recorded.release()  # NCCL ends no sooner than the graphs in which it is
            if self._followers is not None:
                self._followers.stop()
            if self._ranks is not None:
                self._ranks.leave()  # when the others do
            if self._followers is not None:
                self._followers.close()
            compile_cache, self._compile_cache = self._compile_cache, None
            if compile_cache is not None:
                if self._num_compiled > self._num_sealed:
                    seal(compile_cache)
                compile_cache.close()
