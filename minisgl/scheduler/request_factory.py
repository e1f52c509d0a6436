"""What arrives becomes a request, or is refused: everything that is known before it gets a row.

Promise: a request that was made fits the context, names only tokens there are, and has a seed of its own.
"""

import numpy as np

from minisgl.errors import RequestError
from minisgl.request import Request, SamplingParams, fit_to_context


class Arrivals:
    """Makes requests, in the order of their arrival.

    Args:
        max_context_tokens: prompt and output of one request.
        seed: seeds the requests that bring none of their own.
    """

    def __init__(
        self, *, max_context_tokens: int, vocab_size: int, eos_token_ids: tuple[int, ...], seed: int
    ) -> None:
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_token_ids)
        self._seed = seed
        self._num_made = 0

    def make(
        self, request_id: int, prompt: np.ndarray, params: SamplingParams, *, priority: int, streamed: bool
    ) -> Request:
        """The request; `prompt` is int32 [tokens].

        Raises:
            RequestError: 400 when it does not fit the context, or names tokens that there are not.
        """
        fitted = fit_to_context(len(prompt), params, self._max_context_tokens)
        assert fitted.max_tokens is not None
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocab_size:
            raise RequestError(400, "invalid_token_id", f"token ids must be from 0 to {self._vocab_size - 1}")
        stop_ids = frozenset(params.stop_token_ids)
        stop_ids = stop_ids if params.ignore_eos else stop_ids | self._eos_ids
        self._check_rules(fitted, stop_ids)
        arrival = self._num_made
        self._num_made += 1
        return Request(
            request_id,
            prompt,
            fitted,
            priority=priority,
            arrival=arrival,
            streamed=streamed,
            seed=params.seed if params.seed is not None else mix_seed(self._seed, arrival),
            max_new_tokens=fitted.max_tokens,
            stop_ids=stop_ids,
        )

    def _check_rules(self, params: SamplingParams, stop_ids: frozenset[int]) -> None:
        """Refuse rules that name tokens there are not, or that leave none to generate."""
        if not params.changes_logits:
            return
        named = {
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words_ids": [token_id for ids in params.bad_words_ids for token_id in ids],
        }
        for param, ids in named.items():
            if ids and max(ids) >= self._vocab_size:
                message = f"{param}: token ids must be from 0 to {self._vocab_size - 1}, got {max(ids)}"
                raise RequestError(400, "invalid_token_id", message, param)
        banned = {ids[0] for ids in params.bad_words_ids if len(ids) == 1}
        if params.min_tokens:
            banned |= stop_ids
        if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
            raise RequestError(
                400,
                "invalid_value",
                "every one of allowed_token_ids is banned: by bad_words, or by min_tokens, "
                "which bans what ends the output",
                "allowed_token_ids",
            )


def mix_seed(seed: int, arrival: int) -> int:
    """A signed 64-bit seed for a request that brought none (splitmix64, Steele et al. 2014)."""
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + (arrival + 1) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z
