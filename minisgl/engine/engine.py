"""The engine: its function `step` drives the scheduler and the model runner.

Promise: `step` returns a final output for every added request, also for refused and aborted ones. Serial and
overlapped execution run the same code and give the same tokens. After a GPU fault nothing here calls CUDA.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from compile_cache.store import OpenCache
from minisgl.config import ResolvedConfig
from minisgl.engine.device_faults import DeviceUse
from minisgl.engine.graphs.rank_compile_cache import publish_compile_cache
from minisgl.engine.graphs.recording import RecordedSteps
from minisgl.engine.model_runner import LaunchedStep, ModelRunner
from minisgl.engine.page_events import PageEventPublisher
from minisgl.engine.watch.pace import StepCounts
from minisgl.engine.watch.profiler import StepProfiler
from minisgl.engine.watch.step_timeline import StepTimeline
from minisgl.engine.watch.watch import EngineWatch
from minisgl.errors import RequestError
from minisgl.grammar.pending import PendingGrammars
from minisgl.ipc.messages import AddRequest
from minisgl.ipc.questions import Status
from minisgl.kvcache.grouped_manager import Cache
from minisgl.kvcache.page_allocator import BrokenInvariantError
from minisgl.kvcache.pool_figures import pool_figures
from minisgl.request import RequestOutput
from minisgl.scheduler.plan import StepPlan, StepResult, TokenMasks
from minisgl.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from minisgl.engine.ranks.follower_link import FollowerLink, Started
    from minisgl.parallel.mesh import Ranks

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests step by step. Not thread-safe: call it from one thread only."""

    def __init__(
        self,
        config: ResolvedConfig,
        scheduler: Scheduler,
        cache: Cache,
        runner: ModelRunner,
        recorded: RecordedSteps,
        compile_cache: OpenCache | None,
        ranks: "Ranks | None",
        followers: "FollowerLink | None",
        grammars: PendingGrammars,
        page_events: PageEventPublisher | None,
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        self.cache = cache
        self.runner = runner
        self._recorded = recorded
        self._compile_cache = compile_cache
        self._ranks = ranks
        self._followers = followers
        self._grammars = grammars
        self.page_events = page_events
        self._launched: deque[LaunchedStep] = deque()
        self._unsampled: LaunchedStep | None = None  # the newest launched step, if it waits for its masks
        self.timeline = StepTimeline()
        self.watch = EngineWatch(scheduler, self._step_counts)
        self.profiler = StepProfiler(Path(config.profile_dir).expanduser() if config.profile_dir else None)
        self.num_broken_counts = 0  # how often `check_at_idle` found lost pages
        self._num_published = self._num_compiled
        self._device = DeviceUse(followers)

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of one request, prompt and output together.

        This is the smallest of the limits of the model, of the settings and of the KV pool.
        """
        return self._scheduler.config.max_context_tokens

    @property
    def num_pages(self) -> int:
        """Pages of the pool that requests can use; with several groups of layers, those of the first."""
        return pool_figures(self.cache)[0].usable

    @property
    def weights_bytes(self) -> int:
        """Bytes of this rank's share of the weights."""
        return sum(parameter.nbytes for parameter in self.runner.model.parameters())

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or return anything."""
        return self._scheduler.has_work

    def add(self, request: AddRequest) -> None:
        """Add a request, or a call with several. A later `step` returns its first outputs or its refusal."""
        data = (request.prompt_ids, *request.more_prompts)
        prompts = [np.frombuffer(prompt_ids, dtype="<i4").astype(np.int32) for prompt_ids in data]
        outputs = [np.frombuffer(token_ids, dtype="<i4").tolist() for token_ids in request.outputs]
        if request.params.needs_tables:
            try:
                self._device.run(lambda: self.runner.allocate_logit_tables())
            except torch.OutOfMemoryError:
                refusal = RequestError(
                    503,
                    "out_of_memory",
                    "no memory is left for penalties, biases and bans; start the server with a lower "
                    "--memory-fraction or --max-running-requests",
                )
                for rank in range(len(prompts) * request.num_choices):
                    self._scheduler.refuse(request.request_id + rank, refusal)
                self.watch.record(time.perf_counter(), request)
                return
        self._scheduler.add_call(
            request.request_id,
            prompts,
            request.params,
            request.num_choices,
            request.priority,
            request.streamed,
            request.seeds,
            request.cache_salt,
            request.user,
            outputs,
        )
        self.watch.record(time.perf_counter(), request)
        if request.params.grammar is not None and request.request_id in self._scheduler.grammars:
            is_new = not request.waiting_since_s  # not sent again by a restart, with all others at once
            self._grammars.compile(request.request_id, request.params.grammar, may_refuse=is_new)

    def abort(self, request_id: int) -> None:
        """Stop a request. A later `step` returns its final ABORT output. Ignores unknown and ended ids."""
        self._scheduler.abort(request_id)

    def abort_all(self) -> None:
        """End all requests and drop their outputs; raises what `step` raises."""
        for request_id in list(self._scheduler.open_requests()[0]):
            self.abort(request_id)
        while self.has_work:
            self.step()

    def step(self) -> list[RequestOutput]:
        """Plan and launch a step, collect this step (with overlap: the one before), and return its outputs.

        Raises:
            DeviceFaultError: this GPU, or another rank's, can't be used any more.
            EngineDeadError: another rank has ended.
        """
        return self._device.run(self._step)

    def _step(self) -> list[RequestOutput]:
        self._sample_waiting()
        for request_id in self._scheduler.grammars.take_abandoned():
            self._grammars.cancel(request_id)
        for request_id, grammar in self._grammars.take_compiled():
            self._scheduler.start_with_grammar(request_id, grammar)
        begin_s = time.perf_counter()
        plan = self._scheduler.plan()
        planned_s = time.perf_counter()
        self.watch.record(planned_s)
        if plan is not None:
            step = self.launch(plan)
            self._launched.append(step)
            launched_s = time.perf_counter()
            self.timeline.record_launch(plan, step.graphs, begin_s, planned_s, launched_s)
            if plan.masked:
                # The device computes this step's logits while the tokens that its masks need are applied, and
                # these leave the engine before the masks are filled.
                self._unsampled = step
                self._apply_until(1)
                if not self.config.overlap:
                    self._sample_waiting()
            if self._recorded.background.is_due:
                self._recorded.background.record_one()  # the device is busy with the launched step meanwhile
                self.watch.pace.recorded_at_s = time.perf_counter()
        elif not self._launched:
            self._grammars.wait()
        # With overlap, one step stays in flight while the next one is planned. Without a plan, none does.
        self._apply_until(1 if self.config.overlap and plan is not None else 0)
        outputs = self._scheduler.take_outputs()
        if self.page_events is not None:
            self.page_events.publish(self.cache.take_changes())
        if plan is None or not self._scheduler.has_work:
            self.watch.rest()
        return outputs

    def _apply_until(self, num_in_flight: int) -> None:
        """Collect and apply the oldest launched steps, until this many are left."""
        while len(self._launched) > num_in_flight:
            step = self._launched.popleft()
            waiting_s = time.perf_counter()
            step.wait()
            collected_s = time.perf_counter()
            result = self.collect(step)
            self._scheduler.apply(step.plan, *result)
            record = self.timeline.record_end(waiting_s, collected_s, time.perf_counter())
            self.watch.count_step(record, self.timeline.newest)
            self.profiler.count_step()

    def _step_counts(self) -> StepCounts:
        decode = self._recorded.decode
        return StepCounts(
            self._num_recompiles,
            decode.num_graph_misses if decode else 0,
            self._scheduler.stats.num_preemptions,
            self.profiler.is_running,
        )

    def _sample_waiting(self) -> None:
        """If a step waits for its masks, queue its second half on all ranks."""
        step, self._unsampled = self._unsampled, None
        if step is None:
            return
        masking_s = time.perf_counter()
        masks = self._scheduler.masks(step.plan, self._grammars.fill_masks)
        if self._followers is not None:
            self._followers.send_masks(masks)
        self.runner.sample(step, masks)
        self.timeline.record_masks(masking_s, time.perf_counter())

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step on all ranks. The scheduler does not learn of it: use `step` for serving."""
        if self._followers is not None:
            self._followers.send(plan)
        return self.runner.launch(plan)

    def collect(self, step: LaunchedStep) -> StepResult:
        """Wait for a launched step. Steps must be collected in the order of their launch."""
        result = self.runner.collect(step)
        if self._followers is not None:
            self._followers.compare_tokens(result.token_ids)
        return result

    def fill_pool(self) -> None:
        """Fill the KV pool with random values for measurements, because zeros are not realistic."""
        with torch.inference_mode():
            for attention in self.runner.model.attention_layers():
                for cache in (attention.k_cache, attention.v_cache):
                    for pages in cache.split(1024):  # in float32, as FP8 can't be drawn
                        pages.copy_(torch.randn(pages.shape, device=pages.device))

    def wait_for_other_ranks(self) -> "list[Started]":
        """Wait until the other ranks are ready, and return their reports of the start.

        Raises:
            EngineDeadError: one has ended.
        """
        return [] if self._followers is None else self._followers.wait_for_starts()

    @property
    def num_missing_graphs(self) -> int:
        """Graphs still to be recorded: `step` records them one by one, and `record_graph` does at once."""
        return self._recorded.background.num_missing

    def record_graph(self) -> None:
        """Record one of the missing graphs. It takes tens of milliseconds, so call it while nothing runs."""
        self._device.run(lambda: self._recorded.background.record_one())

    def record_graphs(self) -> None:
        """Record all missing graphs, so that no recording disturbs a measurement."""
        while self.num_missing_graphs:
            self.record_graph()

    def follow(self, plan: StepPlan, receive_masks: Callable[[], TokenMasks]) -> list[list[int]]:
        """Execute a plan of rank 0 on another rank. Returns the tokens of each step that was collected.

        Args:
            receive_masks: waits for the masks of a plan that has some.
        """
        step = self.runner.launch(plan)
        self._launched.append(step)
        over = []
        if plan.masked:
            while len(self._launched) > 1:
                over.append(self.runner.collect(self._launched.popleft()).token_ids)
            self.runner.sample(step, receive_masks())
        while len(self._launched) > (1 if self.config.overlap else 0):
            over.append(self.runner.collect(self._launched.popleft()).token_ids)
        return over

    def status(self, sequence: int) -> Status:
        """The answer to a ping."""
        stats = self._scheduler.stats
        decode, pace = self._recorded.decode, self.watch.pace
        pace.refresh()
        first, *others = pool_figures(self.cache)
        return Status(
            sequence,
            num_steps=stats.num_steps,
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_free_pages=first.free,
            num_cached_pages=first.cached,
            num_preemptions=stats.num_preemptions,
            num_recompiles=self._num_recompiles,
            num_graph_misses=decode.num_graph_misses if decode else 0,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_output_tokens=stats.num_output_tokens,
            num_broken_counts=self.num_broken_counts,
            num_held_pages=first.held,
            num_held_rows=self._scheduler.num_held_rows,
            num_without_logits=stats.num_without_logits,
            num_without_token=stats.num_without_token,
            step_counts=pace.step_counts,
            step_part_s=pace.part_s,
            gc_s=pace.gc.seconds,
            num_ended=self.watch.lives.num_ended,
            num_moments=self.watch.moments.num,
            request_counts=self.watch.lives.times.counts,
            request_part_s=self.watch.lives.times.seconds,
            window_pages=[[one.window, one.usable, one.free, one.held] for one in others],
        )

    def prepare_grammars(self) -> None:
        """Build what the first grammar needs, in a thread. That takes about a second of Python's lock."""
        self._grammars.prepare()

    def check_at_idle(self) -> None:
        """Recount all pages while nothing runs. If the count is broken, log it and reset the cache.

        A lost page does not end the server. Tests call the same check after every step.
        """
        if self.has_work:
            return
        try:
            self.cache.check_invariants()
            lost = sum(group.held for group in pool_figures(self.cache))
            problem = f"{lost} pages are held though nothing runs" if lost else ""
        except BrokenInvariantError as error:
            problem = str(error)
        if problem:
            logger.error(
                "the page count is broken (a bug, please report it): %s; the cache starts over", problem
            )
            self.num_broken_counts += 1
            self.cache.reset()

    def flush_prefix_cache(self) -> int:
        """Drop the cached keys and values of all finished requests. Returns the number of freed pages."""
        return self.cache.flush()

    @property
    def _num_recompiles(self) -> int:
        """Compilations since the end of the start."""
        decode, kernels = self._recorded.decode, self._recorded.kernels
        return (decode.num_recompiles if decode else 0) + (kernels.count if kernels else 0)

    @property
    def _num_compiled(self) -> int:
        """Number of compilations so far, both in the published compile cache and not yet in it."""
        decode, kernels = self._recorded.decode, self._recorded.kernels
        return (decode.num_recompiles if decode else 0) + (kernels.num_compiled if kernels else 0)

    def close(self) -> None:
        """Wait for launched steps, then release the graphs, the ranks and the compile cache.

        Open requests get no output. `close` may be called twice.

        Raises:
            DeviceFaultError: the launched steps show that the GPU has failed.
        """
        self.watch.close()
        try:
            self._device.finish(self._finish_steps)
        finally:
            try:
                self._grammars.close()
            finally:
                self._release()

    def _finish_steps(self) -> None:
        while self._launched:
            self._launched.popleft().wait()
        self.profiler.close()

    def _release(self) -> None:
        """Let go of the ranks and the compile cache; after a GPU fault without any call of CUDA."""
        if not self._device.has_failed:
            if self._ranks is not None:
                self._recorded.release()  # NCCL waits for the end of graphs that hold its kernels
            if self._followers is not None:
                self._followers.stop()
            if self._ranks is not None:
                self._ranks.leave()  # the other ranks leave at the same time
        if self._followers is not None:
            self._followers.close()  # ranks that were not told to stop are killed
        if self.page_events is not None:
            self.page_events.close()
        if self.runner.cpu_block is not None:
            self.runner.cpu_block.close()
        compile_cache, self._compile_cache = self._compile_cache, None
        if compile_cache is not None:
            if not self._device.has_failed and self._num_compiled > self._num_published:
                publish_compile_cache(compile_cache)
            compile_cache.close()
