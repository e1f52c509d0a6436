"""POST /v1/completions: fields, answer, and stream chunks, in OpenAI's formats.

Promise: every generated token that counts has a log probability, if requested, so there are as many as
`usage` says. With `echo`, text and log probabilities begin with the prompt's. A stream has the same entries
as the whole answer; each comes with the text of its step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from minisgl.errors import RequestError
from minisgl.fields import convert_value, json_type_name
from minisgl.replies.conversation import EncodedCall, Truncation
from minisgl.replies.plan import ReplyPlan
from minisgl.request import (
    NumLogprobs,
    PackedLogprobs,
    SamplingParams,
    TokenId,
    TokenLogprobs,
    fit_to_context,
)
from minisgl.server.calls.call import CallContext, CallOptions, sse
from minisgl.server.calls.call_fields import (
    CONDITIONS,
    IGNORED,
    OTHER_SERVERS,
    CallFields,
    call_options,
    check_token_ids,
    shown_in_answer,
    truncation,
)
from minisgl.server.calls.completer import Completer
from minisgl.server.calls.openai_answer import (
    AnswerWriter,
    EndReason,
    PromptLogprobs,
    PromptLogprobsField,
    SglExt,
    Shown,
    UsageAnswer,
    encode,
    failure,
    id_text,
)
from minisgl.server.calls.output_format import OutputFields
from minisgl.server.http.bodies import DOCUMENTED_AS, Body, Condition, FieldIs, given, missing
from minisgl.server.http.errors import Fault
from minisgl.server.http.routes import EVENTS, JSON, Answer, Route
from minisgl.server.open_choices import Delta
from minisgl.server.sampling_fields import SamplingFields
from minisgl.server.served_model import ServedModel
from minisgl.text.detokenizer import Detokenizer
from minisgl.text.tokenizer import Tokenizer

ID_PREFIX = "cmpl-"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route. A chat's default is the rest of the context."""
MAX_PROMPT_VALUES = 1 << 20
"""Limit on the values about prompts in one answer with several choices; about 60 MB of JSON."""

Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1)]
TokenIdLists = Annotated[list[TokenIds], Meta(min_length=1)]


def routes(completer: Completer) -> list[Route]:
    """The route of this API."""
    return [
        Route(
            "POST",
            "/v1/completions",
            "Continue a text.",
            partial(completer.answer, parse=parse_completion),
            Answer("The answer, or its events when stream is true.", CompletionAnswer, (JSON, EVENTS)),
            COMPLETION,
        )
    ]


# ---- what comes in


class CompletionFields(Struct, frozen=True):
    """POST /v1/completions."""

    prompt: Annotated[Any, Meta(extra={DOCUMENTED_AS: (Text, Texts, TokenIds, TokenIdLists)})]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    """Text and logprobs begin with the prompt."""
    logprobs: NumLogprobs | None = None


COMPLETION = Body(
    "CompletionBody",
    (CompletionFields, CallFields, SamplingFields, OutputFields),
    (
        *CONDITIONS,
        Condition(
            "max_tokens",
            "max_tokens must be at least 1; 0 is for echo and prompt_logprobs, which read the prompt only",
            (FieldIs("max_tokens", (0,), negated=True), FieldIs("echo", (True,)), given("prompt_logprobs")),
        ),
        Condition(
            "logprob_token_ids",
            "logprob_token_ids is only allowed with logprobs",
            (missing("logprob_token_ids"), given("logprobs")),
        ),
    ),
    IGNORED | OTHER_SERVERS | {"add_special_tokens": (True,), "best_of": (1,), "suffix": ("",)},
)


