"""The scheduler's choices as pure functions of plain numbers: change behaviour here, bookkeeping there."""

from collections.abc import Sequence

PREFIX_WINDOW = 8
"""How many waiting requests compete by cached prefix; also how often the first may be passed over."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def prefill_budget_tokens(num_decoding: int, max_step_tokens: int, mixed_step_tokens: int | None) -> int:
    """Prompt tokens a step may feed beside `num_decoding` decodes.

    Prompts may fill the step. Where a decode's token is waited for they get what the decodes leave of
    `mixed_step_tokens`, but half of it at least, so that the pause before it is bounded by one step of that
    size; None = nobody waits.
    """
    room = max_step_tokens - num_decoding
    if mixed_step_tokens is None:
        return room
    return min(room, max(mixed_step_tokens - num_decoding, mixed_step_tokens // 2, 1))


def choose_waiting(match_lengths: Sequence[int], head_skips: int) -> int:
    """Which of the first waiting requests is admitted next, given the cached prefix of each in tokens.

    Longest prefix first (its K/V may be evicted soon and others may build on it), earliest on ties;
    the head goes when it has been passed over `PREFIX_WINDOW` times, so nobody starves.
    """
    if head_skips >= PREFIX_WINDOW:
        return 0
    return max(range(len(match_lengths)), key=lambda index: (match_lengths[index], -index))
