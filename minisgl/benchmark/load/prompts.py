"""Reproducible tokens for synthetic prompts, as token ids or as words.

Promise: torch-free; equal keys give equal tokens in every process and on every machine, and different keys
give different tokens. A prompt of n tokens has n ids, or n words that are one token each in the
vocabularies of byte-level BPE.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.load.traces import TraceRequest

FIRST_TOKEN_ID = 1000
"""Smaller ids are not drawn, because some vocabularies begin with their special tokens."""

GAMMA = 0x9E3779B97F4A7C15
MASK = 2**64 - 1

Codes = np.ndarray
"""uint64 [n]: one hash per token, from which an id or a word is made."""

COMMON_WORDS = (
    "the of and to in is that for it was on are as with his they at be this from have or by one had not but"
    " what all were when we there can an your which their said if do will each about how up out them then she"
    " many some so these would other into has more her two like him see time could no make than first been"
    " its who now people my made over did down only way find use may water long little very after words"
)
WORDS = tuple(COMMON_WORDS.split())


class Draw(NamedTuple):
    """The first tokens of an infinite pseudorandom sequence. A prompt is a concatenation of draws."""

    stream: tuple[int, ...]  # names the sequence; any integers
    num_tokens: int


def codes_of(draws: Sequence[Draw], salt: Sequence[int] = ()) -> Codes:
    """The hashes of a prompt's tokens; another `salt` (integers of any sign) changes all of them.

    The mixing function is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
    Mixing in the salt and then the sequence's numbers gives the initial state.
    """
    salted = _absorb(0, salt)
    states = np.array([_absorb(salted, draw.stream) for draw in draws], np.uint64)
    lengths = [draw.num_tokens for draw in draws]
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = (1 + np.arange(len(starts)) - starts).astype(np.uint64)
    return _mix(np.repeat(states, lengths) + place * np.uint64(GAMMA))


def trace_draws(request: TraceRequest, index: int) -> tuple[Draw, ...]:
    """A prompt for the request at `index` of its trace. Equal blocks get equal tokens; the tokens after the
    last block are unique to the request."""
    draws = []
    num_left = request.num_prompt_tokens
    for block_id in request.block_ids:
        draws.append(Draw((1, block_id), min(num_left, request.block_tokens)))
        num_left -= draws[-1].num_tokens
    return (*draws, Draw((2, index), num_left)) if num_left else tuple(draws)


def as_token_ids(codes: Codes, vocab_size: int) -> np.ndarray:
    """int64 [n]: ids below `vocab_size` (at least 2), the lowest ids left out."""
    first = min(FIRST_TOKEN_ID, vocab_size // 2)
    return (first + codes % np.uint64(vocab_size - first)).astype(np.int64)


def as_text(codes: Codes) -> str:
    """A text of words with a space before each word, so that texts can be concatenated."""
    return "".join([f" {WORDS[place]}" for place in (codes % np.uint64(len(WORDS))).tolist()])


def _absorb(state: int, numbers: Iterable[int]) -> int:
    """The state after mixing in the numbers. As `_mix`, in Python, which is faster for single numbers."""
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
