"""Extra fields of a choice: log probabilities, token ids, the echoed prompt.

Promise: OpenAI's formats. Every generated token that counts has an entry, the final one included, so there
are as many entries as `usage` says. A stream has the same entries as the whole answer; each comes with the
text of its step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from minisgl.errors import RequestError
from minisgl.request import PackedLogprobs, TokenLogprobs
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.tokenizer import Tokenizer

MAX_PROMPT_VALUES = 1 << 20
"""Limit on the values about prompts in one answer with n > 1; about 60 MB of JSON."""


class RequestedDetails(NamedTuple):
    """The extra fields that a call requests."""

    chat: bool = False
    logprobs: int | None = None  # number of top tokens per position; None = no logprobs
    prompt_logprobs: int | None = None
    echo: bool = False  # text and logprobs begin with the prompt
    return_token_ids: bool = False
    skip_special_tokens: bool = True

    @property
    def any_requested(self) -> bool:
        """Whether any extra field is requested."""
        return (
            self.logprobs is not None
            or self.prompt_logprobs is not None
            or self.echo
            or self.return_token_ids
        )

    def check(self, num_prompt_tokens: int, n: int) -> None:
        """Limit the values about prompts that `n` choices would repeat. `num_prompt_tokens`: of all prompts.

        Raises:
            RequestError: 400 if they exceed MAX_PROMPT_VALUES.
        """
        values_per_token = int(self.echo) + int(self.return_token_ids)
        for count in (self.prompt_logprobs, self.logprobs if self.echo else None):
            values_per_token += 0 if count is None else 1 + count
        num_values = num_prompt_tokens * values_per_token * n
        if n > 1 and not self.chat and num_values > MAX_PROMPT_VALUES:
            raise RequestError(
                400,
                "invalid_value",
                f"prompt_logprobs, echo and return_token_ids of {num_prompt_tokens} prompt tokens are "
                f"{num_values} values in {n} choices; an answer with n above 1 has up to "
                f"{MAX_PROMPT_VALUES}; lower n",
                "n",
            )


class ExtraFields(NamedTuple):
    """JSON fields to add to an answer or to a chunk."""

    choice: dict[str, Any]  # inside the choice
    call: dict[str, Any]  # at the top level, beside `choices`


class EchoedPrompt(NamedTuple):
    """The prompt's entries in the four logprobs lists of /v1/completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[msgspec.Raw | None]  # as JSON: written once, entry by entry, for all choices
    offsets: list[int]


NOT_ECHOED = EchoedPrompt([], [], [], [])


class PromptDetails:
    """Extra fields about a prompt. Each is computed once and shared by all choices of the prompt.

    Args:
        text: the prompt's text, with which `echo` begins a choice's text.
    """

    def __init__(
        self, tokenizer: Tokenizer, wanted: RequestedDetails, prompt_ids: Sequence[int], text: str
    ) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self.prompt_ids = list(prompt_ids)
        self.text = text if wanted.echo else ""
        self._logprobs: msgspec.Raw | None = None
        self._echoed: EchoedPrompt | None = None

    def logprobs(self, packed: PackedLogprobs | None) -> msgspec.Raw:
        """The field `prompt_logprobs` as JSON."""
        if self._logprobs is None:
            encode = msgspec.json.Encoder().encode
            entries = [] if packed is None else packed.unpack()
            written = [b"null", *(encode(self._entry(entry)) for entry in entries)]
            self._logprobs = msgspec.Raw(b"[" + b",".join(written) + b"]")
        return self._logprobs

    def echoed(self, packed: PackedLogprobs | None) -> EchoedPrompt:
        """The prompt's tokens with their log probabilities. The caller must not change the lists."""
        if self._echoed is None:
            tokenizer, count = self._tokenizer, self._wanted.logprobs or 0
            encode = msgspec.json.Encoder().encode
            entries = [] if packed is None else packed.unpack()
            self._echoed = EchoedPrompt(
                [_completion_token(tokenizer, token_id) for token_id in self.prompt_ids],
                [None, *(entry.logprob for entry in entries)],
                [None, *(msgspec.Raw(encode(_completion_top(tokenizer, one, count))) for one in entries)],
                self._offsets(),
            )
        return self._echoed

    def _offsets(self) -> list[int]:
        """The offset in the prompt's text of each of its tokens; the text may lack special tokens."""
        detokenizer = Detokenizer(self._tokenizer, (), skip_special_tokens=False)
        offset, offsets = 0, []
        for token_id in self.prompt_ids:
            offsets.append(min(offset, len(self.text)))
            text = detokenizer.push([token_id])
            if not self._tokenizer.is_special(token_id) or self.text.startswith(text, offset):
                offset += len(text)
        return offsets

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        """Token id -> log probability, rank and text, of the top tokens and of the prompt's own token."""
        count = self._wanted.prompt_logprobs or 0
        top = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
        known = {token_id: (rank, logprob) for rank, (token_id, logprob) in enumerate(top, start=1)}
        known.setdefault(entry.token_id, (entry.rank, entry.logprob))
        return {
            str(token_id): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": self._tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
            }
            for token_id, (rank, logprob) in known.items()
        }


