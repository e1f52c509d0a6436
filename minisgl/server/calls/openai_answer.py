"""What the answers of OpenAI's text APIs have in common: ids, usage, events, and fields about the prompt.

Promise: every field that OpenAI's clients read is present, with OpenAI's name and type. The structs are both
what is sent and what OpenAPI's document describes.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from minisgl.request import PackedLogprobs, TokenLogprobs
from minisgl.server.calls.call import CallContext, Usage, sse
from minisgl.server.http.errors import Fault, error_body
from minisgl.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"

EndReason = Literal["stop", "length"]
encode = msgspec.json.Encoder().encode


class CachedTokens(Struct, forbid_unknown_fields=True):
    cached_tokens: int


class CompletionDetails(Struct, forbid_unknown_fields=True):
    reasoning_tokens: int


class UsageAnswer(Struct, forbid_unknown_fields=True):
    """Token counts. A prompt counts once, whatever the number of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    """Only of models that mark thoughts."""


class PromptLogprob(Struct, forbid_unknown_fields=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, a dict by token id; null for the first token."""


class CachedDetails(Struct, forbid_unknown_fields=True):
    """Where cached tokens of the prompts were found."""

    device: int
    host: int = 0


class SglExt(Struct, forbid_unknown_fields=True):
    """SGLang's own part of an answer."""

    cached_tokens_details: CachedDetails


class Shown(NamedTuple):
    """What an answer shows besides its choices' texts, where a call asks for it."""

    usage: bool = False
    """In a stream: at its end."""
    continuous_usage: bool = False
    """In each chunk, too."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    """Log probabilities name tokens by their ids."""
    cached_details: bool = False
    """`SglExt`."""


class AnswerWriter:
    """The parts of an answer that do not depend on the API. `usage` may only change between two calls.

    Args:
        id_prefix: with the id of the HTTP call it makes the answer's id.
        num_reasoning_tokens: counts the tokens of thoughts so far; None: the model marks none.
    """

    def __init__(
        self,
        id_prefix: str,
        context: CallContext,
        shown: Shown,
        num_reasoning_tokens: Callable[[], int] | None = None,
    ) -> None:
        self.tokenizer = context.tokenizer
        self.head: Mapping[str, Any] = {
            "id": id_prefix + context.request_id,
            "created": int(time.time()),
            "model": context.model_name,
        }
        self._usage = context.usage
        self._shown = shown
        self._num_reasoning_tokens = num_reasoning_tokens

    def chunk_usage(self, has_output: bool = True) -> UsageAnswer | UnsetType | None:
        """The field `usage` of a chunk that is not the last; without output: of one before all tokens."""
        if self._shown.continuous_usage:
            return self.whole_usage() if has_output else usage_answer(Usage(self._usage().prompt_tokens))
        return None if self._shown.usage else UNSET

    def ending(self, usage_chunk: Callable[..., Struct]) -> bytes:
        """The last events: the chunk with the usage, if requested, then [DONE]."""
        if not self._shown.usage:
            return DONE
        return sse(encode(usage_chunk(**self.head, choices=[], usage=self.whole_usage()))) + DONE

    def sglext(self) -> SglExt | UnsetType:
        """The field `sglext` of an answer or a choice's last chunk, if requested."""
        return SglExt(CachedDetails(self._usage().cached_tokens)) if self._shown.cached_details else UNSET

    def whole_usage(self) -> UsageAnswer:
        """The field `usage` of a whole answer."""
        usage = usage_answer(self._usage())
        if self._num_reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionDetails(self._num_reasoning_tokens())
        return usage


class PromptLogprobsField:
    """The log probabilities of a prompt's tokens as JSON, written once for all choices of the prompt.

    Args:
        num_top: number of likely tokens per position.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._logprobs: PromptLogprobs | None = None

    def logprobs(self, packed: PackedLogprobs | None) -> PromptLogprobs:
        """The field `prompt_logprobs`."""
        if self._logprobs is None:
            entries = [] if packed is None else packed.unpack()
            # Entry by entry, because encoding a large list at once would hold up other threads.
            written = [b"null", *(encode(self._entry(entry)) for entry in entries)]
            self._logprobs = cast(PromptLogprobs, msgspec.Raw(b"[" + b",".join(written) + b"]"))
        return self._logprobs

    def _entry(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        """Token id -> log probability, rank and text, of the top tokens and of the prompt's own token."""
        top = zip(entry.top_ids[: self._num_top], entry.top_logprobs[: self._num_top], strict=True)
        known = {token_id: (rank, logprob) for rank, (token_id, logprob) in enumerate(top, start=1)}
        known.setdefault(entry.token_id, (entry.rank, entry.logprob))
        return {
            str(token_id): PromptLogprob(
                logprob, rank, self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
            )
            for token_id, (rank, logprob) in known.items()
        }


def id_text(token_id: int) -> str:
    """How a token is named where `Shown.tokens_as_ids` asks for ids."""
    return f"token_id:{token_id}"


def failure(fault: Fault) -> bytes:
    """The event of an error in the middle of a stream."""
    return sse(error_body(fault))


def usage_answer(usage: Usage) -> UsageAnswer:
    """The field `usage` in OpenAI's format."""
    return UsageAnswer(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        CachedTokens(usage.cached_tokens),
    )
