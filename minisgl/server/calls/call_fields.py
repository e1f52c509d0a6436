"""The fields that OpenAI's APIs for generating text share, and the options that a call's fields make.

Promise: every value of the options is within its bounds. A body with another value is refused with a 400 that
names the field.
"""

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from minisgl.errors import RequestError
from minisgl.fields import Neutral
from minisgl.replies.conversation import Truncation
from minisgl.request import SamplingParams, ThoughtTokens
from minisgl.server.calls.call import CallOptions
from minisgl.server.calls.openai_answer import Shown
from minisgl.server.calls.output_format import OutputFields, grammar_of
from minisgl.server.http.bodies import DOCUMENTED_AS, Condition, FieldIs, given, missing
from minisgl.server.sampling_fields import given_fields
from minisgl.server.served_model import ServedModel
from minisgl.text.messages import Messages

AtLeastOne = Annotated[int, Meta(ge=1)]
TemplateVariables = Annotated[
    dict[str, Any], Meta(extra_json_schema={"propertyNames": {"not": {"const": "messages"}}})
]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=1024)]
"""A call finds only what calls with the same salt left in the prefix cache."""
GivenMessages = Annotated[list[Any], Meta(extra={DOCUMENTED_AS: (Messages,)})]
"""`normalize_messages` reads it."""

TOKEN_ID_FIELDS = ("logit_bias", "stop_token_ids", "allowed_token_ids", "logprob_token_ids")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's extension: every chunk has the usage so far. Without include_usage it has no effect."""
    include_obfuscation: bool | None = None


class ThoughtFields(msgspec.Struct, frozen=True):
    """How long a reasoning model may think. vLLM has the same field."""

    thinking_token_budget: ThoughtTokens | None = None
    """Most tokens of the thought; then it is ended and the answer follows. -1: no limit."""


class CallFields(msgspec.Struct, frozen=True):
    """The fields about a call as a whole. Those from return_token_ids on are extensions of other servers."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Larger runs sooner. Each level, up to 100, counts as arriving 1024 requests earlier. Default 0."""
    cache_salt: CacheSalt | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log probabilities name tokens as "token_id:5" instead of by their text."""
    return_cached_tokens_details: bool | None = None
    """SGLang's: the answer, or the last chunk of each choice, has `sglext` with the cached tokens."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Keep this many tokens of a longer prompt; -1: as many as the context has beside max_tokens."""
    truncation_side: Literal["left", "right"] | None = None
    """Where truncate_prompt_tokens drops tokens; default left."""


CONDITIONS = (
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
    Condition(
        "truncate_prompt_tokens",
        "truncate_prompt_tokens must be -1 or at least 1, got 0",
        (FieldIs("truncate_prompt_tokens", (0,), negated=True),),
    ),
    Condition(
        "truncation_side",
        "truncation_side is only allowed with truncate_prompt_tokens",
        (missing("truncation_side"), given("truncate_prompt_tokens")),
    ),
)
IGNORED: dict[str, Neutral] = {
    "user": None,
    "metadata": None,
    "service_tier": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "store": (False,),
}
"""Accepted and ignored with these values (None = any): they describe the caller, not the answer."""
OTHER_SERVERS: dict[str, Neutral] = {
    # vLLM's
    **dict.fromkeys(("request_id", "session_id", "stream_interval", "spaces_between_special_tokens")),
    **dict.fromkeys(
        (
            "use_beam_search",
            "watermarking",
            "return_token_offsets",
            "return_prompt_text",
            "return_routed_experts",
        ),
        (False,),
    ),
    **dict.fromkeys(("logits_processors", "prompt_embeds", "documents"), ([],)),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "vllm_xargs", "kv_transfer_params"), ({},)),
    **dict.fromkeys(("ec_transfer_params", "repetition_detection"), ()),
    "length_penalty": (1,),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
    # SGLang's
    **dict.fromkeys(
        ("rid", "routing_key", "conversation_id", "custom_labels", "stream_reasoning", "log_metrics")
    ),
    **dict.fromkeys(
        (
            *("return_hidden_states", "return_spec_tokens_details"),
            *("return_prompt_token_ids", "return_meta_info", "return_input_ids_in_sglext"),
            *("return_output_ids_in_sglext", "return_sampling_mask", "return_indexer_topk", "return_entropy"),
            *("return_flat_raw_top_logprobs", "return_flat_raw_output_top_logprobs", "no_stop_trim"),
            *("use_audio_in_video", "return_bytes", "require_reasoning", "background"),
        ),
        (False,),
    ),
    **dict.fromkeys(("images_config", "video_config", "custom_params"), ({},)),
    **dict.fromkeys(("image_data", "video_data", "audio_data", "stop_regex"), ([], "")),
    **dict.fromkeys(("session_params", "custom_logit_processor", "watermark", "sampling_logprobs_mode"), ()),
    **dict.fromkeys(("lora_path", "max_thinking_tokens", "input_embeds"), ()),
    "return_flat_raw_top_logprobs_b64": None,
    "routed_experts_start_len": (0,),
}
"""Fields of other servers, with the values that ask for nothing this server does not do."""


