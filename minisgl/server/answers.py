"""Schemas of the OpenAI API's answers, for the OpenAPI document.

Promise: every answer converts to its struct without unknown fields (tests/server/test_every_field.py).
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class CachedTokens(Struct, forbid_unknown_fields=True):
    cached_tokens: int


class UsageAnswer(Struct, forbid_unknown_fields=True):
    """Token counts. A prompt counts once, whatever the number of its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptLogprob(Struct, forbid_unknown_fields=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, a dict by token id; null for the first token."""


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


class CompletionLogprobs(Struct, forbid_unknown_fields=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class AnswerMessage(Struct, forbid_unknown_fields=True):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Struct, forbid_unknown_fields=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionChoice(Struct, forbid_unknown_fields=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class ModelCard(Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    """null until the engine is ready."""


class ModelList(Struct, forbid_unknown_fields=True):
    object: Literal["list"]
    data: list[ModelCard]
