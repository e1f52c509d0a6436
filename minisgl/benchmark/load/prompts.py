"""What made-up prompts consist of: reproducible tokens, as ids or as words.

Promise: equal keys give equal tokens in every process and on every machine, different keys different ones;
a prompt of n tokens has n ids, or n words that are one token each in byte-level BPE vocabularies. Torch-free.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.traces import TraceRequest

FIRST_TOKEN_ID = 1000
"""Special tokens are the first ids of some vocabularies and the last of others; both are avoided."""

GAMMA = 0x9E3779B97F4A7C15
MASK = 2**64 - 1

Codes = np.ndarray
"""uint64 [n]: one hash per token, still to be made an id or a word."""

COMMON_WORDS = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but"
    " what all were when we there can an your which their said if do will each about how up out them then she"
    " many some so these would other into has more her two like him see time could no make than first been"
    " its who now people my made over did down only way find use may water long little very after words"
)
WORDS = tuple(COMMON_WORDS.split())


class Draw(NamedTuple):
    """The first tokens of one of endlessly many sequences; a prompt is several of them behind one another."""

    stream: tuple[int, ...]  # which sequence; any whole numbers
    num_tokens: int


def codes_of(draws: Sequence[Draw], salt: Sequence[int] = ()) -> Codes:
    """A prompt's tokens; under another `salt` (whole numbers, any sign) all are different.

    The mixing function is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators);
    its state begins with what mixing the salt and the sequence's numbers one after the other gives.
    """
    salted = _absorb(0, salt)
    states = np.array([_absorb(salted, draw.stream) for draw in draws], np.uint64)
    lengths = [draw.num_tokens for draw in draws]
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = (1 + np.arange(len(starts)) - starts).astype(np.uint64)
    return _mix(np.repeat(states, lengths) + place * np.uint64(GAMMA))


def trace_draws(request: TraceRequest, index: int) -> tuple[Draw, ...]:
    """A prompt for the request at `index` of its trace: equal blocks have equal tokens, what no block covers
    is the request's own."""
    draws = []
    num_left = request.num_prompt_tokens
    for block_id in request.block_ids:
        draws.append(Draw((1, block_id), min(num_left, request.block_tokens)))
        num_left -= draws[-1].num_tokens
    return (*draws, Draw((2, index), num_left)) if num_left else tuple(draws)


def as_token_ids(codes: Codes, vocab_size: int) -> np.ndarray:
    """int64 [n]: ids below `vocab_size` (at least 2), not the lowest ones."""
    first = min(FIRST_TOKEN_ID, vocab_size // 2)
    return (first + codes % np.uint64(vocab_size - first)).astype(np.int64)


def as_text(codes: Codes) -> str:
    """A text of words, each with a space before it, so that texts can be joined without a seam."""
    return "".join([f" {WORDS[place]}" for place in (codes % np.uint64(len(WORDS))).tolist()])


def _absorb(state: int, numbers: Iterable[int]) -> int:
    """The state after mixing in the numbers as `_mix` does; Python is faster than numpy at single numbers."""
    for number in numbers:
        state = (state + number + GAMMA) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
