"""POST /v1/chat/completions: fields, answer, and stream chunks, in OpenAI's formats.

Promise: every generated token that counts has a log probability, if requested, so there are as many as
`usage` says. A stream has the same entries as the whole answer; each comes with the text of its step.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast

from msgspec import UNSET, Struct, UnsetType

from minisgl.replies.conversation import Conversation, EncodedCall
from minisgl.replies.plan import effort_variables
from minisgl.replies.tools import new_call_id
from minisgl.request import NumLogprobs, TokenLogprobs
from minisgl.server.calls.call import CallContext, CallOptions, sse
from minisgl.server.calls.call_fields import (
    CONDITIONS,
    IGNORED,
    OTHER_SERVERS,
    AtLeastOne,
    CallFields,
    GivenMessages,
    TemplateVariables,
    ThoughtFields,
    call_options,
    check_template_variables,
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
from minisgl.server.calls.tool_fields import ToolFields, tools_of
from minisgl.server.http.bodies import Body, Condition, FieldIs, missing
from minisgl.server.http.errors import Fault
from minisgl.server.http.routes import EVENTS, JSON, Answer, Route
from minisgl.server.open_choices import Delta
from minisgl.server.sampling_fields import SamplingFields
from minisgl.server.served_model import ServedModel
from minisgl.text.formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    Reply,
    collect,
)
from minisgl.text.messages import normalize_messages

ID_PREFIX = "chatcmpl-"


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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

    messages: GivenMessages
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    """Default: true, without continue_final_message."""
    continue_final_message: bool | None = None
    """The model continues the last message instead of answering it."""
    echo: bool | None = None
    """The answer's content begins with that of the last message, if that is the assistant's."""
    reasoning_effort: Effort | None = None
    """Sets the chat template's variables for it; a 400 if it has none."""
    include_reasoning: bool | None = None
    """False: the answer leaves the thought out."""


CHAT = Body(
    "ChatBody",
    (ChatFields, CallFields, SamplingFields, OutputFields, ToolFields, ThoughtFields),
    (
        *CONDITIONS,
        Condition(
            "top_logprobs",
            "top_logprobs is only allowed with logprobs: true",
            (FieldIs("top_logprobs", (None, 0)), FieldIs("logprobs", (True,))),
        ),
        Condition(
            "logprob_token_ids",
            "logprob_token_ids is only allowed with logprobs: true",
            (missing("logprob_token_ids"), FieldIs("logprobs", (True,))),
        ),
        Condition(
            "continue_final_message",
            "continue_final_message can't go with add_generation_prompt: true; leave one of them out",
            (
                FieldIs("continue_final_message", (True,), negated=True),
                FieldIs("add_generation_prompt", (True,), negated=True),
            ),
        ),
    ),
    IGNORED
    | OTHER_SERVERS
    | {
        "add_special_tokens": (False,),
        "chat_template": (),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "separate_reasoning": (True,),
        "verbosity": (),
        "web_search_options": (),
    },
)


class ChatCall(NamedTuple):
    """A parsed call."""

    conversation: Conversation
    options: CallOptions
    shown: Shown = Shown()
    include_reasoning: bool = True
    echoed: str = ""  # begins the content of the answer
    prompt_field: str = "messages"
    num_prompts: int = 1

    def encode(self, model: ServedModel, max_context_tokens: int) -> EncodedCall:
        """See `Call`."""
        return self.conversation.encode(model, max_context_tokens, self.options.params)

    def answer_format(self, encoded: EncodedCall, context: CallContext) -> "ChatFormat":
        """See `Call`."""
        return ChatFormat(self, encoded, context)


