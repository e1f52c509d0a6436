"""Turns the engine's outputs for one request into the text of a reply, up to its one end.

Promise: a reply ends once: by the engine's last output, by a stop string, or by an error. Text after a stop
string, and the token that ended the reply, are not part of the text, unless the call includes them. Tokens
after the one that completed a stop string do not count.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minisgl.errors import RequestError
from minisgl.request import FinishReason, PackedLogprobs, RequestOutput, SamplingParams, TokenLogprobs
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.stop import StopMatcher, StopStrings
from minisgl.text.tokenizer import Tokenizer


class ReplyPiece(NamedTuple):
    """What one output adds to a reply."""

    text: str
    token_ids: list[int]  # the output's tokens that count
    finish_reason: FinishReason | None  # STOP or LENGTH with the last piece
    must_abort: bool  # a stop string ended the reply, which the engine does not know
    num_cached_tokens: int  # prompt tokens found in the prefix cache; known with the first tokens
    logprobs: list[TokenLogprobs] | None  # of `token_ids`, if requested
    prompt_logprobs: PackedLogprobs | None  # once, if requested
    stop_reason: str | int | None = None  # with the last piece: the stop string or token id that ended it


class ReplyText:
    """The text of one reply while its tokens arrive. Only the output is searched for stop strings.

    Args:
        stops: the search tables of `params.stop`; all replies of a call share them.
        kept_special: ids of special tokens that `skip_special_tokens` leaves in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        stops: StopStrings,
        kept_special: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens, kept_special)
        self._include_stop = params.include_stop_str_in_output
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._matcher = StopMatcher(stops, self._include_stop) if stops.stops else None
        self._num_before_stops = params.min_tokens  # tokens left until the search for stop strings starts
        self._num_cached_tokens = 0
        self._ended = False

    def receive(self, output: RequestOutput) -> ReplyPiece:
        """Add an output. Call it no more after the last piece or an error.

        Raises:
            RequestError: the engine refused or aborted the request, or failed on it.
        """
        assert not self._ended, f"request {output.request_id}: an output after its reply has ended"
        reason, token_ids = output.finish_reason, output.token_ids
        if reason is FinishReason.ERROR or reason is FinishReason.ABORT:
            self._ended = True
            raise RequestError(
                output.error_status or 500,
                output.error_code or "internal_error",
                output.error_message or f"the engine ended this request: {reason.value}",
                output.error_param,
            )
        if reason is None:
            text, num_tokens, stopped = self._push(token_ids)
        else:
            text, num_tokens, stopped = self._finish(token_ids, ended_by_token=reason is FinishReason.STOP)
        finish_reason = FinishReason.STOP if stopped else reason
        self._ended = finish_reason is not None
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        return ReplyPiece(
            text,
            token_ids[:num_tokens],
            finish_reason,
            stopped and reason is None,
            self._num_cached_tokens,
            None if output.logprobs is None else output.logprobs[:num_tokens],
            output.prompt_logprobs,
            self._stop_reason(output, stopped),
        )

    def _stop_reason(self, output: RequestOutput, stopped: bool) -> str | int | None:
        """What the caller asked to stop at; None: something else ended the reply, or it goes on."""
        if stopped and self._matcher is not None:
            return self._matcher.found
        if output.finish_reason is FinishReason.STOP and output.token_ids:
            last = output.token_ids[-1]
            return last if last in self._stop_token_ids else None
        return None

    def _push(self, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """(text, how many of the tokens count, whether a stop string is complete)."""
        if self._matcher is None:
            return self._detokenizer.push(token_ids), len(token_ids), False
        before_stops = min(self._num_before_stops, len(token_ids))
        self._num_before_stops -= before_stops
        text = self._detokenizer.push(token_ids[:before_stops])
        for count, token_id in enumerate(token_ids[before_stops:], start=before_stops + 1):
            safe, stopped = self._matcher.push(self._detokenizer.push([token_id]))
            text += safe
            if stopped:
                return text, count, True
        return text, len(token_ids), False

    def _finish(self, token_ids: Sequence[int], ended_by_token: bool) -> tuple[str, int, bool]:
        """Like `_push`, for the last tokens. A token that ended the reply counts, but may be no text."""
        dropped = 1 if ended_by_token and token_ids and not self._include_stop else 0
        text, num_tokens, stopped = self._push(token_ids[: len(token_ids) - dropped])
        if stopped:
            return text, num_tokens, True
        tail = self._detokenizer.finish()
        if self._matcher is not None and not self._num_before_stops:
            tail, stopped = self._matcher.push(tail)
            if not stopped:
                tail += self._matcher.finish()
        return text + tail, num_tokens + dropped, stopped
