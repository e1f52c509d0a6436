"""What an answer says of a choice besides its text: log probabilities, token ids, the prompt again.

Promise: OpenAI's formats. Every token that was generated and counts has its entry, the one that ended the
reply included, so that the entries are as many as the usage says; a stream's entries are those of the whole
answer, each beside the text of its step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from minisgl.request import TokenLogprobs
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.tokenizer import Tokenizer


class Wanted(NamedTuple):
    """What a call asks for."""

    chat: bool = False
    logprobs: int | None = None  # with so many likeliest tokens beside each; None = no logprobs
    prompt_logprobs: int | None = None
    echo: bool = False  # the text begins with the prompt, and so do the logprobs
    return_token_ids: bool = False
    skip_special_tokens: bool = True

    @property
    def anything(self) -> bool:
        """Whether there is something to say at all."""
        return (
            self.logprobs is not None
            or self.prompt_logprobs is not None
            or self.echo
            or self.return_token_ids
        )


class Fields(NamedTuple):
    """Fields to add to an answer, or to a chunk of it."""

    choice: dict[str, Any]
    call: dict[str, Any]  # beside the choices


class ChoiceDetails:
    """The details of one choice while its tokens arrive.

    Args:
        prompt_text: what `echo` begins the text with.
        is_first: of its call; where a field stands beside the choices, only the first choice brings it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        wanted: Wanted,
        prompt_ids: Sequence[int],
        prompt_text: str,
        is_first: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._prompt_ids = prompt_ids
        self._prompt_text = prompt_text if wanted.echo else ""
        self._is_first = is_first
        self._has_begun = False
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, wanted.skip_special_tokens)
        self._offset = len(self._prompt_text)  # characters of the answer's text before the next token

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        prompt_logprobs: Sequence[TokenLogprobs] | None,
    ) -> tuple[str, Fields]:
        """What stands before the new tokens' text, and the fields that go with it."""
        wanted, begins = self._wanted, not self._has_begun
        self._has_begun = True
        choice: dict[str, Any] = {}
        about_prompt: dict[str, Any] = {}
        if wanted.logprobs is not None:
            if wanted.chat:
                content = [self._chat_entry(entry) for entry in logprobs or ()]
                choice["logprobs"] = {"content": content, "refusal": None}
            else:
                choice["logprobs"] = self._completion_entries(logprobs, prompt_logprobs, begins)
        if wanted.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if begins:
                about_prompt["prompt_token_ids"] = list(self._prompt_ids)
        if wanted.prompt_logprobs is not None and begins:
            about_prompt["prompt_logprobs"] = [None, *map(self._prompt_entry, prompt_logprobs or ())]
        text = self._prompt_text if begins else ""
        if wanted.chat:
            return text, Fields(choice, about_prompt if self._is_first else {})
        return text, Fields(choice | about_prompt, {})

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

    def _completion_entries(
        self,
        logprobs: Sequence[TokenLogprobs] | None,
        prompt_logprobs: Sequence[TokenLogprobs] | None,
        begins: bool,
    ) -> dict[str, Any]:
        """The four lists of the completions endpoint; with `echo` the prompt's tokens come first."""
        entries: list[TokenLogprobs | None] = []
        ids: list[int] = []
        offsets: list[int] = []
        if begins and self._wanted.echo:
            entries += [None, *(prompt_logprobs or ())]
            ids += self._prompt_ids
            offsets += self._prompt_offsets()
        for entry in logprobs or ():
            entries.append(entry)
            ids.append(entry.token_id)
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([entry.token_id]))
        return {
            "tokens": [self._completion_token(token_id) for token_id in ids],
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._completion_top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _prompt_offsets(self) -> list[int]:
        """Where each of the prompt's tokens begins in its text; special tokens may be missing there."""
        detokenizer = Detokenizer(self._tokenizer, (), skip_special_tokens=False)
        offset, offsets = 0, []
        for token_id in self._prompt_ids:
            offsets.append(min(offset, len(self._prompt_text)))
            text = detokenizer.push([token_id])
            if not self._tokenizer.is_special(token_id) or self._prompt_text.startswith(text, offset):
                offset += len(text)
        return offsets

    def _completion_token(self, token_id: int) -> str:
        """A token's text; a part of a character as OpenAI writes it."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _completion_top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and, where missing, the token itself; of equal texts the likelier."""
        found = {}
        count = self._wanted.logprobs or 0
        for token_id, logprob in zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True):
            found.setdefault(self._completion_token(token_id), logprob)
        found.setdefault(self._completion_token(entry.token_id), entry.logprob)
        return found

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        """Token id -> what is known of it, of the likeliest tokens and the prompt's own."""
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
