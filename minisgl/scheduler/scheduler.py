"""Turns waiting and running requests into step plans, and step results into outputs.

Promise: every request gets exactly one final output and nothing after it. Its row and pages are released
exactly once, in `_retire_or_requeue`, when no launched step uses them. `plan()` may run ahead of `apply()`
(overlap); steps are applied in the order they were planned.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from minisgl.errors import RequestError
from minisgl.kvcache.grouped_manager import Cache
from minisgl.request import FinishReason, Request, RequestOutput, RequestState, SamplingParams
from minisgl.scheduler.config import SchedulerConfig
from minisgl.scheduler.failures import error_output, why_no_token
from minisgl.scheduler.grammars import CompiledGrammar, FillMasks, Grammars, advance, start_matcher
from minisgl.scheduler.holdings import Holdings
from minisgl.scheduler.journal import Journal
from minisgl.scheduler.logprobs import PromptLogprobs, attach_logprobs
from minisgl.scheduler.plan import NO_LOGITS, Chunk, StepPlan, TokenMasks
from minisgl.scheduler.prompts import PromptPlanner
from minisgl.scheduler.queue.policy import by_seniority
from minisgl.scheduler.queue.room import room_beside
from minisgl.scheduler.queue.shares import Shares
from minisgl.scheduler.queue.waiting import WaitingQueue
from minisgl.scheduler.request_factory import RequestFactory
from minisgl.scheduler.rules import extras_of_step
from minisgl.scheduler.stats import SchedulerStats

_num_planned_tokens = attrgetter("num_planned_tokens")


class _LaunchedStep(NamedTuple):
    """The part of a planned step that `apply` needs."""

    step_id: int
    chunks: list[tuple[Request, int]]  # request, tokens of its feed that are in the pool after this step
    sampled: list[Request]  # the result has one token for each, in this order


class Scheduler:
    """Plans steps and books their results. Only it and the parts that it is made of write to requests."""

    def __init__(self, config: SchedulerConfig, cache: Cache) -> None:
        pool_tokens = cache.num_usable_pages * cache.page_size
        assert config.max_context_tokens <= pool_tokens, f"the pool holds only {pool_tokens} tokens"
        self.config = config
        self.stats = SchedulerStats()
        self.journal = Journal()
        self._factory = RequestFactory(
            max_context_tokens=config.max_context_tokens,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
        )
        self._holdings = Holdings(cache, config.max_rows, config.output_reserve_tokens)
        self._requests: dict[int, Request] = {}  # not yet finished
        self._running: list[Request] = []  # holds a row, not finished; by seniority
        # Finished or preempting requests whose pages come back with a launched step.
        self._num_awaiting_release = 0
        self._launched: deque[_LaunchedStep] = deque()
        self._outputs: list[RequestOutput] = []
        self._prompt_logprobs = PromptLogprobs()
        self._shares = Shares()
        self._waiting = WaitingQueue(self._holdings, self._prompt_logprobs, self._shares)
        self._prompts = PromptPlanner(
            config.chunk_tokens,
            self._holdings,
            self._waiting,
            self._shares,
            self._prompt_logprobs,
            self.stats,
            self.journal,
            config.chunk_multiple,
            config.least_saved_tokens,
        )
        self.grammars = Grammars(config.vocab_size)
        self._num_plans = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self.grammars)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_held_rows(self) -> int:
        """Rows that requests hold now."""
        return self._holdings.num_rows

    @property
    def has_work(self) -> bool:
        """Whether a request is open, a step is in flight, or an output was not taken yet."""
        return bool(self._requests or self._launched or self._outputs)

    def add(
        self,
        request_id: int,
        prompt: np.ndarray,
        params: SamplingParams,
        priority: int = 0,
        streamed: bool = True,
        user: str = "",
    ) -> None:
        """`add_call` for a call of one prompt, int32 [tokens], and one choice."""
        self.add_call(request_id, [prompt], params, 1, priority, streamed, user=user)

    def add_call(
        self,
        request_id: int,
        prompts: Sequence[np.ndarray],
        params: SamplingParams,
        num_choices: int,
        priority: int,
        streamed: bool,
        seeds: Sequence[int] = (),
        cache_salt: str = "",
        user: str = "",
        outputs: Sequence[list[int]] = (),
    ) -> None:
        """Queue `num_choices` requests for each prompt, with consecutive ids from `request_id` on.

        A refusal is an ordinary output.

        Args:
            streamed: the client reads tokens as they come, so `mixed_step_tokens` bounds its steps.
            seeds: one for each request; () = `params` has a seed or is greedy.
            cache_salt: the requests share cached pages only with others of the same salt.
            user: whose they are; users share the engine (`shares`).
            outputs: what each request has generated in another engine; it goes on as after a preemption.
                () = nothing yet.
        """
        firsts = range(request_id, request_id + len(prompts) * num_choices, num_choices)
        ids = [range(first, first + num_choices) for first in firsts]
        try:
            call = self._factory.check(params)
        except RequestError as error:
            for one in chain(*ids):
                self.refuse(one, error)
            return
        for own, prompt in zip(ids, prompts, strict=True):
            assert self._requests.keys().isdisjoint(own), f"one of the request ids {own} is in use"
            try:
                requests = self._factory.make(
                    own,
                    prompt,
                    call,
                    priority=priority,
                    streamed=streamed,
                    seeds=seeds[own.start - request_id : own.stop - request_id],
                    cache_salt=cache_salt,
                    account=self._shares.account(user),
                    outputs=outputs[own.start - request_id : own.stop - request_id],
                )
            except RequestError as error:
                for one in own:
                    self.refuse(one, error)
                continue
            for request in requests:
                if not request.output:
                    self._prompt_logprobs.start(request)
                self._requests[request.request_id] = request
                self.journal.added(request)
                if request.has_grammar:
                    self.grammars.add(request_id, request)
                else:
                    self._waiting.add(request)
                if request.output and len(request.output) >= request.max_new_tokens:
                    # This engine's context is shorter than that of the one that began it.
                    self._outputs.append(self._finish(request, FinishReason.LENGTH, []))

    def start_with_grammar(self, request_id: int, grammar: CompiledGrammar | RequestError) -> None:
        """Let a call's requests wait for a row, as their grammar is compiled, or end them with an error.

        `request_id` is that of the call's first request.
        """
        for request in self.grammars.take(request_id):
            self._waiting.add(request)
            self.journal.grammar_ready(request)
            if isinstance(grammar, RequestError):
                self._outputs.append(self._end_with_error(request, grammar))
            else:
                error = start_matcher(request, grammar)
                if error is not None:
                    self._outputs.append(self._end_with_error(request, error))

    def masks(self, plan: StepPlan, fill: FillMasks) -> TokenMasks:
        """The masks of the newest planned step. All steps before it must be applied.

        A request whose grammar allows no token ends here. Its token is dropped, so its mask allows all.
        """
        [step] = self._launched
        assert step.step_id == plan.step_id, f"masks of step {plan.step_id}, but {step.step_id} is launched"
        requests = [step.sampled[place] for place in plan.masked]
        masks, failed = self.grammars.masks(requests, fill)
        for request, error in failed:
            self._outputs.append(self._end_with_error(request, error))
        return TokenMasks(plan.step_id, masks.shape[1], masks.tobytes())

    def refuse(self, request_id: int, error: RequestError) -> None:
        """Answer a request that was not queued."""
        self.journal.refused(request_id, error.code)
        self._outputs.append(error_output(request_id, error))

    def abort(self, request_id: int) -> None:
        """End a request with a final ABORT output; unknown and ended ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._prompt_logprobs.forget(request_id)
            self._outputs.append(self._finish(request, FinishReason.ABORT, []))

    def open_requests(self) -> tuple[Mapping[int, Request], Sequence[Request]]:
        """The requests that have not ended, by id, and the queue of those that wait for a row; to read."""
        return self._requests, self._waiting.in_turns()

    def take_outputs(self) -> list[RequestOutput]:
        """All outputs since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a launched step is applied."""
        if self._shares.compete:
            self._make_room_for_next()
        sampled: list[Request] = []
        # Oldest first: a request that needs a page preempts a younger one, which comes later in this loop.
        for request in self._running.copy():
            num_planned = request.num_planned_tokens
            if num_planned >= request.decode_limit and not self._make_room_to_decode(request):
                continue
            request.num_planned_tokens = num_planned + 1
            request.steps_in_flight += 1
            sampled.append(request)
        # Longest first balances decode attention best. The order stays the same while the batch does.
        sampled.sort(key=_num_planned_tokens, reverse=True)
        decode_rows = tuple([request.row for request in sampled])
        self._shares.charge_outputs(sampled)

        chunks: list[Chunk] = []
        launched_chunks: list[tuple[Request, int]] = []
        if self._waiting or len(decode_rows) < len(self._running):
            room = room_beside(sampled, self.config, compete=self._shares.compete)
            self._prompts.plan(room, self._running, chunks, launched_chunks, sampled)
            self._shares.charge_outputs(sampled[len(decode_rows) :])
            if self._waiting:
                head = self._waiting.head
                reason = self._waiting.held_by or ("step" if room.tokens_for(head) > 0 else "budget")
                self.journal.held(head, reason, self._holdings, self._running, chunks)
        if not self._waiting:
            self.journal.released()

        if not decode_rows and not chunks:
            if not self._launched and len(self._running) > 1:
                # With windows, prompts that shared pages may wait for each other's. The oldest alone fits.
                self._preempt(self._running[-1], self._running[0])
                return self.plan()
            assert self._launched or not self._running, "requests run, none can go on, nothing is in flight"
            return None
        extras = self._holdings.num_with_extras
        decode_extras, chunk_extras, masked = extras_of_step(sampled if extras else (), len(decode_rows))
        updates = self._holdings.drain_updates()
        plan = StepPlan(
            step_id=self._num_plans,
            row_inits=updates.row_inits,
            page_updates=updates.page_updates,
            decode_rows=decode_rows,
            chunks=tuple(chunks),
            sampled_rows=tuple([request.row for request in sampled]) if chunks else decode_rows,
            decode_extras=decode_extras,
            chunk_extras=chunk_extras,
            decode_lengths=tuple(map(_num_planned_tokens, sampled[: len(decode_rows)])) if chunks else (),
            row_rules=updates.row_rules,
            masked=masked,
            state_copies=updates.state_copies,
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
        """Book a step's results (the fields of a `StepResult`); `take_outputs` then has its outputs."""
        step = self._launched.popleft()
        assert step.step_id == plan.step_id, f"step {plan.step_id} applied, but {step.step_id} is next"
        assert len(token_ids) == len(step.sampled)
        self.stats.num_steps += 1
        # Add log probabilities first: committing a chunk may requeue a preempted request, which then
        # starts a new list.
        if prompt_logprobs:
            for chunk, (request, _), lines in zip(plan.chunks, step.chunks, prompt_logprobs, strict=True):
                self._prompt_logprobs.add_chunk(request, chunk, lines)
        for request, num_fed in step.chunks:
            self._commit_chunk(request, num_fed)
        outputs = self._outputs
        num_before = len(outputs)
        for request, token in zip(step.sampled, token_ids, strict=True):
            request.steps_in_flight -= 1
            output = self._book_token(request, token)
            if output is not None:
                outputs.append(output)
                self.stats.num_output_tokens += len(output.token_ids)
        if logprobs is not None or self._prompt_logprobs:
            attach_logprobs(step.sampled, logprobs, self._prompt_logprobs, outputs[num_before:])

    def check_invariants(self) -> None:
        """Recompute every invariant that holds between two calls; for tests.

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
            assert (request.lease, request.row) == (None, -1), "a waiting request holds pages or a row"
        num_leaving = len(leaving) + sum(request.is_preempting for request in self._running)
        assert self._num_awaiting_release == num_leaving, "num_awaiting_release is off"
        assert len(self._requests) == self.num_waiting + len(self._running), "a request is nowhere"
        assert self._running == sorted(self._running, key=by_seniority), "a queue is out of order"
        self._waiting.check_invariants()

    def _book_token(self, request: Request, token: int) -> RequestOutput | None:
        """Book what a step sampled for a request; None = the request does not need it."""
        if token == NO_LOGITS:
            self._holdings.invalidate(request)
        if request.state is RequestState.FINISHED or (request.is_isolated and request.is_preempting):
            # It ended while the step was in flight, or its tokens are computed again.
            self._retire_or_requeue(request)
            return None
        if token == NO_LOGITS and request.uses_shared_pages:
            self._isolate(request)
            return None
        if token == NO_LOGITS or (token < 0 and request.max_new_tokens):
            return self._end_with_error(request, why_no_token(request, token, self.stats))
        if not request.max_new_tokens:  # the caller wants only the prompt's log probabilities
            return self._finish(request, FinishReason.LENGTH, [])
        ends = token in request.stop_ids
        if request.is_constrained and not ends:
            error = advance(request, token)
            if error is not None:
                return self._end_with_error(request, error)
        request.output.append(token)
        if ends:
            return self._finish(request, FinishReason.STOP, [token])
        if len(request.output) >= request.max_new_tokens:
            return self._finish(request, FinishReason.LENGTH, [token])
        if request.is_preempting:
            self._retire_or_requeue(request)
        return RequestOutput(request.request_id, [token], None, request.num_cached_tokens)

    def _make_room_to_decode(self, request: Request) -> bool:
        """Get the page for a request's next decode, preempting younger requests if needed (`Shares.victim`).

        False = it can't decode now: it is not in DECODE, has all its tokens, or got no page.
        """
        if (
            request.state is not RequestState.DECODE
            or request.is_preempting
            or request.num_planned_tokens >= request.max_fed_tokens
        ):
            return False
        while not self._holdings.grow(request, request.num_planned_tokens + 1):
            if self._num_awaiting_release:  # a launched step will release pages, so preempt nobody
                return False
            victim = self._shares.victim(self._running, request)
            self._preempt(victim, request)
            if victim is request:
                return False
        return True

    def _make_room_for_next(self) -> None:
        """If the next waiting request has no room, let a user with more requests make some."""
        if self._num_awaiting_release or not self._waiting.has_no_room:
            return
        head = self._waiting.head
        # A larger one could wait for long even so, and the pages that are freed for it would lie idle.
        if not self._holdings.needs_half_of_the_pool(head):
            victim = self._shares.must_make_room(self._running, head)
            if victim is not None:
                self._preempt(victim, head)

    def _commit_chunk(self, request: Request, num_fed: int) -> None:
        """Book a computed chunk: put its full pages into the tree, or use the tree's for equal tokens."""
        sampled_too = num_fed == len(request.feed)
        self.journal.computed(request, num_fed)
        if not sampled_too:
            request.steps_in_flight -= 1
        if request.state is not RequestState.FINISHED and not request.is_preempting:
            self._holdings.commit(request, num_fed)
        if not sampled_too:
            self._retire_or_requeue(request)

    def _finish(
        self, request: Request, reason: FinishReason, tokens: list[int], code: str = ""
    ) -> RequestOutput:
        """The only place where a request ends. Its row and pages are released now, or with its last step."""
        self.journal.ended(request, reason, code)
        del self._requests[request.request_id]
        if request.state is RequestState.WAITING:
            if not self.grammars.remove(request):
                self._waiting.remove(request)
            request.move_to(RequestState.FINISHED)
            request.move_to(RequestState.RETIRED)
        else:
            self._running.remove(request)
            request.move_to(RequestState.FINISHED)
            if not request.is_preempting:
                self._num_awaiting_release += 1
            request.is_preempting = False
            self._retire_or_requeue(request)
        return RequestOutput(request.request_id, tokens, reason, request.num_cached_tokens)

    def _end_with_error(self, request: Request, error: RequestError) -> RequestOutput:
        self._prompt_logprobs.forget(request.request_id)
        self._finish(request, FinishReason.ERROR, [], error.code)
        return error_output(request.request_id, error, request.num_cached_tokens)

    def _preempt(self, request: Request, by: Request) -> None:
        """Take row and pages from a running request, which waits again and resumes from its cached prefix."""
        self.journal.preempted(request, by)
        self.stats.num_preemptions += 1
        self._requeue(request)

    def _isolate(self, request: Request) -> None:
        """Compute a request again without shared pages, one of which may hold the NaN that it read.

        A request that fails again has NaN of its own.
        """
        request.is_isolated = True
        if request.is_preempting:
            self._retire_or_requeue(request)
        else:
            self.journal.preempted(request, None)
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Let a running request wait again, as soon as it has no step in flight."""
        self._num_awaiting_release += 1
        request.is_preempting = True
        request.decode_limit = 0
        self._retire_or_requeue(request)

    def _retire_or_requeue(self, request: Request) -> None:
        """If the request has no step in flight: retire it if it finished, requeue it if it was preempted."""
        if request.steps_in_flight:
            return
        if request.state is RequestState.FINISHED:
            self._num_awaiting_release -= 1
            self._holdings.release(request)
            request.move_to(RequestState.RETIRED)
        elif request.is_preempting:
            self._num_awaiting_release -= 1
            self._holdings.release(request)
            request.is_preempting = False
            request.feed = request.tokens()
            if self._prompt_logprobs.is_collecting(request) and not request.output:
                self._prompt_logprobs.start(request)  # start again: the prompt was computed only in part
            self._running.remove(request)
            request.move_to(RequestState.WAITING)
            self._waiting.add(request)
