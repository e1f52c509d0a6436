"""Bodies and answers of the routes that the OpenAI API does not have."""

from typing import Any

import msgspec

from minisgl.request import TokenId
from minisgl.server.http.bodies import Body, Condition, FieldIs, given, missing
from minisgl.server.openai_schema import AtLeastOne, TemplateVariables, Text


class GenerateBody(msgspec.Struct, frozen=True):
    """POST /generate, as in mini-sglang."""

    prompt: Text
    max_tokens: AtLeastOne
    ignore_eos: bool | None = None


class AbortBody(msgspec.Struct, frozen=True):
    """POST /abort: either `request_id` (alias `rid`) or `abort_all`."""

    request_id: str | None = None
    """The X-Request-Id of the call, or the id of its answer."""
    rid: str | None = None
    abort_all: bool | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt; false for messages, whose template adds them itself."""
    add_generation_prompt: bool | None = None
    """Only with messages; default true."""
    chat_template_kwargs: TemplateVariables | None = None
    """Only with messages."""
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    tokens: list[TokenId]
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


GENERATE = Body((GenerateBody,))
ABORT = Body(
    (AbortBody,),
    (
        Condition(
            "request_id",
            "give request_id or abort_all: true",
            (given("request_id"), given("rid"), FieldIs("abort_all", (True,))),
        ),
        Condition(
            "rid", "rid is request_id by another name; give one", (missing("request_id"), missing("rid"))
        ),
        *(
            Condition(
                name,
                f"give {name} or abort_all, not both",
                (missing(name), FieldIs("abort_all", (None, False))),
            )
            for name in ("request_id", "rid")
        ),
    ),
)
TOKENIZE = Body(
    (TokenizeBody,),
    (
        Condition("prompt", "give prompt or messages", (given("prompt"), given("messages"))),
        Condition("prompt", "give either prompt or messages", (missing("prompt"), missing("messages"))),
        *(
            Condition(name, f"{name} is only allowed with messages", (missing(name), given("messages")))
            for name in ("add_generation_prompt", "chat_template_kwargs")
        ),
    ),
)
DETOKENIZE = Body((DetokenizeBody,))
