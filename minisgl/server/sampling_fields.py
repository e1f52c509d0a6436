"""The sampling fields of `SamplingParams` as fields of a JSON body.

Promise: a sampling field's type and bounds stand in `SamplingParams`. Here they only get their JSON form. A
field of `SamplingParams` that is not listed in `NOT_SHARED` is a field of every API that samples.
"""

from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from minisgl.request import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    Bias,
    SamplingParams,
    TokenId,
    WatchedText,
)

TokenIdKey = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,9})\Z", title="Token id")]

NOT_SHARED = {
    *("max_tokens", "logprobs", "bad_words_ids", "choice", "structural_tag", "grammar"),
    *("thinking_token_budget", "thought_limit"),
}
"""Fields of `SamplingParams` that each API has in a form of its own, or that only the engine gets."""
JSON_FORMS: dict[str, Any] = {
    "stop": WatchedText | Annotated[list[WatchedText], Meta(max_length=16)],
    "logit_bias": Annotated[dict[TokenIdKey, Bias], Meta(max_length=MAX_LOGIT_BIAS)],
    "allowed_token_ids": Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)],
    "logprob_token_ids": Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LOGPROBS)],
}
"""The types of sampling fields whose JSON differs from the Python value."""
MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling fields whose default a model's generation_config.json may set."""


def _sampling_struct(name: str, fields: Collection[str]) -> type[msgspec.Struct]:
    """A struct with these sampling fields, each optional."""
    kinds = {field.name: JSON_FORMS.get(field.name, field.type) for field in _SAMPLING}
    return msgspec.defstruct(name, [(field, kinds[field] | None, None) for field in fields], frozen=True)


_SAMPLING = msgspec.structs.fields(SamplingParams)
SHARED = [field.name for field in _SAMPLING if field.name not in NOT_SHARED]
SamplingFields = _sampling_struct("SamplingFields", SHARED)
UNSEEN = ("prompt_logprobs", "logprob_token_ids")
ResponseSampling = _sampling_struct("ResponseSampling", [name for name in SHARED if name not in UNSEEN])
MessagesSampling = _sampling_struct(
    "MessagesSampling", [name for name in SHARED if name not in (*UNSEEN, "stop")]
)
"""Without what the answers of these APIs have no place for; /v1/messages calls `stop` stop_sequences."""
SamplingDefaults = _sampling_struct("SamplingDefaults", MODEL_DEFAULTS)


def given_fields(fields: msgspec.Struct) -> dict[str, Any]:
    """The fields that are not null."""
    return {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}
