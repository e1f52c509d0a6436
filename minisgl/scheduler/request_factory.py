"""Turns each incoming call into checked requests, or refuses it.

Promise: every request made here fits the context and names only token ids of the vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minisgl.errors import RequestError
from minisgl.request import Request, SamplingParams, fit_to_context, params_for_choice
from minisgl.scheduler.plan import LogitRules
from minisgl.scheduler.queue.policy import seniority
from minisgl.scheduler.queue.shares import Account
from minisgl.scheduler.rules import rules_of_call, rules_of_prompt
from minisgl.scheduler.thoughts import ThoughtTracker


class RequestFactory:
    """Makes requests and numbers them in the order of their arrival.

    Args:
        max_context_tokens: longest prompt + output of one request, in tokens.
    """

    def __init__(self, *, max_context_tokens: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_token_ids)
        self._num_made = 0

    def check(self, params: SamplingParams) -> "CheckedCall":
        """Check a call's parameters once, for all of its prompts and choices; `make` takes the result.

        Raises:
            RequestError: 400 when the parameters name unknown token ids, ban every token, or limit a thought
                without saying how thoughts are written.
        """
        limit = params.thought_limit
        if limit is None and params.thinking_token_budget not in (None, -1):
            message = "thinking_token_budget goes only with a conversation, such as that of LLM.chat"
            raise RequestError(400, "unsupported_parameter", message, "thinking_token_budget")
        if limit is not None and max(limit.open + limit.close + limit.instead) >= self._vocab_size:
            message = f"thought_limit: token ids must be from 0 to {self._vocab_size - 1}"
            raise RequestError(400, "invalid_token_id", message, "thought_limit")
        stop_ids = frozenset(params.stop_token_ids)
        stop_ids = stop_ids if params.ignore_eos else stop_ids | self._eos_ids
        return CheckedCall(params, stop_ids, rules_of_call(params, stop_ids, self._vocab_size))

    def make(
        self,
        request_ids: Sequence[int],
        prompt: np.ndarray,
        call: "CheckedCall",
        *,
        priority: int,
        streamed: bool,
        seeds: Sequence[int] = (),
        cache_salt: str = "",
        account: Account,
        outputs: Sequence[list[int]] = (),
    ) -> list[Request]:
        """Make the requests for all choices of one prompt; `prompt` is int32 [tokens].

        Args:
            seeds: one for each choice; () = the parameters have a seed (`params_for_choice`) or are greedy.
            account: of the call's user.
            outputs: what each choice has generated already; () = nothing.

        Raises:
            RequestError: 400 when the prompt does not fit the context, or has unknown token ids.
        """
        fitted = fit_to_context(len(prompt), call.params, self._max_context_tokens)
        assert fitted.max_tokens is not None
        largest = max([int(prompt.max()), *(max(output, default=0) for output in outputs)])
        if int(prompt.min()) < 0 or largest >= self._vocab_size:
            raise RequestError(400, "invalid_token_id", f"token ids must be from 0 to {self._vocab_size - 1}")
        rules = call.rules and rules_of_prompt(call.rules, prompt, fitted.min_tokens)
        made = []
        for rank, request_id in enumerate(request_ids):
            params = params_for_choice(fitted, rank)
            arrival = self._num_made
            self._num_made += 1
            request = Request(
                request_id,
                prompt,
                params,
                priority=priority,
                seniority=seniority(priority, arrival),
                streamed=streamed,
                seed=seeds[rank] if seeds else params.seed or 0,  # a request without any seed is greedy
                max_new_tokens=fitted.max_tokens,
                stop_ids=call.stop_ids,
                rules=rules,
                thought=ThoughtTracker(params.thought_limit) if params.thought_limit else None,
                cache_salt=cache_salt,
                account=account,
            )
            if outputs:
                _go_on_behind(request, outputs[rank])
            made.append(request)
        return made


def _go_on_behind(request: Request, output: list[int]) -> None:
    """Bring a new request into the state that it has after a preemption behind `output`."""
    request.output = output
    request.feed = request.tokens()
    request.was_admitted = bool(output)
    if request.thought is not None:
        for token_id in output:
            request.thought.advance(token_id)


class CheckedCall(NamedTuple):
    """The checked parameters of a call, with the stop ids and logit rules derived from them."""

    params: SamplingParams
    stop_ids: frozenset[int]
    rules: LogitRules | None
