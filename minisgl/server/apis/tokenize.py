"""POST /tokenize and /detokenize, with vLLM's bodies and answers.

Promise: /tokenize returns the ids that the engine would get for the same prompt or messages. It refuses
overlong input as early as a completion would.
"""

import msgspec
from aiohttp import web
from msgspec import Struct

from minisgl.errors import RequestError
from minisgl.replies.conversation import Conversation
from minisgl.replies.tools import read_tools
from minisgl.request import TokenId
from minisgl.server.calls.call_fields import (
    GivenMessages,
    TemplateVariables,
    check_template_variables,
    check_token_ids,
)
from minisgl.server.calls.tool_fields import GivenTools
from minisgl.server.http.bodies import Body, Condition, FieldIs, given, missing
from minisgl.server.http.middleware import json_answer
from minisgl.server.http.routes import Answer, Route
from minisgl.server.http.uploads import Uploads
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.streams import Streams
from minisgl.server.text_threads import TextThreads
from minisgl.text.messages import normalize_messages


class TokenizeFields(Struct, frozen=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: GivenMessages | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt; false for messages, whose template adds them itself."""
    add_generation_prompt: bool | None = None
    """Only with messages; default true, without continue_final_message."""
    continue_final_message: bool | None = None
    """Only with messages."""
    chat_template_kwargs: TemplateVariables | None = None
    """Only with messages."""
    tools: GivenTools | None = None
    """Only with messages."""
    return_token_strs: bool | None = None


class TokenizeAnswer(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(Struct):
    """tokenizer_config.json as the model has it, with what the server uses instead."""

    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


class DetokenizeFields(Struct, frozen=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None
    """Default false."""


class DetokenizeAnswer(Struct):
    prompt: str


TOKENIZE = Body(
    "TokenizeBody",
    (TokenizeFields,),
    (
        Condition("prompt", "give prompt or messages", (given("prompt"), given("messages"))),
        Condition("prompt", "give either prompt or messages", (missing("prompt"), missing("messages"))),
        *(
            Condition(name, f"{name} is only allowed with messages", (missing(name), given("messages")))
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
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
)
DETOKENIZE = Body("DetokenizeBody", (DetokenizeFields,))


class TokenApi:
    """The request handlers."""

    def __init__(self, model: ModelInUse, streams: Streams, uploads: Uploads, threads: TextThreads) -> None:
        self._model = model
        self._streams = streams
        self._uploads = uploads
        self._threads = threads

    def routes(self) -> list[Route]:
        """The routes of this API."""
        return [
            Route(
                "POST",
                "/tokenize",
                "Token ids of a text or a conversation.",
                self.tokenize,
                Answer("The ids.", TokenizeAnswer),
                TOKENIZE,
            ),
            Route(
                "POST",
                "/detokenize",
                "The text of token ids.",
                self.detokenize,
                Answer("The text.", DetokenizeAnswer),
                DETOKENIZE,
            ),
            Route(
                "GET",
                "/tokenizer_info",
                "The model's tokenizer_config.json, special tokens and chat template.",
                self.tokenizer_info,
                Answer("They.", TokenizerInfo),
            ),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize."""
        async with self._uploads.body(request) as body:
            return json_answer(await self._threads.run(len(body), lambda: self._tokenize(body)))

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize."""
        async with self._uploads.body(request) as body:
            return json_answer(await self._threads.run(len(body), lambda: self._detokenize(body)))

    async def tokenizer_info(self, _: web.Request) -> web.Response:
        """GET /tokenizer_info."""
        model = self._model.current
        names = [field.name for field in msgspec.structs.fields(TokenizerInfo)]
        used = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **model.tokenizer_config,
            **dict.fromkeys(names[2:]),
            **model.tokenizer.special_tokens,
            "chat_template": model.template.source,
        }
        return json_answer(msgspec.json.encode(used))

    def _tokenize(self, data: bytes) -> bytes:
        body: TokenizeFields = TOKENIZE.read(data)[0]
        model = self._model.current
        model.check_name(body.model)
        tokenizer, limit = model.tokenizer, self._limit()
        if body.prompt is not None:
            ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False, max_tokens=limit)
        else:
            check_template_variables(body.chat_template_kwargs)
            asked = read_tools(body.tools, None)
            conversation = Conversation(
                normalize_messages(body.messages),
                asked,
                body.chat_template_kwargs or {},
                body.add_generation_prompt is not False,
                continue_final_message=bool(body.continue_final_message),
            )
            _, ids = conversation.render(model, limit, bool(body.add_special_tokens))
        texts = [tokenizer.token_text(one) for one in ids] if body.return_token_strs else None
        return msgspec.json.encode(TokenizeAnswer(len(ids), limit, ids, texts))

    def _detokenize(self, data: bytes) -> bytes:
        body: DetokenizeFields = DETOKENIZE.read(data)[0]
        model = self._model.current
        model.check_name(body.model)
        limit = self._limit()
        if len(body.tokens) > limit:
            raise RequestError(
                400,
                "invalid_value",
                f"tokens must be up to {limit} token ids, which is what prompt and answer together may have, "
                f"got {len(body.tokens)}; send fewer at a time",
                "tokens",
            )
        check_token_ids(body.tokens, model.tokenizer.vocab_size, "tokens")
        text = model.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return msgspec.json.encode(DetokenizeAnswer(text))

    def _limit(self) -> int:
        """Maximum tokens of prompt plus output.

        Raises:
            MinisglError: the engine is not ready yet, so the limit is unknown.
        """
        limit = self._streams.max_context_tokens
        if not limit:
            raise self._streams.refusal or RequestError(503, "loading", "the model is still loading")
        return limit
