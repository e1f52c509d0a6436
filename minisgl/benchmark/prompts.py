"""What made-up prompts consist of: reproducible tokens, as ids or as words.

Promise: equal keys give equal tokens in every process and on every machine, different keys different ones;
a prompt of n tokens has n ids, or n words that are one token each in byte-level BPE vocabularies. Torch-free.
"""

from collections.abc import Sequence

import numpy as np

from minisgl.benchmark.traces import TraceRequest

FIRST_TOKEN_ID = 1000
"""Special tokens are the first ids of some vocabularies and the last of others; both are avoided."""

GAMMA = np.uint64(0x9E3779B97F4A7C15)

Codes = np.ndarray
"""uint64 [n]: one hash per token, still to be made an id or a word."""

COMMON_WORDS = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but"
    " what all were when we there can an your which their said if do will each about how up out them then she"
    " many some so these would other into has more her two like him see time could no make than first been"
    " its who now people my made over did down only way find use may water long little very after words"
)
WORDS = tuple(COMMON_WORDS.split())


def draw_codes(key: Sequence[int], num_tokens: int) -> Codes:
    """The first `num_tokens` of the endless sequence that belongs to `key` (whole numbers, any sign).

    The mixing function is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
    """
    state = np.zeros(1, np.uint64)
    for number in key:
        state = _mix(state + np.uint64(number & 0xFFFFFFFFFFFFFFFF) + GAMMA)
    return _mix(state + np.arange(1, num_tokens + 1, dtype=np.uint64) * GAMMA)


def trace_codes(request: TraceRequest, index: int, seed: int) -> Codes:
    """A prompt for the request at `index` of its trace: equal blocks have equal tokens, what no block covers
    is the request's own. Another `seed` shares nothing with this one."""
    parts = [draw_codes((seed, 1, block_id), request.block_tokens) for block_id in request.block_ids]
    num_covered = len(parts) * request.block_tokens
    parts.append(draw_codes((seed, 2, index), max(0, request.num_prompt_tokens - num_covered)))
    return np.concatenate(parts)[: request.num_prompt_tokens]


def as_token_ids(codes: Codes, vocab_size: int) -> np.ndarray:
    """int64 [n]: ids below `vocab_size` (at least 2), not the lowest ones."""
    first = min(FIRST_TOKEN_ID, vocab_size // 2)
    return (first + codes % np.uint64(vocab_size - first)).astype(np.int64)


def as_text(codes: Codes) -> str:
    """A text of words, each with a space before it, so that texts can be joined without a seam."""
    return "".join([f" {WORDS[place]}" for place in (codes % np.uint64(len(WORDS))).tolist()])


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
