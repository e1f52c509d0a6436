"""One reply's text: detokenizing and stop strings together, with an honest count of tokens.

Promise: text behind a stop string, and the token that ended the reply, are never part of the text;
tokens behind the one that completed a stop string are not counted. (Unless the caller asks for what ended
the reply.)
"""

from collections.abc import Sequence
from typing import NamedTuple

from minisgl.text.detokenizer import Detokenizer
from minisgl.text.stop import StopMatcher, StopStrings
from minisgl.text.tokenizer import Tokenizer


class ReplyPiece(NamedTuple):
    """What some tokens gave."""

    text: str
    num_tokens: int  # of those pushed, how many count
    stopped: bool  # a stop string is complete: the reply is over, push nothing more


class ReplyText:
    """The text of one reply while its tokens arrive. Stop strings are looked for in the output only.

    Args:
        include_stop: what ended the reply is part of the text.
        min_tokens: stop strings are looked for in what follows so many tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: StopStrings,
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._matcher = StopMatcher(stops, include_stop) if stops.stops else None
        self._include_stop = include_stop
        self._num_unwatched = min_tokens  # tokens to come that no stop string ends

    def push(self, token_ids: Sequence[int]) -> ReplyPiece:
        """Tokens in the middle of a reply."""
        if self._matcher is None:
            return ReplyPiece(self._detokenizer.push(token_ids), len(token_ids), False)
        unwatched = min(self._num_unwatched, len(token_ids))
        self._num_unwatched -= unwatched
        text = self._detokenizer.push(token_ids[:unwatched])
        for count, token_id in enumerate(token_ids[unwatched:], start=unwatched + 1):
            safe, stopped = self._matcher.push(self._detokenizer.push([token_id]))
            text += safe
            if stopped:
                return ReplyPiece(text, count, True)
        return ReplyPiece(text, len(token_ids), False)

    def finish(self, token_ids: Sequence[int], drop_last: bool) -> ReplyPiece:
        """The last tokens of a reply. `drop_last`: the last one ended it (end-of-sequence, a stop token)
        and counts without being text, unless what ended it is to be included."""
        dropped = 1 if drop_last and token_ids and not self._include_stop else 0
        piece = self.push(token_ids[: len(token_ids) - dropped])
        if piece.stopped:
            return piece
        tail, stopped = self._detokenizer.finish(), False
        if self._matcher is not None and not self._num_unwatched:
            tail, stopped = self._matcher.push(tail)
            if not stopped:
                tail += self._matcher.finish()
        return ReplyPiece(piece.text + tail, piece.num_tokens + dropped, stopped)
