"""Requests whose output follows a grammar, or whose thought has a limit: the masks of their next tokens.

Promise: it fails closed. Where a matcher has an error or no token is allowed, the request ends with an error.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from minisgl.errors import RequestError
from minisgl.request import Request, RequestState

logger = logging.getLogger(__name__)

WORD_BITS = 32
FillMasks = Callable[[Sequence[tuple[int, Any]], np.ndarray], Sequence[tuple[int, Exception]]]
"""Writes the mask of each matcher to its row of int32 [rows, words], zeros before: bit t % 32 of word t // 32
is 1 if token t is allowed. It returns the rows that failed, with their errors."""


class Matcher(Protocol):
    """The state of one output in its grammar."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output."""
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar, which any number of outputs may share."""

    def matcher(self) -> Matcher:
        """The state of an empty output."""
        ...


class Grammars:
    """The requests whose grammar is being compiled, and the masks of those that have one."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // WORD_BITS)
        # Requests without a matcher, by the id of their call's first request.
        self._waiting: dict[int, list[Request]] = {}
        self._abandoned: list[int] = []

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __contains__(self, call_id: int) -> bool:
        """Whether a request waits for the grammar of this call."""
        return call_id in self._waiting

    def add(self, call_id: int, request: Request) -> None:
        """Add a request whose grammar is being compiled."""
        self._waiting.setdefault(call_id, []).append(request)

    def take(self, call_id: int) -> list[Request]:
        """Take out the requests that wait for the grammar of this call."""
        return self._waiting.pop(call_id, [])

    def remove(self, request: Request) -> bool:
        """Take out a request that ends; False if it does not wait for a grammar."""
        for call_id, requests in self._waiting.items():
            if request in requests:
                requests.remove(request)
                if not requests:
                    del self._waiting[call_id]
                    self._abandoned.append(call_id)
                return True
        return False

    def take_abandoned(self) -> list[int]:
        """The calls of which the last request ended since the last time, before its grammar was ready."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def masks(
        self, requests: Sequence[Request], fill: FillMasks
    ) -> tuple[np.ndarray, list[tuple[Request, RequestError]]]:
        """The masks of the requests' next tokens, int32 [requests, words], and those that must end.

        A request that has ended, or must, gets a mask that allows all, since its token is dropped.
        """
        masks = np.zeros((len(requests), self._num_words), dtype="<i4")
        open_ = {
            index: request
            for index, request in enumerate(requests)
            if request.state is not RequestState.FINISHED
        }
        rows = [(index, request.matcher) for index, request in open_.items() if request.has_grammar]
        failed = dict(fill(rows, masks)) if rows else {}
        for index, request in open_.items():
            if not request.has_grammar:
                masks[index] = -1
            if request.thought is not None and index not in failed:
                request.thought.restrict(masks[index])
            if not masks[index].any():
                failed.setdefault(index, RuntimeError("it allows no token here"))
        dropped = {*range(len(requests))} - open_.keys() | failed.keys()
        masks[sorted(dropped)] = -1
        return masks, [
            (requests[index], _grammar_failed(requests[index], error)) for index, error in failed.items()
        ]


def start_matcher(request: Request, grammar: CompiledGrammar) -> RequestError | None:
    """Give a request its matcher, behind the output that it has; returns the error that ends it, if any."""
    request.matcher = grammar.matcher()
    try:
        if request.output:
            request.matcher.advance(request.output)
    except Exception as error:
        return _grammar_failed(request, error)
    return None


def advance(request: Request, token_id: int) -> RequestError | None:
    """Append a token to what follows a request's output; returns the error that ends it, if any."""
    if request.thought is not None:
        request.thought.advance(token_id)
    try:
        if request.has_grammar:
            request.matcher.advance([token_id])
    except Exception as error:
        return _grammar_failed(request, error)
    return None


def _grammar_failed(request: Request, error: Exception) -> RequestError:
    logger.warning("request %d: its grammar failed: %s", request.request_id, error)
    spec = request.params.grammar
    is_of_request = getattr(error, "is_of_request", False)
    return RequestError(
        400 if is_of_request else 500,
        "grammar_failed",
        f"the grammar could not be followed behind {len(request.output)} generated tokens: {error}",
        spec.where if is_of_request and spec is not None else None,
    )