class CompletionCall(NamedTuple):
    """A parsed call."""

    prompts: list[str | list[int]]
    options: CallOptions
    shown: Shown = Shown()
    echo: bool = False
    prompt_logprobs: int | None = None  # as given; `options.params` may have more, for `echo`
    prompt_field: str = "prompt"
    truncation: Truncation | None = None

    @property
    def num_prompts(self) -> int:
        """See `Call`."""
        return len(self.prompts)

    def encode(self, model: ServedModel, max_context_tokens: int) -> EncodedCall:
        """See `Call`."""
        params = self.options.params
        prompts = [
            encode_prompt(prompt, params, model, max_context_tokens, self.truncation)
            for prompt in self.prompts
        ]
        return EncodedCall(prompts, ReplyPlan(params))

    def answer_format(self, encoded: EncodedCall, context: CallContext) -> "CompletionFormat":
        """See `Call`."""
        prompts = encoded.prompts
        _check_size(self, sum(map(len, prompts)))
        tokenizer, texts = context.tokenizer, [""] * len(prompts)
        if self.echo:
            skip = self.options.params.skip_special_tokens
            texts = [
                given
                if isinstance(given, str) and self.truncation is None
                else tokenizer.decode(list(ids), skip_special_tokens=skip)
                for given, ids in zip(self.prompts, prompts, strict=True)
            ]
        details = [PromptDetails(tokenizer, self, *one) for one in zip(prompts, texts, strict=True)]
        return CompletionFormat(self, details, context)


def parse_completion(body: bytes, model: ServedModel) -> CompletionCall:
    """Parse a body of POST /v1/completions.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    completion, call, sampling, output = COMPLETION.read(body)
    prompts = _prompts(completion.prompt)
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids(prompt, model.tokenizer.vocab_size, "prompt")
    max_tokens = completion.max_tokens
    if max_tokens is None:
        max_tokens = max(DEFAULT_MAX_TOKENS, sampling.min_tokens or 0)
    options = call_options(call, sampling, output, model, max_tokens, completion.logprobs)
    prompt_logprobs = options.params.prompt_logprobs
    if completion.echo and completion.logprobs is not None:
        num_top = max(completion.logprobs, prompt_logprobs or 0)
        options = options._replace(params=msgspec.structs.replace(options.params, prompt_logprobs=num_top))
    return CompletionCall(
        prompts,
        options,
        shown_in_answer(call),
        bool(completion.echo),
        prompt_logprobs,
        truncation=truncation(call),
    )


def encode_prompt(
    prompt: str | list[int],
    params: SamplingParams,
    model: ServedModel,
    max_context_tokens: int,
    truncation: Truncation | None = None,
) -> list[int]:
    """The token ids of a prompt.

    Raises:
        RequestError: 400 if it is empty or too long.
    """
    limit = max_context_tokens if truncation is None else None
    is_text = isinstance(prompt, str)
    prompt_ids = model.tokenizer.encode(prompt, True, max_tokens=limit) if is_text else prompt
    if truncation is not None:
        prompt_ids = truncation.cut(prompt_ids, params, max_context_tokens)
    fit_to_context(len(prompt_ids), params, max_context_tokens)
    return prompt_ids


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Convert any of OpenAI's four forms of a prompt to a list of texts and token id lists."""
    if isinstance(prompt, str):
        return [convert_value(prompt, Text, "prompt")]
    if not isinstance(prompt, list):
        raise RequestError(
            400,
            "invalid_type",
            f"prompt must be text, token ids, or a list of either, got {json_type_name(prompt)}",
            "prompt",
        )
    first = prompt[0] if prompt else None
    if isinstance(first, int):
        return [convert_value(prompt, TokenIds, "prompt")]
    return convert_value(prompt, TokenIdLists if isinstance(first, list) else Texts, "prompt")


def _check_size(call: CompletionCall, num_prompt_tokens: int) -> None:
    """Limit the values about prompts in an answer with several choices. A single choice has no limit but the
    model's context.

    Raises:
        RequestError: 400 if they exceed MAX_PROMPT_VALUES.
    """
    options, n = call.options, call.options.n
    values_per_token = int(call.echo) + int(call.shown.token_ids)
    for count in (call.prompt_logprobs, options.params.logprobs if call.echo else None):
        values_per_token += 0 if count is None else 1 + count
    num_choices, num_values = call.num_prompts * n, num_prompt_tokens * values_per_token * n
    if num_choices > 1 and num_values > MAX_PROMPT_VALUES:
        raise RequestError(
            400,
            "invalid_value",
            f"prompt_logprobs, echo and return_token_ids of {num_prompt_tokens} prompt tokens are "
            f"{num_values} values in {num_choices} choices; an answer with several choices has up to "
            f"{MAX_PROMPT_VALUES}; " + ("lower n" if n > 1 else "send fewer prompts at a time"),
            "n" if n > 1 else "prompt",
        )


