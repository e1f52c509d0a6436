"""Which tokens a grammar allows next, for each request: bit t % 32 of word t // 32 is 1 for an allowed id t.

Promise: fail closed. Any error of the library is an error of that request, whose mask is all zeros then, and
a request that no token may follow has an error, too. After the end only end-of-sequence ids are allowed.
Shapes: V vocabulary, W = ceil(V / 32) words, R rows.
"""

import time
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from minisgl.errors import MinisglError
from minisgl.grammar.limits import SLOW_BUDGET_S, SLOW_MASK_S

Mask = NDArray[np.int32]


TOO_SLOW = "the grammar is too ambiguous: its masks take too long"


class GrammarError(MinisglError):
    """A request's grammar can't go on; the request must end with this error."""

    is_of_request = False
    """Whether another grammar would help, so that the error is a 400."""


class TooMuchWorkError(GrammarError):
    """The library gave up, or was too slow: the grammar is at fault, not the engine."""

    is_of_request = True


class TokenRefusedError(GrammarError):
    """A token was appended that the grammar does not allow: its mask was not applied."""


class NoTokenAllowedError(GrammarError):
    """The grammar allows no token here, not even an end of sequence."""


class Grammar:
    """A compiled grammar of one model; matchers are made from it.

    Args:
        start: the library's matcher at the beginning, never advanced.
        first_mask: int32 [W], the mask of a request without output; None until it is known.
    """

    def __init__(
        self,
        start: LLMatcher,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        first_mask: Mask | None = None,
    ) -> None:
        self.start = start
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.num_words = (vocab_size + 31) // 32
        self.first_mask = first_mask
        self.slow_s = 0.0
        """Seconds of slow masks of all matchers together."""
        self.is_worn = False
        """Whether the library gave up in a matcher. They share what it learned of the grammar, so that new
        ones would fail, too: the compiler makes a new grammar then."""
        self.end_mask = np.zeros(self.num_words, np.int32)
        """int32 [W]: end-of-sequence ids only."""
        words = self.end_mask.view(np.uint32)
        for token_id in eos_token_ids:
            words[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._end_words = [(int(i), int(self.end_mask[i])) for i in np.flatnonzero(self.end_mask)]

    def allows_end(self, mask: Mask) -> bool:
        """Whether an end-of-sequence id is in a mask."""
        return any(int(mask[i]) & bits for i, bits in self._end_words)

    def matcher(self) -> "Matcher":
        """The place of a request without output."""
        self.slow_s /= 2  # what was slow once is forgotten in time
        return Matcher(self)


class Matcher:
    """One request's place in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.num_tokens = 0
        self.is_finished = False
        """Whether an end-of-sequence id was appended."""
        self._library = grammar.start.deep_copy()
        self._error: GrammarError | None = None

    @classmethod
    def rebuilt(cls, grammar: Grammar, token_ids: Sequence[int]) -> "Matcher":
        """The matcher of a request that has this output already."""
        matcher = cls(grammar)
        matcher.advance(token_ids)
        return matcher

    @property
    def may_end(self) -> bool:
        """Whether the output so far is complete."""
        return self._error is None and (self.is_finished or self._library.is_accepting())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output.

        Raises:
            TokenRefusedError: the grammar does not allow one of them.
            GrammarError: the library gave up. In both cases the matcher is of no use afterwards.
        """
        self._check()
        eos = self.grammar.eos_token_ids
        end = next((i for i, token_id in enumerate(token_ids) if token_id in eos), len(token_ids))
        if end and self.is_finished:
            raise self._fail(TokenRefusedError(f"token {token_ids[0]} comes after the end"))
        try:
            taken = self._library.try_consume_tokens(list(token_ids[:end])) if end else 0
        except BaseException as error:
            raise self._fail(_panic(error)) from error
        if self._library.is_error():
            raise self._fail(self._gave_up())
        if taken != end:
            bad = token_ids[min(taken, end - 1)]
            raise self._fail(TokenRefusedError(f"the grammar does not allow token {bad} as the next one"))
        if end < len(token_ids):
            if not self.may_end:
                raise self._fail(TokenRefusedError("the answer ended before its grammar did"))
            self.is_finished = True
            others = [one for one in token_ids[end:] if one not in eos]
            if others:
                raise self._fail(TokenRefusedError(f"token {others[0]} comes after the end"))
        self.num_tokens += len(token_ids)

    def fill_mask(self, out: Mask) -> None:
        """Write which ids may come next to `out`, int32 [W].

        Raises:
            GrammarError: none can, or the library failed; `out` is all zeros then.
        """
        out.fill(0)
        self._check()
        if self._is_known():
            self._fill_known(out)
            return
        if self.grammar.slow_s > SLOW_BUDGET_S:
            raise self._fail(TooMuchWorkError(TOO_SLOW))
        began = time.thread_time()
        try:
            self._library.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        except BaseException as error:
            out.fill(0)
            raise self._fail(_panic(error)) from error
        error = self._error_of_mask(out, time.thread_time() - began)
        if error is not None:
            raise error

    def copy(self) -> "Matcher":
        """A matcher at the same place that advances by itself."""
        twin = Matcher.__new__(Matcher)
        twin.__dict__.update(self.__dict__)
        twin._library = self._library.deep_copy()
        return twin

    def _is_known(self) -> bool:
        """Whether the mask needs no computation."""
        at_start = self.num_tokens == 0 and self.grammar.first_mask is not None
        return self.is_finished or at_start or (self._library.is_stopped() and not self._library.is_error())

    def _fill_known(self, out: Mask) -> None:
        if self.num_tokens == 0 and self.grammar.first_mask is not None:
            out[:] = self.grammar.first_mask
        elif self.may_end:
            out[:] = self.grammar.end_mask
        else:
            raise self._fail(NoTokenAllowedError("the grammar allows nothing here"))

    def _error_of_mask(self, out: Mask, seconds: float = 0.0) -> GrammarError | None:
        """The error of a mask that the library did not compute, that allows nothing, or came too slowly."""
        error: GrammarError | None = None
        if self._library.is_error():
            error = self._gave_up()
        elif not out.any() or (not self._library.is_accepting() and self.grammar.allows_end(out)):
            error = NoTokenAllowedError("the grammar allows no token here")
        elif seconds > SLOW_MASK_S:
            self.grammar.slow_s += seconds
        if error is None and self.grammar.slow_s > SLOW_BUDGET_S:
            error = TooMuchWorkError(TOO_SLOW)
        if error is not None:
            out.fill(0)
            self._error = error
        return error

    def _gave_up(self) -> TooMuchWorkError:
        self.grammar.is_worn = True
        reason = self._library.stop_reason()
        return TooMuchWorkError(f"the grammar needs too much work here, or has no continuation ({reason})")

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: GrammarError) -> GrammarError:
        self._error = error
        return error


