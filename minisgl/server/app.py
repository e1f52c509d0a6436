"""The HTTP routes of the OpenAI API.

Promise: every call ends with an answer in OpenAI's form, an error object included, whatever came in;
a client that leaves takes its requests out of the engine.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import HttpVersion11, web

from minisgl.errors import MinisglError, RequestError
from minisgl.request import MAX_SEED, SamplingParams, fit_to_context
from minisgl.server.frontend import Delta, Frontend, Stream
from minisgl.server.openai_schema import CallOptions, ChatCall, CompletionCall, parse_chat, parse_completion
from minisgl.server.replies import RETRY_AFTER_S, RETRYABLE, Shape, Usage, error_body, error_of, sse
from minisgl.server.served_model import ServedModel
from minisgl.server.uploads import BODY_TOO_LARGE, Uploads

log = logging.getLogger(__name__)
T = TypeVar("T")

INLINE_BYTES = 4096
"""Bodies up to this size are handled on the event loop: under a millisecond, less than a thread costs."""
WRITE_GRACE_S = 10.0
"""How much longer than the request itself its client may take to read the answer."""

Health = Callable[[], tuple[bool, dict[str, Any]]]
"""-> (well?, facts for the body)."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """The handlers.

    Args:
        executor: threads for parsing, templating and tokenizing long input.
        uploads: reads the bodies.
        health: asked by GET /health.
        timeout_s: how long a request may take; soon after, a client that does not read is cut off.
    """

    def __init__(
        self,
        model: ServedModel,
        frontend: Frontend,
        executor: Executor,
        uploads: Uploads,
        health: Health,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._uploads = uploads
        self._frontend = frontend
        self._executor = executor
        self._health = health
        self._timeout_s = timeout_s

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._complete(request, lambda body: parse_chat(body, self._model.defaults))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        model = self._model
        return await self._complete(
            request, lambda body: parse_completion(body, model.defaults, model.tokenizer.vocab_size)
        )

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        self._check_model(request.match_info["model"])
        return _json(self._model_card())

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 only while the engine is ready and alive."""
        well, facts = self._health()
        return _json(facts, 200 if well else 503)

    async def version(self, _: web.Request) -> web.Response:
        """GET /version."""
        return _json({"version": metadata.version("minisgl")})

    async def _complete(
        self, request: web.Request, parse: Callable[[bytes], ChatCall | CompletionCall]
    ) -> web.StreamResponse:
        with contextlib.ExitStack() as open_streams:
            call = await self._receive(request, parse, open_streams)
            stream, tally = call.stream, call.tally
            shape = Shape(call.is_chat, self._model.name, call.options.include_usage)
            if call.options.stream:
                return await self._send_stream(request, stream, shape, tally)
            pieces: list[list[str]] = [[] for _ in range(stream.num_choices)]
            reasons = [""] * stream.num_choices
            async for delta in stream.deltas():
                tally.take(delta)
                pieces[delta.choice].append(delta.text)
                reasons[delta.choice] = delta.finish_reason or ""
        texts = map("".join, pieces)
        return _answer(shape.whole(list(zip(texts, reasons, strict=True)), tally.usage()))

    async def _receive(
        self,
        request: web.Request,
        parse: Callable[[bytes], ChatCall | CompletionCall],
        open_streams: contextlib.ExitStack,
    ) -> "Call":
        """Read, check and tokenize a call and send it to the engine; nothing of its body is kept."""
        with self._uploads.room(request):
            body = await self._uploads.read(request)
            call = await self._work(len(body), lambda: parse(body))
            options, is_chat = call.options, isinstance(call, ChatCall)
            self._check_model(options.model)
            num_prompts = len(call.prompts) if isinstance(call, CompletionCall) else 1
            stream = open_streams.enter_context(self._frontend.open(num_prompts * options.n))
            prompts = await self._work(len(body), lambda: self._encode(call))
            params = [_for_choice(options.params, rank) for rank in range(options.n)]
            choices = [(prompt_ids, one) for prompt_ids in prompts for one in params]
            stream.submit(choices, "messages" if is_chat else "prompt")
            return Call(stream, options, is_chat, Tally(prompts, options.n))

    async def _send_stream(
        self, request: web.Request, stream: Stream, shape: Shape, tally: "Tally"
    ) -> web.StreamResponse:
        """Server-sent events. Until the first one is there, an error is still an ordinary HTTP error."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        transport = request.transport
        if transport is None:
            return response  # the client has left
        loop = asyncio.get_running_loop()
        cut = loop.call_later(self._timeout_s + WRITE_GRACE_S, transport.abort)
        try:
            async for delta in stream.deltas():
                tally.take(delta)
                events = shape.piece(delta.choice, delta.text, delta.finish_reason)
                if not response.prepared:
                    await response.prepare(request)
                    events = shape.opening(stream.num_choices) + events
                if events:
                    await response.write(events)
            await response.write(shape.ending(tally.usage()))
        except ConnectionResetError:
            log.debug("a client left while its answer was written")
        except Exception as error:
            if not response.prepared:
                raise
            if not isinstance(error, MinisglError):
                log.exception("a stream failed in the server")
            with contextlib.suppress(ConnectionResetError):
                await response.write(sse(error_of(error)[1]))
        finally:
            cut.cancel()
        return response

    def _encode(self, call: ChatCall | CompletionCall) -> list[list[int]]:
        """Token ids of the call's prompts; ends at the first that is too long.

        A rendered chat has its special tokens already.
        """
        tokenizer, limit = self._model.tokenizer, self._frontend.max_context_tokens
        if isinstance(call, ChatCall):
            text = self._model.template.render(call.messages)
            return [tokenizer.encode(text, False, max_tokens=limit, param="messages")]
        ready = []
        for prompt in call.prompts:
            is_text = isinstance(prompt, str)
            prompt_ids = tokenizer.encode(prompt, True, max_tokens=limit) if is_text else prompt
            fit_to_context(len(prompt_ids), call.options.params, limit)
            ready.append(prompt_ids)
        return ready

    async def _work(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Do `work` here when its input is small, else in a thread."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            raise RequestError(
                404,
                "model_not_found",
                f"there is no model {name[:100]!r}; this is {self._model.name!r}",
                "model",
            )

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "minisgl",
        }


class Call(NamedTuple):
    """A call whose requests the engine has."""

    stream: Stream
    options: CallOptions
    is_chat: bool
    tally: "Tally"


class Tally:
    """Counts the tokens of one call: each prompt once, each choice's output."""

    def __init__(self, prompts: Sequence[Sequence[int]], n: int) -> None:
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_cached_tokens = [0] * (len(prompts) * n)
        self._n = n
        self._num_tokens = 0

    def take(self, delta: Delta) -> None:
        """Count what came."""
        self._num_tokens += delta.num_tokens
        cached = self._num_cached_tokens
        cached[delta.choice] = max(cached[delta.choice], delta.num_cached_tokens)

    def usage(self) -> Usage:
        """The sums; of a prompt's choices the first says what was cached, the others may reuse it."""
        return Usage(self._num_prompt_tokens, self._num_tokens, sum(self._num_cached_tokens[:: self._n]))


