"""Request bodies of the OpenAI API: bytes in, checked values out.

Promise: no field of a body is ignored that could change the answer: it is honoured, or the request is
refused with a 400 that names it. Only a field's neutral value (null, `n: 1`, `tools: []`) passes.
"""

import re
from typing import Any, NamedTuple

import msgspec

from minisgl.errors import RequestError
from minisgl.request import MAX_LOGPROBS, SamplingParams
from minisgl.server.choice_details import Wanted
from minisgl.server.field_rules import UNSUPPORTED_BY_CHAT, UNSUPPORTED_BY_COMPLETIONS
from minisgl.text.field_rules import kind_of, refuse_unsupported
from minisgl.text.messages import normalize_messages

MAX_CHOICES = 128
MAX_PRIORITY = 2**31 - 1
MAX_STOPS = 16
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may use the room that is left."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What holds when the client leaves a field out: from the model's generation_config.json."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SharedFields(msgspec.Struct, frozen=True):
    """What both endpoints understand. From top_k on they are extensions that other engines have too."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Token id -> what is added to its logit."""
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    """For each token of the prompt its log probability and those of so many likeliest tokens."""
    return_token_ids: bool | None = None
    priority: int | None = None
    """Larger runs sooner; default 0."""


class ChatFields(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None


class CompletionFields(msgspec.Struct, frozen=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    """The text begins with the prompt, and so do the logprobs."""
    logprobs: int | None = None


class CallOptions(NamedTuple):
    """What a body asks for besides its prompt."""

    model: str | None  # None: whatever is served
    stream: bool
    include_usage: bool
    n: int
    params: SamplingParams
    priority: int = 0
    wanted: Wanted = Wanted()


class ChatCall(NamedTuple):
    messages: list[dict[str, Any]]  # ready for the template: known roles, text content
    options: CallOptions
    template_variables: dict[str, Any] = {}  # noqa: RUF012  never changed
    add_generation_prompt: bool = True


class CompletionCall(NamedTuple):
    prompts: list[str | list[int]]
    options: CallOptions
    is_plain: bool = False  # the answer is text without JSON around it


def parse_chat(body: bytes, defaults: SamplingDefaults) -> ChatCall:
    """A body of POST /v1/chat/completions.

    Raises:
        RequestError: 400 with the field at fault.
    """
    fields = decode_object(body)
    known = {*SharedFields.__struct_fields__, *ChatFields.__struct_fields__}
    refuse_unsupported(fields, known, UNSUPPORTED_BY_CHAT)
    chat, shared = convert(fields, ChatFields), convert(fields, SharedFields)
    messages = normalize_messages(chat.messages)
    check_template_variables(chat.chat_template_kwargs)
    if chat.top_logprobs and not chat.logprobs:
        raise RequestError(
            400, "invalid_value", "top_logprobs is only allowed with logprobs: true", "top_logprobs"
        )
    limit = chat.max_completion_tokens
    _at_least_one("max_completion_tokens", limit)
    _at_least_one("max_tokens", shared.max_tokens)
    logprobs = _count("top_logprobs", chat.top_logprobs or 0) if chat.logprobs else None
    return ChatCall(
        messages,
        _options(
            shared,
            defaults,
            limit if limit is not None else shared.max_tokens,
            Wanted(chat=True, logprobs=logprobs),
        ),
        chat.chat_template_kwargs or {},
        chat.add_generation_prompt is not False,
    )


def parse_completion(body: bytes, defaults: SamplingDefaults, vocab_size: int) -> CompletionCall:
    """A body of POST /v1/completions; token ids must be below `vocab_size`.

    Raises:
        RequestError: 400 with the field at fault.
    """
    fields = decode_object(body)
    known = {*SharedFields.__struct_fields__, *CompletionFields.__struct_fields__}
    refuse_unsupported(fields, known, UNSUPPORTED_BY_COMPLETIONS)
    completion, shared = convert(fields, CompletionFields), convert(fields, SharedFields)
    prompts = _prompts(completion.prompt, vocab_size)
    wanted = Wanted(logprobs=_count("logprobs", completion.logprobs), echo=bool(completion.echo))
    limit = shared.max_tokens if shared.max_tokens is not None else COMPLETION_MAX_TOKENS
    if not (limit == 0 and (wanted.echo or shared.prompt_logprobs is not None)):
        _at_least_one("max_tokens", limit)
    return CompletionCall(prompts, _options(shared, defaults, limit, wanted))


def check_template_variables(variables: dict[str, Any] | None) -> None:
    """The conversation itself is no variable of the template.

    Raises:
        RequestError: 400.
    """
    if variables is not None and "messages" in variables:
        raise RequestError(
            400, "invalid_value", "chat_template_kwargs may not hold messages", "chat_template_kwargs"
        )


def decode_object(body: bytes) -> dict[str, Any]:
    """A body's fields.

    Raises:
        RequestError: 400, it is no JSON object.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "invalid_json", f"the body must be a JSON object, got {kind_of(fields)}")
    return fields


def convert(fields: dict[str, Any], kind: type[Any]) -> Any:
    """The struct `kind` with its fields' types checked.

    Raises:
        RequestError: 400 with the field that is missing or of another type.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        missing = re.match(r"Object missing required field `(\w+)`$", text)
        if missing:
            name = missing[1]
            raise RequestError(400, "missing_required_parameter", f"{name} is missing", name) from None
        where = re.search(r" - at `\$\.?([^`]*)`$", text)
        name = where[1] if where else None
        message = f"{name}: {text[: where.start()]}" if where else text
        raise RequestError(400, "invalid_type", message, name) from None


def _options(
    shared: SharedFields, defaults: SamplingDefaults, max_tokens: int | None, wanted: Wanted
) -> CallOptions:
    n = 1 if shared.n is None else shared.n
    if not 1 <= n <= MAX_CHOICES:
        raise RequestError(400, "invalid_value", f"n must be between 1 and {MAX_CHOICES}, got {n}", "n")
    if shared.stream_options is not None and not shared.stream:
        raise RequestError(
            400, "invalid_value", "stream_options is only allowed with stream: true", "stream_options"
        )
    stop = [shared.stop] if isinstance(shared.stop, str) else shared.stop or []
    if len(stop) > MAX_STOPS:
        raise RequestError(
            400, "invalid_value", f"stop may hold {MAX_STOPS} strings, got {len(stop)}", "stop"
        )
    if shared.prompt_logprobs is not None and shared.stream:
        raise RequestError(
            400, "invalid_value", "prompt_logprobs can't be streamed; use stream: false", "prompt_logprobs"
        )
    if shared.allowed_token_ids is not None and not shared.allowed_token_ids:
        raise RequestError(
            400, "invalid_value", "allowed_token_ids is empty and would allow no token", "allowed_token_ids"
        )
    wanted = wanted._replace(
        prompt_logprobs=_count("prompt_logprobs", shared.prompt_logprobs),
        return_token_ids=bool(shared.return_token_ids),
        skip_special_tokens=shared.skip_special_tokens is not False,
    )
    of_prompt = [wanted.prompt_logprobs, wanted.logprobs if wanted.echo else None]
    given = {
        "temperature": _first(shared.temperature, defaults.temperature),
        "top_p": _first(shared.top_p, defaults.top_p),
        "top_k": _first(shared.top_k, defaults.top_k),
        "min_p": _first(shared.min_p, defaults.min_p),
        "seed": shared.seed,
        "presence_penalty": shared.presence_penalty,
        "frequency_penalty": shared.frequency_penalty,
        "repetition_penalty": _first(shared.repetition_penalty, defaults.repetition_penalty),
        "logit_bias": _logit_bias(shared.logit_bias),
        "ignore_eos": shared.ignore_eos,
        "min_tokens": shared.min_tokens,
        "include_stop_str_in_output": shared.include_stop_str_in_output,
        "skip_special_tokens": shared.skip_special_tokens,
        "allowed_token_ids": shared.allowed_token_ids,
        "bad_words": shared.bad_words,
        "logprobs": wanted.logprobs,
        "prompt_logprobs": max((count for count in of_prompt if count is not None), default=None),
    }
    return CallOptions(
        model=shared.model,
        stream=bool(shared.stream),
        include_usage=bool(shared.stream_options and shared.stream_options.include_usage),
        n=n,
        priority=_priority(shared.priority),
        wanted=wanted,
        params=SamplingParams(
            max_tokens=max_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(shared.stop_token_ids or ()),
            **{name: value for name, value in given.items() if value is not None},
        ),
    )


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def _count(name: str, value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise RequestError(
            400, "invalid_value", f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}", name
        )
    return value


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    for key in given:
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise RequestError(
                400, "invalid_value", f"logit_bias: keys must be token ids, got {key[:60]!r}", "logit_bias"
            )
    return {int(key): bias for key, bias in given.items()}


def _priority(given: int | None) -> int:
    if given is not None and not -MAX_PRIORITY - 1 <= given <= MAX_PRIORITY:
        raise RequestError(
            400, "invalid_value", f"priority must be a 32-bit integer, got {given}", "priority"
        )
    return given or 0


def _at_least_one(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise RequestError(400, "invalid_value", f"{name} must be at least 1, got {value}", name)


def _prompts(prompt: str | list[Any], vocab_size: int) -> list[str | list[int]]:
    """OpenAI's four forms of a prompt as a list of texts and token lists."""
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif not prompt:
        prompts = []
    elif all(type(item) is int for item in prompt):
        prompts = [prompt]
    elif all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        prompts = prompt
    else:
        raise RequestError(
            400, "invalid_type", "prompt must be all text, all token ids or all lists of token ids", "prompt"
        )
    if not prompts or not all(prompts):
        raise RequestError(400, "invalid_value", "prompt is empty; give at least one token", "prompt")
    for tokens in prompts:
        if not isinstance(tokens, str):
            check_token_ids(tokens, vocab_size, "prompt")
    return prompts


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Refuse ids that no token can have.

    Raises:
        RequestError: 400 that names `param`.
    """
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise RequestError(
            400, "invalid_value", f"{param}: token ids must be from 0 to {vocab_size - 1}", param
        )
