"""Who runs next: turns waiting and running requests into step plans, and results into outputs.

Promise: every request that is added gets exactly one final output and nothing after it, and its row
and pages are given back exactly once, in `_retire`, when no launched step uses them. `plan()` may
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
from minisgl.kvcache.manager import KVCacheManager, Lease
from minisgl.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestState,
    SamplingParams,
    TokenLogprobs,
    fit_to_context,
)
from minisgl.scheduler.logprobs import read_logprobs
from minisgl.scheduler.plan import PLAIN, Chunk, Extras, LogitRules, PageUpdate, RowInit, StepPlan
from minisgl.scheduler.policy import (
    PREFIX_WINDOW,
    choose_waiting,
    pages_for,
    prefill_budget_tokens,
)

logger = logging.getLogger(__name__)

_seniority = attrgetter("seniority")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's limits; all counts."""

    max_rows: int
    max_step_tokens: int
    chunk_tokens: int
    mixed_step_tokens: int
    """Prompt tokens in a step that also decodes a streamed request."""
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
    """The only writer of requests. Plain Python: no torch, no clock, no I/O."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        pool_tokens = cache.num_usable_pages * cache.page_size
        if config.max_context_tokens > pool_tokens:
            raise ValueError(
                f"max_context_tokens {config.max_context_tokens} exceeds the pool's {pool_tokens} tokens"
            )
        self.config = config
        self.stats = SchedulerStats()
        self._cache = cache
        self._page_size = cache.page_size
        self._eos_ids = frozenset(config.eos_token_ids)
        self._requests: dict[int, Request] = {}  # not yet finished
        self._waiting: list[Request] = []  # by seniority
        self._running: list[Request] = []  # holds a row, not finished; by seniority
        self._num_leaving = 0  # finished or preempting requests whose pages come back with a launched step
        self._free_rows = list(range(config.max_rows - 1, -1, -1))
        self._launched: deque[_LaunchedStep] = deque()
        self._row_inits: list[RowInit] = []  # carried by the next plan, like the page updates
        self._page_updates: list[PageUpdate] = []
        self._blocked_admission: tuple[int, int] | None = (
            None  # (request id, pages there were) of the last refusal
        )
        self._outputs: list[RequestOutput] = []
        self._num_with_extras = 0  # requests with a row that do more than sample
        # request id -> what is known so far of the prompts that nobody has heard of yet
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._num_arrivals = 0
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
        return self.config.max_rows - len(self._free_rows)

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
            fitted = fit_to_context(len(prompt), params, self.config.max_context_tokens)
            self._check_token_ids(prompt)
            stop_ids = frozenset(params.stop_token_ids)
            stop_ids = stop_ids if params.ignore_eos else stop_ids | self._eos_ids
            self._check_rules(fitted, stop_ids)
        except RequestError as error:
            self.refuse(request_id, error)
            return
        assert fitted.max_tokens is not None
        request = Request(
            request_id,
            prompt,
            fitted,
            priority=priority,
            arrival=self._num_arrivals,
            streamed=streamed,
            seed=params.seed if params.seed is not None else _mix_seed(self.config.seed, self._num_arrivals),
            max_new_tokens=fitted.max_tokens,
            stop_ids=stop_ids,
        )
        if params.prompt_logprobs is not None:
            self._prompt_logprobs[request_id] = []
        self._num_arrivals += 1
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
            self._prompt_logprobs.pop(request_id, None)
            self._outputs.append(self._finish(request, FinishReason.ABORT, []))

    def take_outputs(self) -> list[RequestOutput]:
        """All outputs since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a launched step is applied."""
        decode_rows: list[int] = []
        sampled: list[Request] = []
        # Oldest first: who needs a page takes it from the youngest, which comes later in this loop.
        for request in self._running.copy():
            num_planned = request.num_planned_tokens
            if num_planned >= request.decode_limit and not self._can_decode(request):
                continue
            request.num_planned_tokens = num_planned + 1
            request.steps_in_flight += 1
            decode_rows.append(request.row)
            sampled.append(request)

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
            while budget > 0 and (request := self._admit_next()) is not None:
                budget -= self._feed_chunk(request, budget, chunks, launched_chunks, sampled)

        if not decode_rows and not chunks:
            assert self._launched or not self._running, "requests run, none can go on, nothing is in flight"
            return None
        decode_extras = chunk_extras = PLAIN
        if self._num_with_extras:
            decode_extras = _extras_of(sampled[: len(decode_rows)])
            chunk_extras = _extras_of(sampled[len(decode_rows) :])
        plan = StepPlan(
            step_id=self._num_plans,
            row_inits=tuple(self._row_inits),
            page_updates=tuple(self._page_updates),
            decode_rows=tuple(decode_rows),
            chunks=tuple(chunks),
            sampled_rows=tuple([request.row for request in sampled]) if chunks else tuple(decode_rows),
            decode_extras=decode_extras,
            chunk_extras=chunk_extras,
        )
        self._row_inits.clear()
        self._page_updates.clear()
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
            self._book_prompt_logprobs(plan, step, prompt_logprobs)
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
            self._attach_logprobs(step, logprobs, outputs[num_before:])

    def check_invariants(self) -> None:
        """Recompute what must hold between any two calls; for tests.

        Raises:
            AssertionError: names the broken promise.
        """
        self._cache.check_invariants()
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
        rows = sorted([request.row for request in holders] + self._free_rows)
        assert rows == list(range(self.config.max_rows)), f"rows lost or held twice: {rows}"
        for request in holders:
            assert request.steps_in_flight == in_flight.get(id(request), 0), "steps_in_flight is off"
            assert request.lease is not None, "a request with a row has no lease"
        for request in self._waiting:
            assert request.state is RequestState.WAITING, "a waiting request has another state"
            assert request.lease is None, "a waiting request holds pages"
            assert request.row == -1, "a waiting request holds a row"
        preempting = [request for request in self._running if request.is_preempting]
        assert self._num_leaving == len(leaving) + len(preempting), "num_leaving is off"
        assert len(self._requests) == len(self._waiting) + len(self._running), "a request is nowhere"
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_seniority), "a queue is out of order"

    def _check_token_ids(self, prompt: np.ndarray) -> None:
        if int(prompt.min()) < 0 or int(prompt.max()) >= self.config.vocab_size:
            raise RequestError(
                400, "invalid_token_id", f"token ids must be from 0 to {self.config.vocab_size - 1}"
            )

    def _check_rules(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Refuse rules that name tokens there are not, or that leave none to generate."""
        if not params.changes_logits:
            return
        vocab_size = self.config.vocab_size
        named = {
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words_ids": [token_id for ids in params.bad_words_ids for token_id in ids],
        }
        for param, ids in named.items():
            if ids and max(ids) >= vocab_size:
                message = f"{param}: token ids must be from 0 to {vocab_size - 1}, got {max(ids)}"
                raise RequestError(400, "invalid_token_id", message, param)
        if params.min_tokens and params.allowed_token_ids and stop_ids.issuperset(params.allowed_token_ids):
            raise RequestError(
                400,
                "invalid_value",
                "min_tokens bans the tokens that end the output, and allowed_token_ids allows no others",
                "min_tokens",
            )

    def _book_prompt_logprobs(
        self, plan: StepPlan, step: _LaunchedStep, prompt_logprobs: Sequence[np.ndarray]
    ) -> None:
        for chunk, (request, _), lines in zip(plan.chunks, step.chunks, prompt_logprobs, strict=True):
            found = self._prompt_logprobs.get(request.request_id)
            if found is None or not chunk.targets:
                continue
            num_top = request.params.prompt_logprobs or 0
            for line, token_id in zip(lines, np.frombuffer(chunk.targets, dtype="<i4").tolist(), strict=True):
                found.append(read_logprobs(line, token_id, num_top))

    def _attach_logprobs(
        self, step: _LaunchedStep, logprobs: np.ndarray | None, outputs: list[RequestOutput]
    ) -> None:
        """Give a step's outputs the log probabilities that their requests asked for."""
        by_request = {output.request_id: output for output in outputs}
        for index, request in enumerate(step.sampled):
            output = by_request.get(request.request_id)
            if output is None:
                continue
            if request.wants_logprobs:
                assert logprobs is not None, "log probabilities were planned and did not come"
                num_top = request.params.logprobs or 0
                line = logprobs[index]
                output.logprobs = [read_logprobs(line, token, num_top) for token in output.token_ids]
            if self._prompt_logprobs:
                output.prompt_logprobs = self._prompt_logprobs.pop(request.request_id, None)

    def _can_decode(self, request: Request) -> bool:
        """The decisions behind a decode that isn't plainly possible: done, not yet decoding, out of pages."""
        if (
            request.state is not RequestState.DECODE
            or request.is_preempting
            or request.num_planned_tokens >= request.last_fed_tokens
        ):
            return False
        while not self._grow(request, request.num_planned_tokens + 1):
            if self._num_leaving:  # pages are on their way: they come back with a launched step
                return False
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Get the pages for `num_tokens` tokens; False = there are not enough, nothing changed."""
        grown = self._cache.grow(request.lease, num_tokens)
        if grown is None:
            return False
        first_index, page_ids = grown
        if page_ids:
            self._page_updates.append(PageUpdate(request.row, first_index, page_ids))
        capacity = len(request.lease.page_ids) * self._page_size
        request.decode_limit = (
            min(capacity, request.last_fed_tokens) if request.state is RequestState.DECODE else 0
        )
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
        room = (
            len(request.lease.page_ids) + self._cache.num_free_pages + self._cache.num_evictable_pages
        ) * self._page_size
        num_tokens = min(budget, self.config.chunk_tokens, len(request.feed) - start, room - start)
        if num_tokens <= 0:
            return 0
        end = start + num_tokens
        samples = end == len(request.feed)
        request.move_to(RequestState.DECODE if samples else RequestState.PREFILL)
        grown = self._grow(request, end)
        assert grown, "the pages that were counted are not there"
        targets = request.feed[start + 1 : end + 1].tobytes() if self._wants_prompt(request) else b""
        chunks.append(Chunk(request.row, start, request.feed[start:end].tobytes(), samples, targets))
        launched_chunks.append((request, end))
        if samples:
            sampled.append(request)
        request.num_planned_tokens = end
        request.steps_in_flight += 1
        return num_tokens

    def _admit_next(self) -> Request | None:
        """Give the next waiting request a row and its cached prefix; None = nobody can come in now."""
        if not self._waiting or not self._free_rows:
            return None
        available = self._cache.num_free_pages + self._cache.num_evictable_pages
        head = self._waiting[0]
        if self._blocked_admission == (head.request_id, available):
            return None
        window = [r for r in self._waiting[:PREFIX_WINDOW] if r.priority == head.priority]
        index = 0
        if len(window) > 1:
            lengths = [self._cache.match_length(self._matchable(request)) for request in window]
            index = choose_waiting(lengths, head.num_times_skipped)
        lease = self._lease_if_it_fits(window[index])
        if lease is None and index:  # who comes first must not wait for room that another needs
            index = 0
            lease = self._lease_if_it_fits(head)
        if lease is None:
            self._blocked_admission = (head.request_id, available)
            return None
        request = window[index]
        self._blocked_admission = None
        if index:
            head.num_times_skipped += 1
        del self._waiting[index]
        insort(self._running, request, key=_seniority)
        num_cached = len(lease.page_ids) * self._page_size
        if not request.was_admitted:  # not the return after a preemption
            request.was_admitted = True
            request.num_cached_tokens = num_cached
            self.stats.num_prompt_tokens += len(request.prompt)
            self.stats.num_cached_tokens += num_cached
        request.lease = lease
        request.row = self._free_rows.pop()
        request.num_planned_tokens = num_cached
        request.decode_limit = 0
        request.move_to(RequestState.PREFILL)
        params = request.params
        self._row_inits.append(
            RowInit(
                request.row,
                params.temperature,
                max(params.top_k, 0),
                params.top_p,
                params.min_p,
                request.seed,
                self._rules_of(request) if request.changes_logits else None,
            )
        )
        self._num_with_extras += request.changes_logits or request.wants_logprobs
        if lease.page_ids:
            self._page_updates.append(PageUpdate(request.row, 0, tuple(lease.page_ids)))
        return request

    def _wants_prompt(self, request: Request) -> bool:
        """Whether the log probabilities of its prompt are still to be computed."""
        return request.request_id in self._prompt_logprobs

    def _matchable(self, request: Request) -> np.ndarray:
        """The part of the feed that may come from the tree: cached tokens have no logits."""
        return request.feed[:1] if self._wants_prompt(request) else request.feed

    def _rules_of(self, request: Request) -> LogitRules:
        """The rules and the tokens so far, for a row that the request now gets."""
        params = request.params
        return LogitRules(
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=tuple((params.logit_bias or {}).items()),
            allowed_token_ids=params.allowed_token_ids,
            bad_words_ids=params.bad_words_ids,
            stop_ids=tuple(request.stop_ids) if params.min_tokens else (),
            min_len=len(request.prompt) + params.min_tokens,
            prompt=request.prompt.tobytes(),
            output=np.array(request.output, dtype=np.int32).tobytes(),
        )

    def _lease_if_it_fits(self, request: Request) -> Lease | None:
        """Lock a waiting request's cached prefix, if the rest fits beside what the running ones need."""
        lease = self._cache.admit(self._matchable(request))
        if self._running:
            needed = self._pages_to_come(request, 0, len(lease.page_ids))
            for other in self._running:
                needed += self._pages_to_come(other, other.num_planned_tokens, len(other.lease.page_ids))
            if needed > self._cache.num_free_pages + self._cache.num_evictable_pages:
                self._cache.release(lease, request.feed, len(lease.page_ids) * self._page_size)
                return None
        return lease

    def _pages_to_come(self, request: Request, num_planned_tokens: int, num_held_pages: int) -> int:
        """Pages a request will still take: for the rest of its feed and an estimate of its output."""
        fed = max(num_planned_tokens, len(request.feed))
        remaining = request.last_fed_tokens - fed
        tokens = fed + min(remaining, self.config.output_reserve_tokens)
        return max(pages_for(tokens, self._page_size) - num_held_pages, 0)

    def _commit_chunk(self, request: Request, num_fed: int) -> None:
        """A chunk is in the pool: share its full pages, and use the tree's where somebody was faster."""
        sampled_too = num_fed == len(request.feed)
        if not sampled_too:
            request.steps_in_flight -= 1
        if request.state is not RequestState.FINISHED and not request.is_preempting:
            for index, page_id in self._cache.commit(request.lease, request.feed, num_fed):
                self._page_updates.append(PageUpdate(request.row, index, (page_id,)))
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
            self._vacate(request)
            request.move_to(RequestState.RETIRED)
        elif request.is_preempting:
            self._num_leaving -= 1
            self._vacate(request)
            request.is_preempting = False
            request.feed = request.tokens()
            if self._wants_prompt(request):  # all over again
                self._prompt_logprobs[request.request_id] = []
            self._running.remove(request)
            request.move_to(RequestState.WAITING)
            insort(self._waiting, request, key=_seniority)

    def _vacate(self, request: Request) -> None:
        """Give row and pages back; what was computed stays in the tree."""
        tokens = request.tokens()
        self._cache.release(request.lease, tokens, min(request.num_planned_tokens, len(tokens)))
        # The next plan must not carry news of a row that changes hands: one value per table entry.
        self._page_updates = [update for update in self._page_updates if update.row != request.row]
        self._free_rows.append(request.row)
        self._num_with_extras -= request.changes_logits or request.wants_logprobs
        request.lease = None
        request.row = -1


def _extras_of(sampled: list[Request]) -> Extras:
    """What a step has to do for these requests besides sampling."""
    return Extras(
        rules=any(request.changes_logits for request in sampled),
        logprobs=any(request.wants_logprobs for request in sampled),
    )


def _mix_seed(seed: int, arrival: int) -> int:
    """A signed 64-bit seed for a request that brought none (splitmix64, Steele et al. 2014)."""
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + (arrival + 1) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z
