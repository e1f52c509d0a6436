"""Request bodies of the OpenAI API: bytes in, checked values out.

Promise: every value of a parsed call is within its bounds. A body with another value is refused with a 400
that names the field.
"""

from collections.abc import Collection
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert_value, json_type_name
from minisgl.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    Bias,
    MinP,
    MinTokens,
    NumLogprobs,
    Penalty,
    RepetitionPenalty,
    SamplingParams,
    Seed,
    Temperature,
    TokenId,
    TopK,
    TopP,
    WatchedText,
)
from minisgl.server.choice_details import RequestedDetails
from minisgl.server.http.bodies import Body, Condition, FieldIs, given, missing
from minisgl.text.messages import normalize_messages

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat's default is the rest of the context."""

AtLeastOne = Annotated[int, Meta(ge=1)]
TokenIdKey = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,9})\Z", title="Token id")]
TemplateVariables = Annotated[
    dict[str, Any], Meta(extra_json_schema={"propertyNames": {"not": {"const": "messages"}}})
]
Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Texts = Annotated[list[Text], Meta(min_length=1)]
TokenIdLists = Annotated[list[TokenIds], Meta(min_length=1)]
PROMPT_FORMS = (Text, Texts, TokenIds, TokenIdLists)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults for fields that the client leaves out, from the model's generation_config.json."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's extension: every chunk has the usage so far."""
    include_obfuscation: bool | None = None


class SharedFields(msgspec.Struct, frozen=True):
    """Fields of both endpoints. Those from top_k on are extensions that other engines have too."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: WatchedText | Annotated[list[WatchedText], Meta(max_length=16)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenIdKey, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    """Token id -> number added to its logit."""
    top_k: TopK | None = None
    min_p: MinP | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: MinTokens | None = None
    """At most max_tokens."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    bad_words: Annotated[list[WatchedText], Meta(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    """Return each prompt token's log probability and those of this many top tokens."""
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Larger runs sooner. Each level, up to 100, counts as arriving 1024 requests earlier. Default 0."""


class ChatFields(msgspec.Struct, frozen=True):
    """POST /v1/chat/completions."""

    messages: list[Any]
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None


class CompletionFields(msgspec.Struct, frozen=True):
    """POST /v1/completions."""

    prompt: Any
    """One of `PROMPT_FORMS`."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    """Text and logprobs begin with the prompt."""
    logprobs: NumLogprobs | None = None


SHARED_CONDITIONS = (
    Condition(
        "stream_options",
        "stream_options is only allowed with stream: true",
        (missing("stream_options"), FieldIs("stream", (True,))),
    ),
    Condition(
        "prompt_logprobs",
        "prompt_logprobs can't be streamed; use stream: false",
        (missing("prompt_logprobs"), FieldIs("stream", (None, False))),
    ),
)
IGNORED: dict[str, Neutral] = dict.fromkeys(
    ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Accepted with any value and ignored: they describe the caller and do not affect the answer."""
CHAT = Body(
    (ChatFields, SharedFields),
    (
        *SHARED_CONDITIONS,
        Condition(
            "top_logprobs",
            "top_logprobs is only allowed with logprobs: true",
            (FieldIs("top_logprobs", (None, 0)), FieldIs("logprobs", (True,))),
        ),
    ),
    IGNORED
    | {
        "store": (False,),
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (False, True),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "web_search_options": (),
    },
)
COMPLETION = Body(
    (CompletionFields, SharedFields),
    (
        *SHARED_CONDITIONS,
        Condition(
            "max_tokens",
            "max_tokens must be at least 1; 0 is for echo and prompt_logprobs, which read the prompt only",
            (FieldIs("max_tokens", (0,), negated=True), FieldIs("echo", (True,)), given("prompt_logprobs")),
        ),
    ),
    IGNORED | {"store": (False,), "best_of": (1,), "suffix": ("",)},
)


class CallOptions(NamedTuple):
    """The options of a call: everything in its body except the prompt."""

    model: str | None  # None: the served model
    stream: bool
    include_usage: bool
    continuous_usage: bool
    n: int
    params: SamplingParams
    priority: int = 0
    wanted: RequestedDetails = RequestedDetails()