def call_options(
    call: CallFields,
    sampling: msgspec.Struct,
    output: OutputFields,
    model: ServedModel,
    max_tokens: int | None,
    logprobs: int | None,
    thought: ThoughtFields | None = None,
) -> CallOptions:
    """The options that the fields and the model's defaults make.

    Args:
        sampling: the `SamplingFields` of the body.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    return CallOptions(
        sampling_params(
            sampling,
            model,
            max_tokens=max_tokens,
            logprobs=logprobs,
            grammar=grammar_of(output),
            thinking_token_budget=None if thought is None else thought.thinking_token_budget,
        ),
        model=call.model,
        stream=bool(call.stream),
        n=call.n or 1,
        priority=call.priority,
        cache_salt=call.cache_salt or "",
    )


def shown_in_answer(call: CallFields) -> Shown:
    """What the answer shows besides its choices' texts."""
    streaming = call.stream_options or StreamOptions()
    usage = bool(streaming.include_usage)
    return Shown(
        usage,
        usage and bool(streaming.continuous_usage_stats),
        bool(call.return_token_ids),
        bool(call.return_tokens_as_token_ids),
        bool(call.return_cached_tokens_details),
    )


def truncation(call: CallFields) -> Truncation | None:
    """How the prompts are shortened; None: they are not."""
    if call.truncate_prompt_tokens is None:
        return None
    return Truncation(call.truncate_prompt_tokens, call.truncation_side or "left")


def sampling_params(sampling: msgspec.Struct, model: ServedModel, **others: Any) -> SamplingParams:
    """The parameters that a body's sampling fields and the model's defaults make.

    Args:
        sampling: the `SamplingFields` of the body.
        others: those that come from other fields.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    given = given_fields(sampling)
    bias = {int(key): value for key, value in given.get("logit_bias", {}).items()}
    given["logit_bias"] = bias or None
    for name in TOKEN_ID_FIELDS:
        check_token_ids(given.get(name) or (), model.tokenizer.vocab_size, name)
    return SamplingParams(**{**model.defaults, **given, **others})


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        RequestError: 400 that names `param`.
    """
    if token_ids and max(token_ids) >= vocab_size:
        message = f"{param}: token ids must be from 0 to {vocab_size - 1}, got {max(token_ids)}"
        raise RequestError(400, "invalid_token_id", message, param)


def check_template_variables(variables: dict[str, Any] | None) -> None:
    """Refuse template variables that would replace the conversation.

    Raises:
        RequestError: 400 if `variables` holds "messages".
    """
    if variables is not None and "messages" in variables:
        raise RequestError(
            400, "invalid_value", "chat_template_kwargs may not hold messages", "chat_template_kwargs"
        )
