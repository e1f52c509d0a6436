"""Bodies and answers of the routes that OpenAI has not got."""

from typing import Any

import msgspec

from minisgl.server.openai_schema import convert, decode_object
from minisgl.text.field_rules import refuse_unsupported


class GenerateBody(msgspec.Struct, frozen=True):
    """POST /generate, as in mini-sglang."""

    prompt: str
    max_tokens: int
    ignore_eos: bool = False


class AbortBody(msgspec.Struct, frozen=True):
    """POST /abort: either `request_id` (alias `rid`) or `abort_all`."""

    request_id: str | None = None
    """The X-Request-Id of a call, or the id of its answer."""
    rid: str | None = None
    abort_all: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages, whose template has them already."""
    add_generation_prompt: bool | None = None
    """With messages only; default true."""
    chat_template_kwargs: dict[str, Any] | None = None
    """With messages only."""
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None
    """Default false."""


class DetokenizeAnswer(msgspec.Struct):
    prompt: str


class ErrorFields(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorFields


def read_body(data: bytes, kind: type[Any]) -> Any:
    """A body as one of the structs above.

    Raises:
        RequestError: 400 with the field at fault; fields it does not know included.
    """
    fields = decode_object(data)
    refuse_unsupported(fields, set(kind.__struct_fields__), {})
    return convert(fields, kind)
