"""Who runs next: turns waiting and running requests into step plans, and results into outputs.

Promise: every request that is added gets exactly one final output and nothing after it, and its row
and pages are given back exactly once, in `_settle`, when no launched step uses them. `plan()` may
run ahead of `apply()` (overlap); steps are applied in the order they were planned.
"""

import logging
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from minisgl.errors import RequestError
from minisgl.kvcache.manager import KVCacheManager
from minisgl.request import FinishReason, Request, RequestOutput, RequestState, SamplingParams
from minisgl.scheduler.arrivals import Arrivals
from minisgl.scheduler.holdings import Holdings
from minisgl.scheduler.logprobs import PromptLogprobs, attach_logprobs
from minisgl.scheduler.plan import PLAIN, Chunk, Extras, StepPlan
from minisgl.scheduler.policy import PREFIX_WINDOW, choose_waiting, prefill_budget_tokens

logger = logging.getLogger(__name__)

_seniority = attrgetter("seniority")
_num_planned_tokens = attrgetter("num_planned_tokens")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits; all counts."""

    max_rows: int
    max_step_tokens: int
    chunk_tokens: int
    mixed_step_tokens: int
    """New tokens in a step that also decodes a streamed request; prompts get half of them at least."""
    max_context_tokens: int
    """Prompt and output of one request; at most what the pool holds."""
    vocab_size: int
    output_reserve_tokens: int = 64
    """Room an admission leaves for the output of each running request: an estimate, not the whole
    max_tokens, which would leave the pool idle; preemption meets the rest."""
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass
class SchedulerStats:
    """Counters since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


class _LaunchedStep(NamedTuple):
    """What `apply` has to know of a planned step."""

    step_id: int
    chunks: list[tuple[Request, int]]  # request, tokens of its feed in the pool after this step
    sampled: list[Request]  # one token comes back for each, in this order