class MaskFiller:
    """Fills the masks of many requests, several at a time, without the interpreter's lock.

    Args:
        num_threads: threads that compute masks.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = LLExecutor(num_threads)
        self._suspects = False

    def fill(self, rows: Sequence[tuple[int, Matcher]], out: Mask) -> list[tuple[int, GrammarError]]:
        """Write the mask of each matcher to its row of `out`, int32 [R, W], and leave other rows alone.

        Returns the rows that failed, with their errors; their masks are all zeros. After a slow call the
        next one goes row by row to find the grammar that is slow.
        """
        failed: list[tuple[int, GrammarError]] = []
        together: list[tuple[int, Matcher]] = []
        slowest = 0.0
        for row, matcher in rows:
            try:
                if not self._suspects and matcher._error is None and not matcher._is_known():
                    together.append((row, matcher))
                    continue
                began = time.thread_time()
                matcher.fill_mask(out[row])
                slowest = max(slowest, time.thread_time() - began)
            except GrammarError as error:
                failed.append((row, error))
        if together:
            began = time.perf_counter()
            failed += self._fill_together(together, out)
            slowest = time.perf_counter() - began
        self._suspects = slowest > SLOW_MASK_S
        return failed

    def _fill_together(self, rows: list[tuple[int, Matcher]], out: Mask) -> list[tuple[int, GrammarError]]:
        work = [(matcher._library, row) for row, matcher in rows]
        try:
            self._threads.unsafe_compute_mask_ptr(work, out.ctypes.data, out.strides[0], len(out))
            broken = None
        except BaseException as error:  # of which row is unknown
            broken = _panic(error)
        failed: list[tuple[int, GrammarError]] = []
        for row, matcher in rows:
            error = broken or matcher._error_of_mask(out[row])
            if error is not None:
                out[row].fill(0)
                failed.append((row, matcher._fail(error)))
        return failed


def _panic(error: BaseException) -> GrammarError:
    """The error of a request whose library panicked, which is no `Exception`."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return GrammarError(f"the grammar broke: {error}")
