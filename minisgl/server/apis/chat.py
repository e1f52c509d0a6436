"""POST /v1/chat/completions: fields, answer, and stream chunks, in OpenAI's formats.

Promise: every generated token that counts has a log probability, if requested, so there are as many as
`usage` says. A stream has the same entries as the whole answer; each comes with the text of its step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from msgspec import UNSET, Struct, UnsetType

from minisgl.request import NumLogprobs, TokenLogprobs
from minisgl.server.apis.call import CallContext, CallOptions, sse
from minisgl.server.apis.call_fields import (
    CONDITIONS,
    IGNORED,
    AtLeastOne,
    CallFields,
    Conversation,
    TemplateVariables,
    call_options,
    check_template_variables,
)
from minisgl.server.apis.completer import Completer
from minisgl.server.apis.openai_answer import (
    AnswerWriter,
    EndReason,
    PromptLogprobs,
    PromptLogprobsField,
    UsageAnswer,
    encode,
)
from minisgl.server.apis.output_format import OutputFields
from minisgl.server.http.bodies import Body, Condition, FieldIs
from minisgl.server.http.routes import EVENTS, JSON, Answer, Route
from minisgl.server.open_choices import Delta
from minisgl.server.sampling_fields import SamplingFields
from minisgl.server.served_model import ServedModel
from minisgl.text.messages import normalize_messages

ID_PREFIX = "chatcmpl-"


def routes(completer: Completer) -> list[Route]:
    """The route of this API."""
    return [
        Route(
            "POST",
            "/v1/chat/completions",
            "Continue a conversation.",
            partial(completer.answer, parse=parse_chat),
            Answer("The answer, or its events when stream is true.", ChatAnswer, (JSON, EVENTS)),
            CHAT,
        )
    ]


# ---- what comes in


class ChatFields(Struct, frozen=True):
    """POST /v1/chat/completions."""

    messages: Conversation
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None


CHAT = Body(
    "ChatBody",
    (ChatFields, CallFields, SamplingFields, OutputFields),
    (
        *CONDITIONS,
        Condition(
            "top_logprobs",
            "top_logprobs is only allowed with logprobs: true",
            (FieldIs("top_logprobs", (None, 0)), FieldIs("logprobs", (True,))),
        ),
    ),
    IGNORED
    | {
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (False, True),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "web_search_options": (),
    },
)


class ChatCall(NamedTuple):
    """A parsed call."""

    messages: list[dict[str, Any]]  # ready for the template: known roles, text content
    options: CallOptions
    template_variables: dict[str, Any] = {}  # noqa: RUF012  never changed
    add_generation_prompt: bool = True
    prompt_field: str = "messages"
    num_prompts: int = 1

    def encode(self, model: ServedModel, max_context_tokens: int) -> list[list[int]]:
        """See `Call`. A chat template adds special tokens itself, so none are added to its text."""
        text = model.template.render(self.messages, self.add_generation_prompt, self.template_variables)
        return [model.tokenizer.encode(text, False, max_tokens=max_context_tokens, param="messages")]

    def answer_format(self, prompts: Sequence[Sequence[int]], context: CallContext) -> "ChatFormat":
        """See `Call`."""
        return ChatFormat(self.options, prompts[0], context)


def parse_chat(body: bytes, model: ServedModel) -> ChatCall:
    """Parse a body of POST /v1/chat/completions.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    chat, call, sampling, output = CHAT.read(body)
    messages = normalize_messages(chat.messages)
    check_template_variables(chat.chat_template_kwargs)
    limits = [limit for limit in (chat.max_tokens, chat.max_completion_tokens) if limit is not None]
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    return ChatCall(
        messages,
        call_options(call, sampling, output, model, min(limits, default=None), logprobs),
        chat.chat_template_kwargs or {},
        chat.add_generation_prompt is not False,
    )


# ---- what goes out


