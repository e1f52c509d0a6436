"""The answers of POST /generate in SGLang's format, and the call that its `text` or `input_ids` make.

Promise: whole and streamed answers have the same fields. Each event of a stream has all text so far, as
SGLang's clients expect.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert, convert_value, refuse_unknown
from minisgl.replies.conversation import EncodedCall
from minisgl.replies.plan import ReplyPlan
from minisgl.request import MAX_LOGPROBS, MinTokens, NumLogprobs, Seed, TokenId, TokenLogprobs
from minisgl.server.apis.completions import Text, Texts, TokenIdLists, TokenIds, encode_prompt
from minisgl.server.calls.call import CallContext, CallOptions, sse
from minisgl.server.calls.call_fields import OTHER_SERVERS, CacheSalt, check_token_ids, sampling_params
from minisgl.server.calls.openai_answer import DONE, encode, failure
from minisgl.server.http.bodies import DOCUMENTED_AS, Condition, FieldIs, given, missing
from minisgl.server.http.errors import Fault
from minisgl.server.open_choices import Delta
from minisgl.server.sampling_fields import SHARED, SamplingFields
from minisgl.server.served_model import ServedModel
from minisgl.text.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 128


class NativeLengths(Struct, frozen=True):
    """The fields of `sampling_params` that other APIs name otherwise."""

    max_new_tokens: Annotated[int, Meta(ge=0)] | None = None
    """Default 128."""
    min_new_tokens: MinTokens | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    sampling_seed: Seed | None = None
    structural_tag: str | dict[str, Any] | None = None
    no_stop_trim: bool | None = None
    """The stop string or token that ended the reply is part of its text."""


RENAMED = ("prompt_logprobs", "logprob_token_ids")
"""Sampling fields that SGLang has beside `sampling_params`, under other names."""
NativeSampling = msgspec.defstruct(
    "NativeSampling",
    [
        (field.name, field.type, None)
        for kind in (NativeLengths, SamplingFields)
        for field in msgspec.structs.fields(kind)
        if field.name not in RENAMED
    ],
    frozen=True,
)
"""All fields of `sampling_params`."""
SAMPLING_OTHERS: dict[str, Neutral] = {
    **dict.fromkeys(("spaces_between_special_tokens", "stream_interval")),
    "beam_width": (1,),
    "custom_params": ({},),
    "stop_regex": ([], ""),
    "watermark": (),
}


class NativeFields(Struct, frozen=True):
    """SGLang's fields: either `text` or `input_ids`, one or several."""

    text: Annotated[Any, Meta(extra={DOCUMENTED_AS: (Text, Texts)})] = None
    input_ids: Annotated[Any, Meta(extra={DOCUMENTED_AS: (TokenIds, TokenIdLists)})] = None
    sampling_params: Annotated[dict[str, Any], Meta(extra={DOCUMENTED_AS: (NativeSampling,)})] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1)] | None = None
    """With return_logprob: where in the prompt they begin; -1, the default: behind it."""
    top_logprobs_num: NumLogprobs | None = None
    """With return_logprob."""
    token_ids_logprob: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGPROBS)] | None = None
    """With return_logprob: of these tokens."""
    return_text_in_logprobs: bool | None = None
    extra_key: CacheSalt | None = None
    """As cache_salt elsewhere."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


EITHER_BODY = (
    Condition("text", "give prompt, text or input_ids", (given("prompt"), given("text"), given("input_ids"))),
    Condition("text", "give either text or input_ids", (missing("text"), missing("input_ids"))),
    Condition("prompt", "give either prompt or text", (missing("prompt"), missing("text"))),
    *(
        Condition(name, f"{name} is not allowed with prompt; give text", (missing("prompt"), missing(name)))
        for name in NativeFields.__struct_fields__
        if name != "text"
    ),
    Condition("max_tokens", "max_tokens is missing", (missing("prompt"), given("max_tokens"))),
    *(
        Condition(
            name,
            f"{name} is only allowed with prompt; it belongs into sampling_params",
            (given("prompt"), missing(name)),
        )
        for name in ("max_tokens", "ignore_eos")
    ),
    *(
        Condition(
            name,
            f"{name} is only allowed with return_logprob: true",
            (missing(name), FieldIs("return_logprob", (True,)), *others),
        )
        for name, others in (
            ("token_ids_logprob", ()),
            ("top_logprobs_num", (FieldIs("top_logprobs_num", (0,)),)),
            ("logprob_start_len", (FieldIs("logprob_start_len", (-1, 0)),)),
        )
    ),
)
"""A body has mini-sglang's `prompt` or SGLang's fields."""
NATIVE_OTHERS: dict[str, Neutral] = {
    name: values
    for name, values in OTHER_SERVERS.items()
    if name not in ("no_stop_trim", "stop_regex", "spaces_between_special_tokens", "stream_interval")
}


class NativeCall(NamedTuple):
    """A parsed call."""

    prompts: list[str | list[int]]
    is_list: bool  # the answer is a list
    options: CallOptions
    fields: NativeFields
    arrived_at: float
    prompt_field: str

    @property
    def num_prompts(self) -> int:
        """See `Call`."""
        return len(self.prompts)

    def encode(self, model: ServedModel, max_context_tokens: int) -> EncodedCall:
        """See `Call`."""
        params = self.options.params
        prompts = [encode_prompt(prompt, params, model, max_context_tokens) for prompt in self.prompts]
        return EncodedCall(prompts, ReplyPlan(params))

    def answer_format(self, encoded: EncodedCall, context: CallContext) -> "NativeFormat":
        """See `Call`."""
        return NativeFormat(self, encoded, context)


def native_call(fields: NativeFields, model: ServedModel) -> NativeCall:
    """The call that SGLang's fields make.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    field = "text" if fields.text is not None else "input_ids"
    given = fields.text if fields.text is not None else fields.input_ids
    if field == "text":
        is_list = isinstance(given, list)
        prompts: list[Any] = (
            convert_value(given, Texts if is_list else Text, field)
            if is_list
            else [convert_value(given, Text, field)]
        )
    else:
        is_list = isinstance(given, list) and bool(given) and isinstance(given[0], list)
        prompts = (
            convert_value(given, TokenIdLists, field) if is_list else [convert_value(given, TokenIds, field)]
        )
        for ids in prompts:
            check_token_ids(ids, model.tokenizer.vocab_size, field)
    where = "sampling_params."
    sampling = fields.sampling_params or {}
    refuse_unknown(sampling, NativeSampling.__struct_fields__, SAMPLING_OTHERS, where)
    own: NativeLengths = convert(sampling, NativeLengths, where)
    shared = {name: value for name, value in sampling.items() if name in SHARED and value not in (None, "")}
    max_new_tokens = own.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = max(DEFAULT_MAX_NEW_TOKENS, own.min_new_tokens or 0)
    others: dict[str, Any] = {"max_tokens": max_new_tokens, "structural_tag": own.structural_tag or None}
    if own.min_new_tokens is not None:
        others["min_tokens"] = own.min_new_tokens
    if own.sampling_seed is not None:
        others["seed"] = own.sampling_seed
    if own.no_stop_trim:
        others["include_stop_str_in_output"] = True
    if fields.return_logprob:
        others["logprobs"] = fields.top_logprobs_num or 0
        others["logprob_token_ids"] = tuple(fields.token_ids_logprob or ())
        check_token_ids(others["logprob_token_ids"], model.tokenizer.vocab_size, "token_ids_logprob")
        if fields.logprob_start_len not in (None, -1):
            others["prompt_logprobs"] = fields.top_logprobs_num or 0
    if max_new_tokens == 0 and "prompt_logprobs" not in others:
        message = "sampling_params.max_new_tokens must be at least 1; 0 is for logprob_start_len: 0, got 0"
        raise RequestError(400, "invalid_value", message, "sampling_params.max_new_tokens")
    params = sampling_params(convert(shared, SamplingFields, where), model, **others)
    n = own.n or 1
    options = CallOptions(
        params,
        stream=bool(fields.stream),
        n=n,
        priority=fields.priority,
        cache_salt=fields.extra_key or "",
    )
    return NativeCall(prompts, is_list or n > 1, options, fields, time.monotonic(), field)