class ChoiceDetails:
    """The extra fields of one choice, computed while its tokens arrive.

    Args:
        is_first: whether it is the first choice of its call, which brings the fields beside `choices`.
    """

    def __init__(
        self, tokenizer: Tokenizer, wanted: RequestedDetails, prompt: PromptDetails, is_first: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._prompt = prompt
        self._is_first = is_first
        self._has_started = False
        self._detokenizer = Detokenizer(tokenizer, prompt.prompt_ids, wanted.skip_special_tokens)
        self._offset = len(prompt.text)  # characters of the answer's text before the next token

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        prompt_logprobs: PackedLogprobs | None,
    ) -> tuple[str, ExtraFields]:
        """The text to put before the new tokens' text (the echoed prompt, once), and their fields."""
        wanted, is_first_delta = self._wanted, not self._has_started
        self._has_started = True
        choice: dict[str, Any] = {}
        prompt_fields: dict[str, Any] = {}
        if wanted.logprobs is not None:
            if wanted.chat:
                content = [self._chat_entry(entry) for entry in logprobs or ()]
                choice["logprobs"] = {"content": content, "refusal": None}
            else:
                is_echoed = is_first_delta and wanted.echo
                echoed = self._prompt.echoed(prompt_logprobs) if is_echoed else NOT_ECHOED
                choice["logprobs"] = self._completion_entries(echoed, logprobs or ())
        if wanted.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if is_first_delta:
                prompt_fields["prompt_token_ids"] = self._prompt.prompt_ids
        if wanted.prompt_logprobs is not None and is_first_delta and (self._is_first or not wanted.chat):
            prompt_fields["prompt_logprobs"] = self._prompt.logprobs(prompt_logprobs)
        text = self._prompt.text if is_first_delta else ""
        if wanted.chat:
            return text, ExtraFields(choice, prompt_fields if self._is_first else {})
        return text, ExtraFields(choice | prompt_fields, {})

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        count = self._wanted.logprobs or 0
        top = zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
        return {
            **self._chat_token(entry.token_id, entry.logprob),
            "top_logprobs": [self._chat_token(*one) for one in top],
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _completion_entries(self, echoed: EchoedPrompt, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The four logprobs lists of /v1/completions: the echoed prompt's entries, then the new ones."""
        tokenizer, count = self._tokenizer, self._wanted.logprobs or 0
        offsets = []
        for entry in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([entry.token_id]))
        return {
            "tokens": echoed.tokens + [_completion_token(tokenizer, entry.token_id) for entry in logprobs],
            "token_logprobs": echoed.token_logprobs + [entry.logprob for entry in logprobs],
            "top_logprobs": echoed.top_logprobs
            + [_completion_top(tokenizer, entry, count) for entry in logprobs],
            "text_offset": echoed.offsets + offsets,
        }


def _completion_token(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; bytes that are no complete character in OpenAI's "bytes:" notation."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _completion_top(tokenizer: Tokenizer, entry: TokenLogprobs, count: int) -> dict[str, float]:
    """Text -> log probability, of the top tokens and the token itself. Of equal texts, the likelier wins."""
    found = {}
    for token_id, logprob in zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True):
        found.setdefault(_completion_token(tokenizer, token_id), logprob)
    found.setdefault(_completion_token(tokenizer, entry.token_id), entry.logprob)
    return found