class TopLogprob(Struct, forbid_unknown_fields=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, forbid_unknown_fields=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    content: list[ChatLogprob]
    refusal: None


class AnswerMessage(Struct, forbid_unknown_fields=True):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Struct, forbid_unknown_fields=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatFormat:
    """Writes the answer of one call. Fields about the prompt come once, beside the choices."""

    def __init__(self, options: CallOptions, prompt_ids: Sequence[int], context: CallContext) -> None:
        self._tokenizer = context.tokenizer
        self._writer = AnswerWriter(ID_PREFIX, context, options)
        self._num_top = options.params.logprobs
        self._prompt_ids = list(prompt_ids) if options.return_token_ids else None
        self._prompt_logprobs: PromptLogprobsField | None = None
        if options.params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobsField(context.tokenizer, options.params.prompt_logprobs)
        self._has_prompt_fields = False
        details = (self._num_top, self._prompt_ids, self._prompt_logprobs)
        self.has_details = any(one is not None for one in details)

    def whole(self, choices: Sequence[Delta]) -> bytes:
        """The answer of `stream: false`."""
        made = [
            ChatChoice(
                index,
                AnswerMessage("assistant", choice.text, None),
                self._logprobs(choice),
                cast(EndReason, choice.finish_reason),
                self._token_ids(choice),
            )
            for index, choice in enumerate(choices)
        ]
        return encode(
            ChatAnswer(
                **self._writer.head,
                object="chat.completion",
                choices=made,
                usage=self._writer.whole_usage(),
                **self._prompt_fields(choices[0]),
            )
        )

    def opening(self, num_choices: int) -> bytes:
        """For each choice, an event with the role."""
        return b"".join(
            self._event(ChunkChoice(index, ChatDelta("assistant", "", None))) for index in range(num_choices)
        )

    def piece(self, delta: Delta) -> bytes:
        """An event for new text or details, and one for the end of the choice."""
        events = b""
        if delta.text or self.has_details:
            choice = ChunkChoice(
                delta.choice,
                ChatDelta(content=delta.text),
                self._logprobs(delta),
                token_ids=self._token_ids(delta),
            )
            events = self._event(choice, **self._prompt_fields(delta))
        if delta.finish_reason is not None:
            events += self._event(ChunkChoice(delta.choice, ChatDelta(), finish_reason=delta.finish_reason))
        return events

    def ending(self) -> bytes:
        """The chunk with the usage, if requested, then [DONE]."""
        return self._writer.ending(ChatChunk)

    def _event(self, choice: ChunkChoice, **prompt_fields: Any) -> bytes:
        usage = self._writer.chunk_usage()
        return sse(encode(ChatChunk(**self._writer.head, choices=[choice], usage=usage, **prompt_fields)))

    def _prompt_fields(self, delta: Delta) -> dict[str, Any]:
        """The fields about the prompt, with the first delta of the first choice."""
        fields: dict[str, Any] = {}
        if delta.choice != 0 or self._has_prompt_fields:
            return fields
        self._has_prompt_fields = True
        if self._prompt_ids is not None:
            fields["prompt_token_ids"] = self._prompt_ids
        if self._prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._prompt_logprobs.logprobs(delta.prompt_logprobs)
        return fields

    def _token_ids(self, delta: Delta) -> list[int] | UnsetType:
        return UNSET if self._prompt_ids is None else delta.token_ids

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self._num_top is None:
            return None
        return ChatLogprobs([self._entry(entry) for entry in delta.logprobs or ()], refusal=None)

    def _entry(self, entry: TokenLogprobs) -> ChatLogprob:
        token, num_top = self._token(entry.token_id, entry.logprob), self._num_top
        top = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
        return ChatLogprob(token.token, token.logprob, token.bytes, [self._token(*one) for one in top])

    def _token(self, token_id: int, logprob: float) -> TopLogprob:
        data = self._tokenizer.token_bytes(token_id)
        return TopLogprob(data.decode("utf-8", "replace"), logprob, list(data))