class Scheduler:
    """Decides and books; with its `Holdings` the only writer of requests. No torch, no clock, no I/O."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        pool_tokens = cache.num_usable_pages * cache.page_size
        if config.max_context_tokens > pool_tokens:
            raise ValueError(
                f"max_context_tokens {config.max_context_tokens} exceeds the pool's {pool_tokens} tokens"
            )
        self.config = config
        self.stats = SchedulerStats()
        self._arrivals = Arrivals(
            max_context_tokens=config.max_context_tokens,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            seed=config.seed,
        )
        self._holdings = Holdings(cache, config.max_rows, config.output_reserve_tokens)
        self._requests: dict[int, Request] = {}  # not yet finished
        self._waiting: list[Request] = []  # by seniority
        self._running: list[Request] = []  # holds a row, not finished; by seniority
        self._num_leaving = 0  # finished or preempting requests whose pages come back with a launched step
        self._launched: deque[_LaunchedStep] = deque()
        # Of the last refusal: the request's id, and the pages there were.
        self._blocked_admission: tuple[int, int] | None = None
        self._outputs: list[RequestOutput] = []
        self._prompt_logprobs = PromptLogprobs()
        self._num_plans = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_held_rows(self) -> int:
        """Rows that were handed out and have not come back."""
        return self._holdings.num_rows

    @property
    def has_work(self) -> bool:
        """Something waits, runs, is in flight, or has an output that nobody took."""
        return bool(self._requests or self._launched or self._outputs)

    def add(
        self,
        request_id: int,
        prompt: np.ndarray,
        params: SamplingParams,
        priority: int = 0,
        streamed: bool = True,
    ) -> None:
        """Take in a request. A refusal is an output like any other.

        Args:
            prompt: int32 [tokens].
            streamed: its tokens are read as they come: `mixed_step_tokens` bounds the steps that decode it.
        """
        assert request_id not in self._requests, f"request id {request_id} is in use"
        try:
            request = self._arrivals.make(request_id, prompt, params, priority=priority, streamed=streamed)
        except RequestError as error:
            self.refuse(request_id, error)
            return
        self._prompt_logprobs.want(request)
        self._requests[request_id] = request
        insort(self._waiting, request, key=_seniority)

    def refuse(self, request_id: int, error: RequestError) -> None:
        """Answer a request that is not taken in."""
        self._outputs.append(
            RequestOutput(
                request_id,
                [],
                FinishReason.ERROR,
                error_status=error.status,
                error_code=error.code,
                error_message=error.message,
                error_param=error.param,
            )
        )

    def abort(self, request_id: int) -> None:
        """End a request at the next chance with a final ABORT output; unknown and ended ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._prompt_logprobs.forget(request_id)
            self._outputs.append(self._finish(request, FinishReason.ABORT, []))

    def take_outputs(self) -> list[RequestOutput]:
        """All outputs since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a launched step is applied."""
        sampled: list[Request] = []
        # Oldest first: who needs a page takes it from the youngest, which comes later in this loop.
        for request in self._running.copy():
            num_planned = request.num_planned_tokens
            if num_planned >= request.decode_limit and not self._can_decode(request):
                continue
            request.num_planned_tokens = num_planned + 1
            request.steps_in_flight += 1
            sampled.append(request)
        # Longest first: so decode attention shares out best. The order stays until one comes or goes.
        sampled.sort(key=_num_planned_tokens, reverse=True)
        decode_rows = tuple([request.row for request in sampled])

        chunks: list[Chunk] = []
        launched_chunks: list[tuple[Request, int]] = []
        if self._waiting or len(decode_rows) < len(self._running):
            budget = prefill_budget_tokens(
                len(decode_rows),
                self.config.max_step_tokens,
                self.config.mixed_step_tokens if any(request.streamed for request in sampled) else None,
            )
            prefilling = [r for r in self._running if r.state is RequestState.PREFILL and not r.is_preempting]
            for request in prefilling:
                budget -= self._feed_chunk(request, budget, chunks, launched_chunks, sampled)
            if budget > 0 and self._may_admit:
                # Counted once a step: what is fed below changes nobody else's need.
                to_come = self._holdings.pages_to_come(self._running)
                while budget > 0 and (request := self._admit_next(to_come)) is not None:
                    budget -= self._feed_chunk(request, budget, chunks, launched_chunks, sampled)
                    to_come += self._holdings.pages_to_come([request])

        if not decode_rows and not chunks:
            assert self._launched or not self._running, "requests run, none can go on, nothing is in flight"
            return None
        decode_extras = chunk_extras = PLAIN
        if self._holdings.num_with_extras:
            decode_extras = _extras_of(sampled[: len(decode_rows)])
            chunk_extras = _extras_of(sampled[len(decode_rows) :])
        row_inits, page_updates = self._holdings.take_news()
        plan = StepPlan(
            step_id=self._num_plans,
            row_inits=row_inits,
            page_updates=page_updates,
            decode_rows=decode_rows,
            chunks=tuple(chunks),
            sampled_rows=tuple([request.row for request in sampled]) if chunks else decode_rows,
            decode_extras=decode_extras,
            chunk_extras=chunk_extras,
            decode_lengths=tuple(map(_num_planned_tokens, sampled[: len(decode_rows)])) if chunks else (),
        )
        self._num_plans += 1
        self._launched.append(_LaunchedStep(plan.step_id, launched_chunks, sampled))
        return plan

    def apply(
        self,
        plan: StepPlan,
        token_ids: Sequence[int],
        logprobs: np.ndarray | None = None,
        prompt_logprobs: Sequence[np.ndarray] = (),
    ) -> None:
        """Book a step's results, in the order of a `StepResult`; what follows is in `take_outputs`."""
        step = self._launched.popleft()
        assert step.step_id == plan.step_id, f"step {plan.step_id} applied, but {step.step_id} is next"
        assert len(token_ids) == len(step.sampled)
        self.stats.num_steps += 1
        for request, num_fed in step.chunks:
            self._commit_chunk(request, num_fed)
        if prompt_logprobs:
            for chunk, (request, _), lines in zip(plan.chunks, step.chunks, prompt_logprobs, strict=True):
                self._prompt_logprobs.book(request, chunk, lines)
        outputs = self._outputs
        num_before = len(outputs)
        num_dropped = 0
        for request, token in zip(step.sampled, token_ids, strict=True):
            request.steps_in_flight -= 1
            if request.state is RequestState.FINISHED:  # it ended while this step was in flight
                num_dropped += 1
                self._settle(request)
                continue
            if not request.max_new_tokens:  # only the prompt was of interest
                num_dropped += 1
                outputs.append(self._finish(request, FinishReason.LENGTH, []))
                continue
            request.output.append(token)
            if token in request.stop_ids:
                outputs.append(self._finish(request, FinishReason.STOP, [token]))
            elif len(request.output) >= request.max_new_tokens:
                outputs.append(self._finish(request, FinishReason.LENGTH, [token]))
            else:
                outputs.append(RequestOutput(request.request_id, [token], None, request.num_cached_tokens))
                if request.is_preempting:
                    self._settle(request)
        self.stats.num_output_tokens += len(token_ids) - num_dropped
        if logprobs is not None or self._prompt_logprobs:
            attach_logprobs(step.sampled, logprobs, self._prompt_logprobs, outputs[num_before:])

    def check_invariants(self) -> None:
        """Recompute what must hold between any two calls; for tests.

        Raises:
            AssertionError: names the broken promise.
        """
        holders = list(self._running)
        in_flight: dict[int, int] = {}
        leaving: dict[int, Request] = {}
        for step in self._launched:
            chunk_requests = [request for request, _ in step.chunks]
            for request in {id(r): r for r in [*step.sampled, *chunk_requests]}.values():
                in_flight[id(request)] = in_flight.get(id(request), 0) + 1
                if request.state is RequestState.FINISHED:
                    leaving[id(request)] = request
        holders += leaving.values()
        self._holdings.check_invariants(holders)
        for request in holders:
            assert request.steps_in_flight == in_flight.get(id(request), 0), "steps_in_flight is off"
        for request in self._waiting:
            assert request.state is RequestState.WAITING, "a waiting request has another state"
            assert request.lease is None, "a waiting request holds pages"
            assert request.row == -1, "a waiting request holds a row"
        preempting = [request for request in self._running if request.is_preempting]
        assert self._num_leaving == len(leaving) + len(preempting), "num_leaving is off"
        assert len(self._requests) == len(self._waiting) + len(self._running), "a request is nowhere"
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_seniority), "a queue is out of order"

    def _can_decode(self, request: Request) -> bool:
        """The decisions behind a decode that isn't plainly possible: done, not yet decoding, out of pages."""
        if (
            request.state is not RequestState.DECODE
            or request.is_preempting
            or request.num_planned_tokens >= request.last_fed_tokens
        ):
            return False
        while not self._holdings.grow(request, request.num_planned_tokens + 1):
            if self._num_leaving:  # pages are on their way: they come back with a launched step
                return False
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _feed_chunk(
        self,
        request: Request,
        budget: int,
        chunks: list[Chunk],
        launched_chunks: list[tuple[Request, int]],
        sampled: list[Request],
    ) -> int:
        """Plan the next part of a prompt; returns its tokens, 0 when budget or pages don't allow any."""
        start = request.num_planned_tokens
        room_tokens = self._holdings.room_tokens(request)
        num_tokens = min(budget, self.config.chunk_tokens, len(request.feed) - start, room_tokens - start)
        if num_tokens <= 0:
            return 0
        end = start + num_tokens
        samples = end == len(request.feed)
        request.move_to(RequestState.DECODE if samples else RequestState.PREFILL)
        grown = self._holdings.grow(request, end)
        assert grown, "the pages that were counted are not there"
        wants_prompt = self._prompt_logprobs.wants(request)
        targets = request.feed[start + 1 : end + 1].tobytes() if wants_prompt else b""
        chunks.append(Chunk(request.row, start, request.feed[start:end].tobytes(), samples, targets))
        launched_chunks.append((request, end))
        if samples:
            sampled.append(request)
        request.num_planned_tokens = end
        request.steps_in_flight += 1
        return num_tokens

    @property
    def _may_admit(self) -> bool:
        """Whether somebody waits who might get a row, and did not already find no room for these pages."""
        if not self._waiting or not self._holdings.has_free_row:
            return False
        return self._blocked_admission != (self._waiting[0].request_id, self._holdings.num_available_pages)

    def _admit_next(self, pages_to_come: int) -> Request | None:
        """Give the next waiting request a row and its cached prefix; None = nobody can come in now.

        Args:
            pages_to_come: that those who run will still take.
        """
        if not self._may_admit:
            return None
        head = self._waiting[0]
        window = [r for r in self._waiting[:PREFIX_WINDOW] if r.priority == head.priority]
        index = 0
        if len(window) > 1:
            matchable = map(self._prompt_logprobs.matchable, window)
            index = choose_waiting(list(map(self._holdings.match_length, matchable)), head.num_times_skipped)
        taken = self._take(window[index], pages_to_come)
        if not taken and index:  # who comes first must not wait for room that another needs
            index = 0
            taken = self._take(head, pages_to_come)
        if not taken:
            self._blocked_admission = (head.request_id, self._holdings.num_available_pages)
            return None
        request = window[index]
        self._blocked_admission = None
        if index:
            head.num_times_skipped += 1
        del self._waiting[index]
        insort(self._running, request, key=_seniority)
        if not request.was_admitted:  # not the return after a preemption
            request.was_admitted = True
            request.num_cached_tokens = request.num_planned_tokens
            self.stats.num_prompt_tokens += len(request.prompt)
            self.stats.num_cached_tokens += request.num_cached_tokens
        request.move_to(RequestState.PREFILL)
        return request

    def _take(self, request: Request, pages_to_come: int) -> bool:
        """Give a waiting request a row and its cached prefix, if the rest fits; alone it always gets in."""
        matchable = self._prompt_logprobs.matchable(request)
        return self._holdings.take(request, matchable, pages_to_come if self._running else None)

    def _commit_chunk(self, request: Request, num_fed: int) -> None:
        """A chunk is in the pool: share its full pages, and use the tree's where somebody was faster."""
        sampled_too = num_fed == len(request.feed)
        if not sampled_too:
            request.steps_in_flight -= 1
        if request.state is not RequestState.FINISHED and not request.is_preempting:
            self._holdings.commit(request, num_fed)
        if not sampled_too:
            self._settle(request)

    def _finish(self, request: Request, reason: FinishReason, token_ids: list[int]) -> RequestOutput:
        """The one place where a request ends; its row and pages go back now or with its last step."""
        del self._requests[request.request_id]
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            request.move_to(RequestState.FINISHED)
            request.move_to(RequestState.RETIRED)
        else:
            self._running.remove(request)
            request.move_to(RequestState.FINISHED)
            if not request.is_preempting:
                self._num_leaving += 1
            request.is_preempting = False
            self._settle(request)
        return RequestOutput(request.request_id, token_ids, reason, request.num_cached_tokens)

    def _preempt(self, request: Request) -> None:
        """Take the pages of a running request; it will be computed again, from its cached prefix."""
        logger.debug("request %d is preempted at %d tokens", request.request_id, request.num_planned_tokens)
        self.stats.num_preemptions += 1
        self._num_leaving += 1
        request.is_preempting = True
        request.decode_limit = 0
        self._settle(request)

    def _settle(self, request: Request) -> None:
        """Once no step is in flight: retire a finished request, send a preempted one back to the queue."""
        if request.steps_in_flight:
            return
        if request.state is RequestState.FINISHED:
            self._num_leaving -= 1
            self._holdings.give_back(request)
            request.move_to(RequestState.RETIRED)
        elif request.is_preempting:
            self._num_leaving -= 1
            self._holdings.give_back(request)
            request.is_preempting = False
            request.feed = request.tokens()
            if self._prompt_logprobs.wants(request) and not request.output:
                self._prompt_logprobs.want(request)  # all over again: not the whole prompt was computed
            self._running.remove(request)
            request.move_to(RequestState.WAITING)
            insort(self._waiting, request, key=_seniority)


def _extras_of(sampled: list[Request]) -> Extras:
    """What a step has to do for these requests besides sampling."""
    return Extras(
        rules=any(request.changes_logits for request in sampled),
        logprobs=any(request.wants_logprobs for request in sampled),
    )
