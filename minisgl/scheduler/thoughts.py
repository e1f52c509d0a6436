"""Follows the thoughts of one output, and ends them where their limit is reached.

Promise: an output has at most `ThoughtLimit.max_tokens` tokens of thoughts, and the markers that end them are
exactly those of the limit. A step waits for a mask only where the limit may be reached. W words of a mask.
"""

from collections.abc import Iterable

import numpy as np

from minisgl.request import ThoughtLimit

WORD_BITS = 32


class ThoughtTracker:
    """The thoughts of an output so far."""

    def __init__(self, limit: ThoughtLimit) -> None:
        self._limit = limit
        self._is_open = limit.is_open
        self._num_left = limit.max_tokens
        self._num_tokens = 0  # of the output
        self._num_closed = 0  # tokens of `limit.close` that were forced, while more of them must follow
        self._is_over = False  # no thought will follow
        self._last: tuple[int, ...] = ()  # tokens since the last thought, as many as `limit.open` has

    def may_restrict(self, index: int) -> bool:
        """Whether `restrict` may change the mask of the output's token `index`, whatever comes before it."""
        if self._is_over:
            return False
        if self._num_closed:
            return True
        num_unknown = index - self._num_tokens
        if self._is_open:
            return num_unknown >= self._num_left
        # The first unknown token may open a thought.
        can_be_spent = num_unknown - 1 >= self._num_left if num_unknown else not self._num_left
        return can_be_spent and (num_unknown > 0 or self._limit.may_reopen)

    def restrict(self, mask: np.ndarray) -> None:
        """Clear the bits of tokens that may not come next in `mask`, int32 [W]."""
        if self._num_closed or (self._is_open and not self._num_left):
            _keep(mask, self._limit.close[self._num_closed : self._num_closed + 1])
        elif not (self._is_over or self._is_open or self._num_left) and self._limit.may_reopen:
            first = self._limit.open[0]
            if not self._limit.instead:
                mask.view("<u4")[first // WORD_BITS] &= np.uint32(~(1 << first % WORD_BITS) & 0xFFFFFFFF)
            elif self._last[-1:] == (first,):
                _keep(mask, self._limit.instead)

    def advance(self, token_id: int) -> None:
        """Append a token to the output."""
        limit = self._limit
        self._num_tokens += 1
        if self._is_over:
            return
        if self._num_closed:
            self._num_closed = (self._num_closed + 1) % len(limit.close)
            self._is_over = not (self._num_closed or limit.may_reopen)
        elif not self._is_open:
            self._last = (*self._last, token_id)[-len(limit.open) :]
            self._is_open = self._last == limit.open
        elif token_id == limit.close[0]:
            self._is_open, self._last = False, ()
            self._num_closed = 0 if self._num_left else 1 % len(limit.close)
            self._is_over = not (self._num_closed or limit.may_reopen)
        else:
            self._num_left -= 1


def _keep(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clear all bits but those of `token_ids`."""
    before = mask.view("<u4").copy()
    mask.fill(0)
    for token_id in token_ids:
        mask.view("<u4")[token_id // WORD_BITS] |= before[token_id // WORD_BITS] & np.uint32(
            1 << token_id % WORD_BITS
        )
