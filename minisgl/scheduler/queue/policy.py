"""The scheduler's policy as pure functions of plain numbers. Bookkeeping is in the other modules."""

from collections.abc import Sequence
from operator import attrgetter

MAX_ADMISSIONS_PER_STEP = 64
"""Most requests that get a row in one step. Each takes the host about 40 us, and the step waits for it."""
PREFIX_WINDOW = 8
"""How many waiting requests compete by cached prefix, and how often the first may be skipped."""
ARRIVALS_PER_PRIORITY = 1024
"""How many earlier requests one level of priority overtakes: as many as a server holds open by default."""
MAX_PRIORITY = 100
"""Priorities are clamped to plus or minus this, so that the wait of every request is bounded."""


by_seniority = attrgetter("seniority")
"""The sort key of every queue of requests; `seniority` computes it."""


def seniority(priority: int, arrival: int) -> tuple[int, int]:
    """The key that orders requests; the smallest goes first.

    One level of priority counts like an arrival `ARRIVALS_PER_PRIORITY` requests earlier, in the manner of
    earliest-deadline-first (Liu and Layland 1973). The key never changes, so the queue needs no updates. At
    most `ARRIVALS_PER_PRIORITY` later requests per level of difference overtake a request.
    """
    levels = max(-MAX_PRIORITY, min(priority, MAX_PRIORITY))
    return (arrival - levels * ARRIVALS_PER_PRIORITY, arrival)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def prefill_budget_tokens(num_decoding: int, max_step_tokens: int, mixed_step_tokens: int | None) -> int:
    """Prompt tokens that a step may feed beside `num_decoding` decodes.

    With `mixed_step_tokens` None, no decode is streamed and prompts may fill the step. Otherwise prompts get
    the tokens of `mixed_step_tokens` that the decodes leave, and at least half of it. This bounds the pause
    between two streamed tokens by one step of that size.
    """
    room = max_step_tokens - num_decoding
    if mixed_step_tokens is None:
        return room
    return min(room, max(mixed_step_tokens - num_decoding, mixed_step_tokens // 2, 1))


def choose_waiting(match_lengths: Sequence[int], head_skips: int) -> int:
    """Index of the waiting request to admit next, given the length of each one's cached prefix.

    The longest prefix goes first, because its K/V may be evicted soon and other requests may extend it; on
    ties the earliest goes first. A head that was skipped `PREFIX_WINDOW` times goes first, so none starves.
    """
    if head_skips >= PREFIX_WINDOW:
        return 0
    return match_lengths.index(max(match_lengths))