class ChatCall(NamedTuple):
    messages: list[dict[str, Any]]  # ready for the template: known roles, text content
    options: CallOptions
    template_variables: dict[str, Any] = {}  # noqa: RUF012  never changed
    add_generation_prompt: bool = True


class CompletionCall(NamedTuple):
    prompts: list[str | list[int]]
    options: CallOptions
    is_plain: bool = False  # the answer is text without JSON around it


def parse_chat(body: bytes, defaults: SamplingDefaults, vocab_size: int) -> ChatCall:
    """Parse a body of POST /v1/chat/completions. Token ids must be below `vocab_size`.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    chat, shared = CHAT.read(body)
    messages = normalize_messages(chat.messages)
    check_template_variables(chat.chat_template_kwargs)
    wanted = RequestedDetails(chat=True, logprobs=(chat.top_logprobs or 0) if chat.logprobs else None)
    limits = [limit for limit in (chat.max_tokens, chat.max_completion_tokens) if limit is not None]
    return ChatCall(
        messages,
        _options(shared, defaults, vocab_size, min(limits, default=None), wanted),
        chat.chat_template_kwargs or {},
        chat.add_generation_prompt is not False,
    )


def parse_completion(body: bytes, defaults: SamplingDefaults, vocab_size: int) -> CompletionCall:
    """Parse a body of POST /v1/completions. Token ids must be below `vocab_size`.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    completion, shared = COMPLETION.read(body)
    prompts = _prompts(completion.prompt)
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids(prompt, vocab_size, "prompt")
    wanted = RequestedDetails(logprobs=completion.logprobs, echo=bool(completion.echo))
    limit = _first(completion.max_tokens, max(COMPLETION_MAX_TOKENS, shared.min_tokens or 0))
    return CompletionCall(prompts, _options(shared, defaults, vocab_size, limit, wanted))


def check_template_variables(variables: dict[str, Any] | None) -> None:
    """Refuse template variables that would replace the conversation.

    Raises:
        RequestError: 400 if `variables` holds "messages".
    """
    if variables is not None and "messages" in variables:
        raise RequestError(
            400, "invalid_value", "chat_template_kwargs may not hold messages", "chat_template_kwargs"
        )


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        RequestError: 400 that names `param`.
    """
    if token_ids and max(token_ids) >= vocab_size:
        message = f"{param}: token ids must be from 0 to {vocab_size - 1}, got {max(token_ids)}"
        raise RequestError(400, "invalid_token_id", message, param)


def _options(
    shared: SharedFields,
    defaults: SamplingDefaults,
    vocab_size: int,
    max_tokens: int | None,
    wanted: RequestedDetails,
) -> CallOptions:
    wanted = wanted._replace(
        prompt_logprobs=shared.prompt_logprobs,
        return_token_ids=bool(shared.return_token_ids),
        skip_special_tokens=shared.skip_special_tokens is not False,
    )
    of_prompt = [wanted.prompt_logprobs, wanted.logprobs if wanted.echo else None]
    streaming = _first(shared.stream_options, StreamOptions())
    bias = {int(key): value for key, value in (shared.logit_bias or {}).items()}
    check_token_ids(bias, vocab_size, "logit_bias")
    check_token_ids(shared.stop_token_ids or (), vocab_size, "stop_token_ids")
    check_token_ids(shared.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    params = {
        "max_tokens": max_tokens,
        "temperature": _first(shared.temperature, defaults.temperature),
        "top_p": _first(shared.top_p, defaults.top_p),
        "top_k": _first(shared.top_k, defaults.top_k),
        "min_p": _first(shared.min_p, defaults.min_p),
        "seed": shared.seed,
        "stop": shared.stop,
        "stop_token_ids": shared.stop_token_ids,
        "presence_penalty": shared.presence_penalty,
        "frequency_penalty": shared.frequency_penalty,
        "repetition_penalty": _first(shared.repetition_penalty, defaults.repetition_penalty),
        "logit_bias": bias or None,
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
        include_usage=bool(streaming.include_usage),
        continuous_usage=bool(streaming.continuous_usage_stats),
        n=_first(shared.n, 1),
        priority=shared.priority or 0,
        wanted=wanted,
        params=SamplingParams(**{name: value for name, value in params.items() if value is not None}),
    )


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


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