LogprobEntry = tuple[float | None, int, str | None]
"""Log probability (null: of the prompt's first token), id, text (null unless return_text_in_logprobs)."""


class FinishAnswer(Struct, forbid_unknown_fields=True):
    type: Literal["stop", "length"]
    matched: str | int | UnsetType | None = UNSET
    """The stop string or token id."""
    length: int | UnsetType = UNSET


class MetaInfo(Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    finish_reason: FinishAnswer | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str = "default"
    e2e_latency: float | UnsetType = UNSET
    """Seconds, with the last event."""
    input_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    output_token_logprobs: list[LogprobEntry] | UnsetType = UNSET
    input_top_logprobs: list[list[LogprobEntry] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[LogprobEntry]] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[LogprobEntry]] | UnsetType = UNSET


class NativeAnswer(Struct, forbid_unknown_fields=True, kw_only=True):
    """A list of these if there are several prompts or choices."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
    """In a stream with several: which it is."""


class NativeFormat:
    """Writes the answer of one call."""

    def __init__(self, call: NativeCall, encoded: EncodedCall, context: CallContext) -> None:
        self._call = call
        self._n = call.options.n
        self._params = encoded.plan.params
        self._prompts = encoded.prompts
        self._context = context
        self._text_of: Callable[[int], str | None] = lambda _: None
        if call.fields.return_text_in_logprobs:
            self._text_of = partial(_token_text, context.tokenizer)
        self._so_far: dict[int, Delta] = {}
        self.is_slow = bool(call.fields.return_logprob)

    def whole(self, choices: Sequence[Delta]) -> bytes:
        """The answer of `stream: false`."""
        made = [self._answer(choice) for choice in choices]
        return encode(made if self._call.is_list else made[0])

    def opening(self, num_choices: int) -> bytes:
        """No events."""
        return b""

    def piece(self, delta: Delta) -> bytes:
        """One event with all of the choice so far; none if its text did not grow, and it goes on."""
        before = self._so_far.get(delta.choice)
        if before is not None:
            delta = delta._replace(
                text=before.text + delta.text,
                token_ids=before.token_ids + delta.token_ids,
                num_cached_tokens=max(before.num_cached_tokens, delta.num_cached_tokens),
                logprobs=None if delta.logprobs is None else (before.logprobs or []) + delta.logprobs,
                prompt_logprobs=before.prompt_logprobs or delta.prompt_logprobs,
            )
        self._so_far[delta.choice] = delta
        if delta.finish_reason is None and before is not None and before.text == delta.text:
            return b""
        answer = self._answer(delta)
        if self._call.is_list:
            answer.index = delta.choice
        return sse(encode(answer))

    def ending(self) -> bytes:
        """The final event, [DONE]."""
        return DONE

    def failure(self, fault: Fault) -> bytes:
        """An event with OpenAI's error object."""
        return failure(fault)

    def _answer(self, choice: Delta) -> NativeAnswer:
        """A choice, with all of its tokens so far."""
        prompt, is_over = self._prompts[choice.choice // self._n], choice.finish_reason is not None
        request_id = self._context.request_id
        info = MetaInfo(
            id=f"{request_id}_{choice.choice}" if self._call.is_list else request_id,
            finish_reason=self._finish(choice) if is_over else None,
            prompt_tokens=len(prompt),
            completion_tokens=len(choice.token_ids),
            cached_tokens=choice.num_cached_tokens,
            e2e_latency=time.monotonic() - self._call.arrived_at if is_over else UNSET,
        )
        if self._call.fields.return_logprob:
            self._add_logprobs(info, choice, prompt)
        return NativeAnswer(text=choice.text, output_ids=choice.token_ids, meta_info=info)

    def _finish(self, choice: Delta) -> FinishAnswer:
        if choice.finish_reason == "length":
            return FinishAnswer("length", length=len(choice.token_ids))
        matched = choice.stop_reason
        return FinishAnswer("stop", choice.token_ids[-1] if matched is None and choice.token_ids else matched)

    def _add_logprobs(self, info: MetaInfo, choice: Delta, prompt: Sequence[int]) -> None:
        fields, entries = self._call.fields, choice.logprobs or []
        asked = bool(self._params.logprob_token_ids)
        info.output_token_logprobs = [self._entry(one.logprob, one.token_id) for one in entries]
        if asked:
            info.output_token_ids_logprobs = [self._top(one) for one in entries]
        elif fields.top_logprobs_num:
            info.output_top_logprobs = [self._top(one) for one in entries]
        if self._params.prompt_logprobs is None:
            info.input_token_logprobs = []
            return
        found = choice.prompt_logprobs.unpack() if choice.prompt_logprobs is not None else []
        start = fields.logprob_start_len or 0
        first = [self._entry(None, prompt[0])] if start == 0 else []
        found = found[max(start - 1, 0) :]
        info.input_token_logprobs = first + [self._entry(one.logprob, one.token_id) for one in found]
        if fields.top_logprobs_num:
            info.input_top_logprobs = [*([None] if first else []), *(self._top(one) for one in found)]

    def _top(self, entry: TokenLogprobs) -> list[LogprobEntry]:
        pairs = zip(entry.top_logprobs, entry.top_ids, strict=True)
        return [self._entry(logprob, token_id) for logprob, token_id in pairs]

    def _entry(self, logprob: float | None, token_id: int) -> LogprobEntry:
        return logprob, token_id, self._text_of(token_id)


def _token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