# ---- what goes out


class CompletionLogprobs(Struct, forbid_unknown_fields=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChoiceFields(Struct, kw_only=True, forbid_unknown_fields=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChoice(ChoiceFields, kw_only=True, forbid_unknown_fields=True):
    finish_reason: EndReason
    stop_reason: str | int | None
    """The stop string or the id in stop_token_ids that ended the choice."""


class ChunkChoice(ChoiceFields, kw_only=True):
    finish_reason: EndReason | None
    stop_reason: str | int | UnsetType | None = UNSET


class CompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET
    sglext: SglExt | UnsetType = UNSET


class CompletionAnswer(Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer
    sglext: SglExt | UnsetType = UNSET


NOT_ECHOED = CompletionLogprobs([], [], [], [])


class PromptDetails:
    """Fields about a prompt. Each is made once and shared by all choices of the prompt.

    Args:
        text: the prompt's text, with which `echo` begins a choice's text.
    """

    def __init__(
        self, tokenizer: Tokenizer, call: CompletionCall, prompt_ids: Sequence[int], text: str
    ) -> None:
        self._tokenizer = tokenizer
        self._token_text = _token_texts(tokenizer, call)
        self._call = call
        self._echoed: CompletionLogprobs | None = None
        self._logprobs: PromptLogprobsField | None = None
        if call.prompt_logprobs is not None:
            self._logprobs = PromptLogprobsField(tokenizer, call.prompt_logprobs)
        self.prompt_ids = list(prompt_ids)
        self.text = text

    def logprobs(self, packed: PackedLogprobs | None) -> PromptLogprobs | UnsetType:
        """The field `prompt_logprobs`, if requested."""
        return UNSET if self._logprobs is None else self._logprobs.logprobs(packed)

    def echoed(self, packed: PackedLogprobs | None) -> CompletionLogprobs:
        """The prompt's tokens with their log probabilities. The caller must not change the lists."""
        if self._echoed is None:
            text, num_top = self._token_text, self._call.options.params.logprobs or 0
            entries = [] if packed is None else packed.unpack()
            # Entry by entry, because encoding a large list at once would hold up other threads.
            top = [msgspec.Raw(encode(_top_logprobs(text, entry, num_top))) for entry in entries]
            self._echoed = CompletionLogprobs(
                [text(token_id) for token_id in self.prompt_ids],
                [None, *(entry.logprob for entry in entries)],
                [None, *cast("list[dict[str, float]]", top)],
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


class ChoiceWriter:
    """Makes the fields of one choice while its tokens arrive."""

    def __init__(self, tokenizer: Tokenizer, call: CompletionCall, prompt: PromptDetails) -> None:
        self._token_text = _token_texts(tokenizer, call)
        self._options = call.options
        self._shows_token_ids = call.shown.token_ids
        self._echo = call.echo
        self._prompt = prompt
        self._has_started = False
        skip_special_tokens = call.options.params.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, prompt.prompt_ids, skip_special_tokens)
        self._offset = len(prompt.text)  # characters of the answer's text before the next token

    def fields(self, delta: Delta) -> dict[str, Any]:
        """The fields of a delta, as `ChoiceFields` has them. Those about the prompt come with the first."""
        is_first, self._has_started = not self._has_started, True
        fields: dict[str, Any] = {"text": delta.text, "logprobs": None}
        if is_first:
            fields["text"] = self._prompt.text + delta.text
            fields["prompt_logprobs"] = self._prompt.logprobs(delta.prompt_logprobs)
        if self._options.params.logprobs is not None:
            is_echoed = is_first and self._echo
            echoed = self._prompt.echoed(delta.prompt_logprobs) if is_echoed else NOT_ECHOED
            fields["logprobs"] = self._logprobs(echoed, delta.logprobs or ())
        if self._shows_token_ids:
            fields["token_ids"] = delta.token_ids
            if is_first:
                fields["prompt_token_ids"] = self._prompt.prompt_ids
        return fields

    def _logprobs(self, echoed: CompletionLogprobs, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The echoed prompt's log probabilities, then the new ones."""
        text, num_top = self._token_text, self._options.params.num_top_logprobs
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([entry.token_id]))
        return CompletionLogprobs(
            echoed.tokens + [text(entry.token_id) for entry in entries],
            echoed.token_logprobs + [entry.logprob for entry in entries],
            echoed.top_logprobs + [_top_logprobs(text, entry, num_top) for entry in entries],
            echoed.text_offset + offsets,
        )


class CompletionFormat:
    """Writes the answer of one call."""

    def __init__(self, call: CompletionCall, prompts: Sequence[PromptDetails], context: CallContext) -> None:
        options = call.options
        self._writer = AnswerWriter(ID_PREFIX, context, call.shown)
        details = (options.params.logprobs, call.prompt_logprobs, call.echo or None)
        self.is_slow = call.shown.token_ids or any(one is not None for one in details)
        self._choices: list[ChoiceWriter] = []
        if self.is_slow:
            self._choices = [
                ChoiceWriter(context.tokenizer, call, prompt) for prompt in prompts for _ in range(options.n)
            ]

    def whole(self, choices: Sequence[Delta]) -> bytes:
        """The answer of `stream: false`."""
        made = [
            CompletionChoice(
                index=choice.choice,
                finish_reason=cast(EndReason, choice.finish_reason),
                stop_reason=choice.stop_reason,
                **self._fields(choice),
            )
            for choice in choices
        ]
        head, usage, sglext = self._writer.head, self._writer.whole_usage(), self._writer.sglext()
        return encode(
            CompletionAnswer(**head, object="text_completion", choices=made, usage=usage, sglext=sglext)
        )

    def opening(self, num_choices: int) -> bytes:
        """No events."""
        return b""

    def piece(self, delta: Delta) -> bytes:
        """One event; none if the delta has neither text nor details, and is not the last."""
        if not delta.text and not self.is_slow and delta.finish_reason is None:
            return b""
        finish_reason = cast("EndReason | None", delta.finish_reason)
        stop_reason = UNSET if finish_reason is None else delta.stop_reason
        choice = ChunkChoice(
            index=delta.choice, finish_reason=finish_reason, stop_reason=stop_reason, **self._fields(delta)
        )
        usage = self._writer.chunk_usage()
        sglext = UNSET if finish_reason is None else self._writer.sglext()
        return sse(encode(CompletionChunk(**self._writer.head, choices=[choice], usage=usage, sglext=sglext)))

    def ending(self) -> bytes:
        """The chunk with the usage, if requested, then [DONE]."""
        return self._writer.ending(CompletionChunk)

    def failure(self, fault: Fault) -> bytes:
        """An event with the error object."""
        return failure(fault)

    def _fields(self, delta: Delta) -> dict[str, Any]:
        if not self._choices:
            return {"text": delta.text, "logprobs": None}
        return self._choices[delta.choice].fields(delta)


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; bytes that are no complete character in OpenAI's "bytes:" notation."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _token_texts(tokenizer: Tokenizer, call: CompletionCall) -> Callable[[int], str]:
    """How the call's log probabilities name tokens."""
    return id_text if call.shown.tokens_as_ids else partial(_token_text, tokenizer)


def _top_logprobs(text: Callable[[int], str], entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    """Text -> log probability, of the top tokens and the token itself. Of equal texts, the likelier wins."""
    found = {}
    for token_id, logprob in zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True):
        found.setdefault(text(token_id), logprob)
    found.setdefault(text(entry.token_id), entry.logprob)
    return found