def make_app(api: Api, max_body_bytes: int) -> web.Application:
    """The application with all routes."""
    app = web.Application(client_max_size=max_body_bytes, middlewares=[_answer_errors])
    app.router.add_post("/v1/chat/completions", api.chat_completions, expect_handler=_expect)
    app.router.add_post("/v1/completions", api.completions, expect_handler=_expect)
    app.router.add_get("/v1/models", api.models)
    app.router.add_get("/v1/models/{model:.+}", api.one_model)
    app.router.add_get("/health", api.health)
    app.router.add_get("/version", api.version)
    return app


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every exception as OpenAI's error object."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        known = {
            404: ("not_found", f"there is no {request.path[:200]}"),
            405: ("method_not_allowed", f"{request.path[:200]} does not take {request.method}"),
            413: ("body_too_large", BODY_TOO_LARGE),
        }
        code, message = known.get(error.status, (None, error.reason))
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _answer(error_body(error.status, code, message), error.status, allow)
    except (web.RequestPayloadError, ConnectionError) as error:  # the latter: the client left meanwhile
        words = " ".join(str(error).split())
        return _answer(error_body(400, "invalid_body", f"the body can't be read: {words}"), 400)
    except Exception as error:
        if not isinstance(error, MinisglError):
            log.exception("%s %s failed in the server", request.method, request.path)
        status, body = error_of(error)
        return _answer(body, status, {"Retry-After": str(RETRY_AFTER_S)} if status in RETRYABLE else {})


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Called before a route's handler, and outside of the middleware, for a request with an Expect header."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # as the library does: no part of the answer is out yet
        return None
    return _answer(error_body(417, "expectation_failed", "Expect may only be 100-continue"), 417)


def _for_choice(params: SamplingParams, rank: int) -> SamplingParams:
    """Choices of one prompt differ, also under a seed, and the first is what n = 1 gives."""
    if params.seed is None or rank == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + rank) & MAX_SEED)


def _json(content: dict[str, Any], status: int = 200) -> web.Response:
    return _answer(msgspec.json.encode(content), status)


def _answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