def parse_chat(body: bytes, model: ServedModel) -> ChatCall:
    """Parse a body of POST /v1/chat/completions.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    chat, call, sampling, output, tools, thought = CHAT.read(body)
    messages = normalize_messages(chat.messages)
    check_template_variables(chat.chat_template_kwargs)
    limits = [limit for limit in (chat.max_tokens, chat.max_completion_tokens) if limit is not None]
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    asked = tools_of(tools)
    variables = effort_variables(chat.reasoning_effort, model) | (chat.chat_template_kwargs or {})
    last = messages[-1]
    conversation = Conversation(
        messages,
        asked,
        variables,
        chat.add_generation_prompt is not False,
        truncation=truncation(call),
        continue_final_message=bool(chat.continue_final_message),
    )
    return ChatCall(
        conversation,
        call_options(call, sampling, output, model, min(limits, default=None), logprobs, thought),
        shown_in_answer(call),
        chat.include_reasoning is not False,
        last["content"] if chat.echo and last["role"] == "assistant" else "",
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


class CalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class AnswerCall(Struct, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Struct, forbid_unknown_fields=True):
    """`reasoning` is `reasoning_content`: clients differ in the name. `content` is null beside calls only."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(Struct, forbid_unknown_fields=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | Literal["tool_calls"]
    stop_reason: str | int | None
    """The stop string or the id in stop_token_ids that ended the answer."""
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    sglext: SglExt | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """The first of a call has all fields, and no arguments yet; the others have more of the arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET
    sglext: SglExt | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatFormat:
    """Writes the answer of one call. Fields about the prompt come once, beside the choices."""

    def __init__(self, call: ChatCall, encoded: EncodedCall, context: CallContext) -> None:
        options, prompt_ids, plan = call.options, encoded.prompts[0], encoded.plan
        self._tokenizer = context.tokenizer
        self._readers = [plan.reader() for _ in range(options.n)]
        self._writer = AnswerWriter(
            ID_PREFIX, context, call.shown, self._num_reasoning if plan.reasons else None
        )
        self._include_reasoning = call.include_reasoning
        self._num_top = None if options.params.logprobs is None else options.params.num_top_logprobs
        self._tokens_as_ids = call.shown.tokens_as_ids
        self._echoed = call.echoed
        self._prompt_ids = list(prompt_ids) if call.shown.token_ids else None
        self._prompt_logprobs: PromptLogprobsField | None = None
        if options.params.prompt_logprobs is not None:
            self._prompt_logprobs = PromptLogprobsField(context.tokenizer, options.params.prompt_logprobs)
        self._has_prompt_fields = False
        details = (self._num_top, self._prompt_ids, self._prompt_logprobs)
        self._has_details = any(one is not None for one in details)
        self.is_slow = self._has_details or plan.reads is not None

    def whole(self, choices: Sequence[Delta]) -> bytes:
        """The answer of `stream: false`."""
        ids = UNSET if self._prompt_ids is None else self._prompt_ids
        made = [
            ChatChoice(
                index,
                self._message(collect(self._readers[index].read(choice))),
                self._logprobs(choice),
                cast(EndReason, self._finish_reason(choice)),
                choice.stop_reason,
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
                sglext=self._writer.sglext(),
                prompt_token_ids=ids,
                **self._prompt_fields(choices[0]),
            )
        )

    def opening(self, num_choices: int) -> bytes:
        """For each choice, an event with the role, and one with the text to echo, if requested. The first one
        has the prompt's ids, if requested.
        """
        usage, events = self._writer.chunk_usage(has_output=False), b""
        for index in range(num_choices):
            ids = UNSET if self._prompt_ids is None or index else self._prompt_ids
            for delta in (ChatDelta("assistant", "", None), ChatDelta(content=self._echoed)):
                if delta.role is UNSET and not self._echoed:
                    continue
                choice = ChunkChoice(index, delta)
                chunk = ChatChunk(**self._writer.head, choices=[choice], usage=usage, prompt_token_ids=ids)
                events += sse(encode(chunk))
                ids = UNSET
        return events

    def piece(self, delta: Delta) -> bytes:
        """Events for new text, thoughts, calls and details, and one for the end of the choice."""
        deltas = [made for event in self._readers[delta.choice].read(delta) if (made := self._delta(event))]
        if self._has_details and not deltas:
            deltas = [ChatDelta(content="")]
        events = b""
        for index, made in enumerate(deltas):
            choice = ChunkChoice(delta.choice, made)
            fields: dict[str, Any] = {}
            if index == 0:  # which has what there is of the tokens
                choice.logprobs, choice.token_ids = self._logprobs(delta), self._token_ids(delta)
                fields = self._prompt_fields(delta)
            events += self._event(choice, **fields)
        if delta.finish_reason is not None:
            reason = self._finish_reason(delta)
            end = ChunkChoice(delta.choice, ChatDelta(), finish_reason=reason, stop_reason=delta.stop_reason)
            events += self._event(end, sglext=self._writer.sglext())
        return events

    def ending(self) -> bytes:
        """The chunk with the usage, if requested, then [DONE]."""
        return self._writer.ending(ChatChunk)

    def failure(self, fault: Fault) -> bytes:
        """An event with the error object."""
        return failure(fault)

    def _message(self, reply: Reply) -> AnswerMessage:
        thought = reply.reasoning if reply.reasoning and self._include_reasoning else UNSET
        calls = [
            AnswerCall(new_call_id(), "function", CalledFunction(call.name, call.arguments))
            for call in reply.calls
        ]
        content = None if calls and not self._echoed + reply.content else self._echoed + reply.content
        return AnswerMessage("assistant", content, None, thought, thought, calls or UNSET)

    def _delta(self, event: Event) -> ChatDelta | None:
        """What a chunk says of an event; None: nothing."""
        match event:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                if self._include_reasoning:
                    return ChatDelta(reasoning_content=text, reasoning=text)
            case CallStart(call, name):
                return ChatDelta(
                    tool_calls=[CallDelta(call, FunctionDelta("", name), new_call_id(), "function")]
                )
            case CallArguments(call, text):
                return ChatDelta(tool_calls=[CallDelta(call, FunctionDelta(text))])
            case CallEnd():
                pass
        return None

    def _finish_reason(self, delta: Delta) -> str | None:
        ends_in_calls = self._readers[delta.choice].ends_in_calls
        return "tool_calls" if ends_in_calls and delta.finish_reason == "stop" else delta.finish_reason

    def _num_reasoning(self) -> int:
        return sum(reader.num_reasoning_tokens for reader in self._readers)

    def _event(self, choice: ChunkChoice, **fields: Any) -> bytes:
        usage = self._writer.chunk_usage()
        return sse(encode(ChatChunk(**self._writer.head, choices=[choice], usage=usage, **fields)))

    def _prompt_fields(self, delta: Delta) -> dict[str, Any]:
        """The prompt's log probabilities, with the first delta of the first choice."""
        fields: dict[str, Any] = {}
        if delta.choice != 0 or self._has_prompt_fields:
            return fields
        self._has_prompt_fields = True
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
        text = id_text(token_id) if self._tokens_as_ids else data.decode("utf-8", "replace")
        return TopLogprob(text, logprob, list(data))
