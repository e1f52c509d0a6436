"""Turns one reply's tokens into text: detokenizing, stop strings, and the count of the reply's tokens.

Promise: text after a stop string, and the token that ended the reply, are not part of the text. Tokens after
the one that completed a stop string do not count. With `include_stop` the text has the end, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minisgl.text.detokenizer import Detokenizer
from minisgl.text.stop import StopMatcher, StopStrings
from minisgl.text.tokenizer import Tokenizer


class ReplyPiece(NamedTuple):
    """The result of pushing some tokens."""

    text: str
    num_tokens: int  # how many of the pushed tokens belong to the reply
    stopped: bool  # a stop string is complete: the reply is over and takes no more tokens


class ReplyText:
    """The text of one reply while its tokens arrive. Only the output is searched for stop strings.

    Args:
        kept_special: ids of special tokens that `skip_special_tokens` leaves in the text.
        include_stop: the stop string or token that ended the reply is part of the text.
        min_tokens: the search for stop strings starts after this many tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: StopStrings,
        *,
        skip_special_tokens: bool = True,
        kept_special: frozenset[int] = frozenset(),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens, kept_special)
        self._matcher = StopMatcher(stops, include_stop) if stops.stops else None
        self._include_stop = include_stop
        self._num_before_stops = min_tokens  # tokens left until the search for stop strings starts

    def push(self, token_ids: Sequence[int]) -> ReplyPiece:
        """Add tokens that are not the reply's last ones."""
        if self._matcher is None:
            return ReplyPiece(self._detokenizer.push(token_ids), len(token_ids), False)
        before_stops = min(self._num_before_stops, len(token_ids))
        self._num_before_stops -= before_stops
        text = self._detokenizer.push(token_ids[:before_stops])
        for count, token_id in enumerate(token_ids[before_stops:], start=before_stops + 1):
            safe, stopped = self._matcher.push(self._detokenizer.push([token_id]))
            text += safe
            if stopped:
                return ReplyPiece(text, count, True)
        return ReplyPiece(text, len(token_ids), False)

    def finish(self, token_ids: Sequence[int], drop_last: bool) -> ReplyPiece:
        """Add the last tokens of a reply.

        Args:
            drop_last: the last token ended the reply (end-of-sequence or a stop token). It counts, but is
                text only with `include_stop`.
        """
        dropped = 1 if drop_last and token_ids and not self._include_stop else 0
        piece = self.push(token_ids[: len(token_ids) - dropped])
        if piece.stopped:
            return piece
        tail, stopped = self._detokenizer.finish(), False
        if self._matcher is not None and not self._num_before_stops:
            tail, stopped = self._matcher.push(tail)
            if not stopped:
                tail += self._matcher.finish()
        return ReplyPiece(piece.text + tail, piece.num_tokens + dropped, stopped)
