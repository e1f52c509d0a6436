"""The scheduler's choices as pure functions of plain numbers: change behaviour here, bookkeeping there."""

from collections.abc import Sequence

PREFIX_WINDOW = 8
"""How many waiting requests compete by cached prefix; also how often the first may be passed over."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)


def prefill_budget_tokens(num_decoding: int, max_step_tokens: int, mixed_step_tokens: int) -> int:
    """Prompt tokens a step may feed beside `num_decoding` decodes.

    Alone, prompts may fill the step. Beside decodes they get `mixed_step_tokens`, so that the pause
    between two tokens of a running request is bounded by one step of that size.
    """
    if num_decoding == 0:
        return max_step_tokens
    return min(mixed_step_tokens, max_step_tokens - num_decoding)


def choose_waiting(match_lengths: Sequence[int], head_skips: int) -> int:
    """Which of the first waiting requests is admitted next, given the cached prefix of each in tokens.

    Longest prefix first (its K/V may be evicted soon and others may build on it), earliest on ties;
    the head goes when it has been passed over `PREFIX_WINDOW` times, so nobody starves.
    """
    if head_skips >= PREFIX_WINDOW:
        return 0
    return max(range(len(match_lengths)), key=lambda index: (match_lengths[index], -index))
