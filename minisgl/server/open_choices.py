"""The choices of a call: built before the call is sent, then one `Delta` for each step of each choice.

Promise: `prepare` reads and changes nothing that other calls use, so it may run in a thread. What remains for
the event loop does not depend on the texts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from minisgl.request import PackedLogprobs, SamplingParams, TokenLogprobs, fit_to_context
from minisgl.text.reply import ReplyPiece, ReplyText
from minisgl.text.stop import StopStrings
from minisgl.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minisgl.server.streams import Stream


class Delta(NamedTuple):
    """The new output of one choice, from one engine step."""

    choice: int  # index of the choice, in the order of the prompts
    text: str
    num_tokens: int  # new tokens that count as output
    num_cached_tokens: int  # prompt tokens found in the prefix cache; known with the first tokens
    finish_reason: str | None  # "stop" or "length" with the last delta of a choice
    token_ids: list[int]  # the tokens that `num_tokens` counts
    logprobs: list[TokenLogprobs] | None = None  # of `token_ids`, if requested
    prompt_logprobs: PackedLogprobs | None = None  # with a choice's first delta, if requested
    stop_reason: str | int | None = None  # with the last delta: the stop string or token id that ended it


class SharedPromptLogprobs:
    """Gives a prompt's log probabilities, which arrive with its first choice, to all choices of the prompt.

    The deltas of the other choices are held back until the log probabilities have arrived.
    """

    def __init__(self, first_choice: int) -> None:
        self._first_choice = first_choice
        self._found: PackedLogprobs | None = None
        self._held: list[Delta] = []
        self._started: set[int] = set()

    def add(self, delta: Delta) -> list[Delta]:
        """Take in a delta; returns the deltas to deliver now. Each choice's first has `prompt_logprobs`."""
        if delta.choice != self._first_choice:
            self._held.append(delta)
        if delta.prompt_logprobs is not None:
            self._found = delta.prompt_logprobs
        ready = [delta] if delta.choice == self._first_choice else []
        if self._found is not None:
            ready += map(self._with_logprobs, self._held)
            self._held.clear()
        return ready

    def _with_logprobs(self, delta: Delta) -> Delta:
        if delta.choice in self._started:
            return delta
        self._started.add(delta.choice)
        return delta._replace(prompt_logprobs=self._found)


class OpenChoice:
    """One request in the engine: the stream that reads it, its index there, its text and token counts."""

    __slots__ = (
        "first_at", "index", "last_at", "num_prompt_tokens", "num_tokens", "shared", "stream", "text",
    )  # fmt: skip

    def __init__(
        self,
        stream: "Stream",
        index: int,
        text: ReplyText,
        num_prompt_tokens: int,
        shared: SharedPromptLogprobs | None,
    ) -> None:
        self.stream = stream
        self.index = index
        self.text = text
        self.num_prompt_tokens = num_prompt_tokens
        self.shared = shared  # None = no prompt_logprobs requested, or n = 1
        self.num_tokens = 0
        self.first_at = 0.0  # time.monotonic() of the first tokens
        self.last_at = 0.0  # time.monotonic() of the last tokens

    def deltas(self, piece: ReplyPiece) -> list[Delta]:
        """The deltas to deliver after `piece`, which may belong to other choices of the prompt."""
        delta = Delta(
            self.index,
            piece.text,
            len(piece.token_ids),
            piece.num_cached_tokens,
            None if piece.finish_reason is None else piece.finish_reason.value,
            piece.token_ids,
            piece.logprobs,
            piece.prompt_logprobs,
            piece.stop_reason,
        )
        return [delta] if self.shared is None else self.shared.add(delta)


class PreparedCall(NamedTuple):
    """A checked call that only has to be sent."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams  # with the largest max_tokens; the engine lowers it for each prompt
    priority: int
    cache_salt: str
    choices: list[OpenChoice]  # in the order of the prompts
    num_prompt_tokens: int  # of all choices


def prepare(
    stream: "Stream",
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    n: int,
    *,
    max_context_tokens: int,
    prompt_field: str,
    priority: int,
    kept_special: frozenset[int],
    cache_salt: str,
) -> PreparedCall:
    """Check a call with `n` choices for each prompt, which `stream` reads, and build them.

    `kept_special`: see `ReplyText`.

    Raises:
        RequestError: 400 when a prompt is empty or too long; `prompt_field` names it.
    """
    fitted = [fit_to_context(len(prompt), params, max_context_tokens, prompt_field) for prompt in prompts]
    largest = max(fitted, key=lambda one: one.max_tokens or 0)
    stops = StopStrings(params.stop)
    choices: list[OpenChoice] = []
    for prompt in prompts:
        is_shared = n > 1 and params.prompt_logprobs is not None
        shared = SharedPromptLogprobs(len(choices)) if is_shared else None
        for _ in range(n):
            text = ReplyText(tokenizer, prompt, params, stops, kept_special)
            choices.append(OpenChoice(stream, len(choices), text, len(prompt), shared))
    return PreparedCall(prompts, largest, priority, cache_salt, choices, n * sum(map(len, prompts)))
