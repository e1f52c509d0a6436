"""POST /tokenize and /detokenize, with the bodies and answers that vLLM gave them.

Promise: /tokenize gives the ids that the engine would be fed for the same prompt or messages.
"""

import msgspec
from aiohttp import web

from minisgl.server.frontend import Frontend
from minisgl.server.middleware import json_answer
from minisgl.server.openai_schema import check_template_variables, check_token_ids
from minisgl.server.schemas import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
)
from minisgl.server.served_model import ServedModel
from minisgl.server.text_threads import TextThreads
from minisgl.server.uploads import Uploads
from minisgl.text.messages import normalize_messages


class TokenApi:
    """The two handlers."""

    def __init__(
        self, model: ServedModel, frontend: Frontend, uploads: Uploads, threads: TextThreads
    ) -> None:
        self._model = model
        self._frontend = frontend
        self._uploads = uploads
        self._threads = threads

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize."""
        with self._uploads.room(request):
            body = await self._uploads.read(request)
            return json_answer(await self._threads.run(len(body), lambda: self._tokenize(body)))

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize."""
        with self._uploads.room(request):
            body = await self._uploads.read(request)
            return json_answer(await self._threads.run(len(body), lambda: self._detokenize(body)))

    def _tokenize(self, data: bytes) -> bytes:
        body: TokenizeBody = TOKENIZE.read(data)[0]
        self._model.check_name(body.model)
        tokenizer = self._model.tokenizer
        if body.prompt is not None:
            ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        else:
            check_template_variables(body.chat_template_kwargs)
            text = self._model.template.render(
                normalize_messages(body.messages),
                body.add_generation_prompt is not False,
                body.chat_template_kwargs or {},
            )
            ids = tokenizer.encode(text, bool(body.add_special_tokens), param="messages")
        texts = [tokenizer.token_text(one) for one in ids] if body.return_token_strs else None
        return msgspec.json.encode(TokenizeAnswer(len(ids), self._frontend.max_context_tokens, ids, texts))

    def _detokenize(self, data: bytes) -> bytes:
        body: DetokenizeBody = DETOKENIZE.read(data)[0]
        self._model.check_name(body.model)
        check_token_ids(body.tokens, self._model.tokenizer.vocab_size, "tokens")
        text = self._model.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return msgspec.json.encode(DetokenizeAnswer(text))
