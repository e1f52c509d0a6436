"""Requests whose output follows a grammar: the mask of their next token, and the state after it.

Promise: it fails closed. Where a matcher has an error or allows no token, the request ends with an error.
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


def num_mask_words(vocab_size: int) -> int:
    """Int32 words of a mask."""
    return -(-vocab_size // WORD_BITS)


def fill_masks(
    requests: Sequence[Request], masks: np.ndarray, fill: FillMasks
) -> list[tuple[int, RequestError]]:
    """Write the masks of the requests' next tokens.

    Args:
        masks: int32 [requests, words], zeros.

    Returns:
        Index and error of each request that must end.
    """
    rows = [
        (index, request.matcher)
        for index, request in enumerate(requests)
        if request.state is not RequestState.FINISHED
    ]
    failed = dict(fill(rows, masks))
    empty = RuntimeError("it allows no token here")
    for index, _ in rows:
        if not masks[index].any():
            failed.setdefault(index, empty)
    return [(index, _grammar_failed(requests[index], error)) for index, error in failed.items()]


def advance(request: Request, token_id: int) -> RequestError | None:
    """Append a token to a request's matcher; returns the error that ends the request, if any."""
    try:
        request.matcher.advance([token_id])
    except Exception as error:
        return _grammar_failed(request, error)
    return None


def _grammar_failed(request: Request, error: Exception) -> RequestError:
    logger.warning("request %d: its grammar failed: %s", request.request_id, error)
    return RequestError(
        500,
        "grammar_failed",
        f"the grammar could not be followed behind {len(request.output)} generated tokens: {error}",
    )
