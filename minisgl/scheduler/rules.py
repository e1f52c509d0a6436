"""Checks and packs the logit rules of a call, once for all of its prompts and choices.

Promise: the rules made here name only token ids of the vocabulary, and do not ban every token.
"""

from collections.abc import Collection, Sequence

import numpy as np

from minisgl.errors import RequestError
from minisgl.request import MAX_BAD_WORD_TOKENS, Request, SamplingParams
from minisgl.scheduler.plan import PLAIN, LogitExtras, LogitRules

MAX_RULES_COST_PER_STEP = 1 << 16
"""A step admits no further request when its new rules cost this much (`LogitRules.cost_tokens`). Rules that
several choices share count once. Writing rules of this cost takes a few milliseconds on the host."""


def rules_of_call(params: SamplingParams, stop_ids: Collection[int], vocab_size: int) -> LogitRules | None:
    """The rules of a call, which `rules_of_prompt` completes; None = the parameters have no rules.

    Raises:
        RequestError: 400 when they name unknown token ids, or ban every allowed token.
    """
    if not params.needs_tables:
        return None
    bias = params.logit_bias or {}
    bias_ids, allowed = _packed(bias), _packed(params.allowed_token_ids)
    bad_words = _packed([token_id for ids in params.bad_words_ids for token_id in ids])
    asked = _packed(params.logprob_token_ids)
    named = {"logit_bias": bias_ids, "allowed_token_ids": allowed, "bad_words_ids": bad_words}
    named["logprob_token_ids"] = asked
    for param, ids in named.items():
        if len(ids) and int(ids.max()) >= vocab_size:
            message = f"{param}: token ids must be from 0 to {vocab_size - 1}, got {ids.max()}"
            raise RequestError(400, "invalid_token_id", message, param)
    banned = {ids[0] for ids in params.bad_words_ids if len(ids) == 1}
    if params.min_tokens:
        banned.update(stop_ids)
    if params.allowed_token_ids and banned.issuperset(params.allowed_token_ids):
        raise RequestError(
            400,
            "invalid_value",
            "every one of allowed_token_ids is banned: by bad_words, or by min_tokens, "
            "which bans what ends the output",
            "allowed_token_ids",
        )
    return LogitRules(
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias_ids=bias_ids.tobytes(),
        bias=np.array([*bias.values()], "<f4").tobytes(),
        allowed_token_ids=allowed.tobytes(),
        bad_words_ids=params.bad_words_ids,
        stop_ids=_packed(stop_ids if params.min_tokens else ()).tobytes(),
        min_len=0,
        prompt=b"",
        logprob_token_ids=asked.tobytes(),
    )


def rules_of_prompt(rules: LogitRules, prompt: np.ndarray, min_tokens: int) -> LogitRules:
    """A call's rules, completed for one of its prompts, int32 [tokens]."""
    # Without repetition penalty, only bad words depend on the prompt, and only on its end.
    seen = prompt if rules.repetition_penalty != 1 else prompt[-(MAX_BAD_WORD_TOKENS - 1) :]
    return rules._replace(min_len=len(prompt) + min_tokens, prompt=seen.astype("<i4", copy=False).tobytes())


def rules_with_output(rules: LogitRules, output: Collection[int]) -> LogitRules:
    """A prompt's rules for a row that starts after some output was generated."""
    return rules._replace(output=_packed(output).tobytes()) if output else rules


def extras_of(sampled: Collection[Request]) -> LogitExtras:
    """The work besides sampling that these requests need."""
    return LogitExtras(
        rules=any(request.changes_logits for request in sampled),
        logprobs=any(request.wants_logprobs for request in sampled),
        masks=any(request.needs_mask for request in sampled),
    )


def extras_of_step(
    sampled: Sequence[Request], num_decodes: int
) -> tuple[LogitExtras, LogitExtras, tuple[int, ...]]:
    """The extras of a step's decodes, those of its chunks, and the places in `sampled` that need a mask.

    `sampled` has the decodes first.
    """
    if not sampled:
        return PLAIN, PLAIN, ()
    of_decodes, of_chunks = extras_of(sampled[:num_decodes]), extras_of(sampled[num_decodes:])
    masked: tuple[int, ...] = ()
    if of_decodes.masks or of_chunks.masks:
        masked = tuple([place for place, request in enumerate(sampled) if request.needs_mask])
    return of_decodes, of_chunks, masked


def _packed(token_ids: Collection[int]) -> np.ndarray:
    return np.fromiter(token_ids, "<i4", len(token_ids))
