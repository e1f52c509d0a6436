"""POST /tokenize and /detokenize, with vLLM's bodies and answers.

Promise: /tokenize returns the ids that the engine would get for the same prompt or messages. It refuses
overlong input as early as a completion would.
"""

import msgspec
from aiohttp import web

from minisgl.errors import RequestError
from minisgl.server.http.middleware import json_answer
from minisgl.server.http.schemas import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
)
from minisgl.server.http.uploads import Uploads
from minisgl.server.openai_schema import check_template_variables, check_token_ids
from minisgl.server.served_model import ServedModel
from minisgl.server.streams import Streams
from minisgl.server.text_threads import TextThreads
from minisgl.text.messages import normalize_messages


class TokenApi:
    """The request handlers."""

    def __init__(self, model: ServedModel, streams: Streams, uploads: Uploads, threads: TextThreads) -> None:
        self._model = model
        self._streams = streams
        self._uploads = uploads
        self._threads = threads

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize."""
        async with self._uploads.body(request) as body:
            return json_answer(await self._threads.run(len(body), lambda: self._tokenize(body)))

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize."""
        async with self._uploads.body(request) as body:
            return json_answer(await self._threads.run(len(body), lambda: self._detokenize(body)))

    def _tokenize(self, data: bytes) -> bytes:
        body: TokenizeBody = TOKENIZE.read(data)[0]
        self._model.check_name(body.model)
        tokenizer, limit = self._model.tokenizer, self._limit()
        if body.prompt is not None:
            ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False, max_tokens=limit)
        else:
            check_template_variables(body.chat_template_kwargs)
            text = self._model.template.render(
                normalize_messages(body.messages),
                body.add_generation_prompt is not False,
                body.chat_template_kwargs or {},
            )
            special = bool(body.add_special_tokens)
            ids = tokenizer.encode(text, special, max_tokens=limit, param="messages")
        texts = [tokenizer.token_text(one) for one in ids] if body.return_token_strs else None
        return msgspec.json.encode(TokenizeAnswer(len(ids), limit, ids, texts))

    def _detokenize(self, data: bytes) -> bytes:
        body: DetokenizeBody = DETOKENIZE.read(data)[0]
        self._model.check_name(body.model)
        limit = self._limit()
        if len(body.tokens) > limit:
            raise RequestError(
                400,
                "invalid_value",
                f"tokens must be up to {limit} token ids, which is what prompt and answer together may have, "
                f"got {len(body.tokens)}; send fewer at a time",
                "tokens",
            )
        check_token_ids(body.tokens, self._model.tokenizer.vocab_size, "tokens")
        text = self._model.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
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
