"""The HTTP routes of the OpenAI API.

Promise: every call ends with an answer in OpenAI's form, an error object included, whatever came in;
a client that leaves takes its requests out of the engine.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiohttp import HttpVersion11, web

from minisgl.errors import MinisglError
from minisgl.request import SamplingParams, fit_to_context, for_choice, with_bad_words_ids
from minisgl.server.admin import Admin
from minisgl.server.choice_details import ChoiceDetails
from minisgl.server.frontend import Delta, Frontend, Stream
from minisgl.server.middleware import CallFacts, Gate, facts_of, json_answer
from minisgl.server.openai_schema import CallOptions, ChatCall, CompletionCall, parse_chat, parse_completion
from minisgl.server.replies import Choice, PlainText, Shape, Usage, error_body, error_of, sse
from minisgl.server.schemas import GENERATE, GenerateBody
from minisgl.server.served_model import ServedModel
from minisgl.server.text_threads import TextThreads
from minisgl.server.tokens import TokenApi
from minisgl.server.uploads import Uploads
from minisgl.text.bad_words import bad_words_ids

log = logging.getLogger(__name__)

DETAIL_BYTES = 64
"""Log probabilities and ids of a token, as text: about so much and more."""
WRITE_GRACE_S = 10.0
"""How much longer than the request itself its client may take to read the answer."""


class Api:
    """The handlers of what generates text.

    Args:
        threads: for parsing, templating and tokenizing long input.
        uploads: reads the bodies.
        timeout_s: how long a request may take; soon after, a client that does not read is cut off.
    """

    def __init__(
        self,
        model: ServedModel,
        frontend: Frontend,
        threads: TextThreads,
        uploads: Uploads,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._uploads = uploads
        self._frontend = frontend
        self._threads = threads
        self._timeout_s = timeout_s

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        model = self._model
        return await self._complete(
            request, lambda body: parse_chat(body, model.defaults, model.tokenizer.vocab_size)
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        model = self._model
        return await self._complete(
            request, lambda body: parse_completion(body, model.defaults, model.tokenizer.vocab_size)
        )

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate, as in mini-sglang: greedy, streamed as plain text."""
        return await self._complete(request, _parse_generate)

    async def _complete(
        self, request: web.Request, parse: Callable[[bytes], ChatCall | CompletionCall]
    ) -> web.StreamResponse:
        with contextlib.ExitStack() as open_streams:
            call = await self._receive(request, parse, open_streams)
            stream, tally, request_id = call.stream, call.tally, facts_of(request).request_id
            options = call.options
            so_far = tally.usage if options.continuous_usage else None
            shape = Shape(call.is_chat, self._model.name, request_id, options.include_usage, so_far)
            if call.is_plain:
                return await self._send_stream(request, stream, PlainText(), tally, ())
            if options.stream:
                return await self._send_stream(request, stream, shape, tally, call.details)
            deltas: list[list[Delta]] = [[] for _ in range(stream.num_choices)]
            async for delta in stream.deltas():
                tally.take(delta)
                deltas[delta.choice].append(delta)
        return json_answer(await self._whole(call, shape, deltas))

    async def _whole(self, call: "Call", shape: Shape, deltas: Sequence[Sequence[Delta]]) -> bytes:
        """The answer of `stream: false`; details of many tokens are made off the event loop."""
        usage = call.tally.usage()
        if not call.details:
            return shape.whole([_join(own, None) for own in deltas], usage)
        num_tokens = usage.prompt_tokens + usage.completion_tokens
        return await self._threads.run(
            num_tokens * DETAIL_BYTES,
            lambda: shape.whole([_join(*pair) for pair in zip(deltas, call.details, strict=True)], usage),
        )

    async def _receive(
        self,
        request: web.Request,
        parse: Callable[[bytes], ChatCall | CompletionCall],
        open_streams: contextlib.ExitStack,
    ) -> "Call":
        """Read, check and tokenize a call and send it to the engine; nothing of its body is kept."""
        with self._uploads.room(request):
            body = await self._uploads.read(request)
            call = await self._threads.run(len(body), lambda: parse(body))
            options, is_chat = call.options, isinstance(call, ChatCall)
            self._model.check_name(options.model)
            num_prompts = len(call.prompts) if isinstance(call, CompletionCall) else 1
            facts = facts_of(request)
            stream = open_streams.enter_context(
                self._frontend.open(num_prompts * options.n, facts.request_id)
            )
            prompts, shared, details = await self._threads.run(len(body), lambda: self._prepare(call))
            params = [for_choice(shared, rank) for rank in range(options.n)]
            choices = [(prompt_ids, one) for prompt_ids in prompts for one in params]
            stream.submit(choices, "messages" if is_chat else "prompt", options.priority)
            is_plain = isinstance(call, CompletionCall) and call.is_plain
            return Call(stream, options, is_chat, is_plain, Tally(prompts, options.n, facts), details)

    async def _send_stream(
        self,
        request: web.Request,
        stream: Stream,
        shape: Shape | PlainText,
        tally: "Tally",
        details: Sequence[ChoiceDetails],
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
                events = await self._events(shape, delta, details[delta.choice] if details else None)
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

    async def _events(self, shape: Shape | PlainText, delta: Delta, details: ChoiceDetails | None) -> bytes:
        """What a stream says of a delta; with the details of a long prompt it is made off the event loop."""
        if details is None:
            return shape.piece(delta.choice, delta.text, delta.finish_reason)

        def make() -> bytes:
            before, fields = details.take(delta.token_ids, delta.logprobs, delta.prompt_logprobs)
            return shape.piece(delta.choice, before + delta.text, delta.finish_reason, fields)

        num_tokens = len(delta.token_ids) + len(delta.prompt_logprobs or ())
        return await self._threads.run(num_tokens * DETAIL_BYTES, make)

    def _prepare(
        self, call: ChatCall | CompletionCall
    ) -> tuple[list[list[int]], SamplingParams, list[ChoiceDetails]]:
        """The prompts' token ids, the parameters with those of bad words, and each choice's details."""
        prompts, params = self._encode(call), call.options.params
        if params.bad_words:
            params = with_bad_words_ids(params, bad_words_ids(self._model.tokenizer, params.bad_words))
        return prompts, params, self._details(call, prompts) if call.options.wanted.anything else []

    def _details(
        self, call: ChatCall | CompletionCall, prompts: Sequence[Sequence[int]]
    ) -> list[ChoiceDetails]:
        """For each choice, in order."""
        tokenizer, wanted = self._model.tokenizer, call.options.wanted
        details = []
        for index, prompt_ids in enumerate(prompts):
            text = ""
            if wanted.echo and isinstance(call, CompletionCall):
                given = call.prompts[index]
                text = (
                    given
                    if isinstance(given, str)
                    else tokenizer.decode(given, skip_special_tokens=wanted.skip_special_tokens)
                )
            for rank in range(call.options.n):
                is_first = index == rank == 0
                details.append(ChoiceDetails(tokenizer, wanted, prompt_ids, text, is_first))
        return details

    def _encode(self, call: ChatCall | CompletionCall) -> list[list[int]]:
        """Token ids of the call's prompts; ends at the first that is too long.

        A rendered chat has its special tokens already.
        """
        tokenizer, limit = self._model.tokenizer, self._frontend.max_context_tokens
        if isinstance(call, ChatCall):
            text = self._model.template.render(
                call.messages, call.add_generation_prompt, call.template_variables
            )
            return [tokenizer.encode(text, False, max_tokens=limit, param="messages")]
        ready = []
        for prompt in call.prompts:
            is_text = isinstance(prompt, str)
            prompt_ids = tokenizer.encode(prompt, True, max_tokens=limit) if is_text else prompt
            fit_to_context(len(prompt_ids), call.options.params, limit)
            ready.append(prompt_ids)
        return ready


class Call(NamedTuple):
    """A call whose requests the engine has."""

    stream: Stream
    options: CallOptions
    is_chat: bool
    is_plain: bool  # the answer is text without JSON around it
    tally: "Tally"
    details: list[ChoiceDetails]  # for each choice; empty where nothing is asked for but text


class Tally:
    """Counts the tokens of one call, in its facts too: each prompt once, each choice's output."""

    def __init__(self, prompts: Sequence[Sequence[int]], n: int, facts: CallFacts) -> None:
        self._facts = facts
        self._num_prompt_tokens = facts.num_prompt_tokens = sum(map(len, prompts))
        self._num_cached_tokens = [0] * (len(prompts) * n)
        self._n = n
        self._num_tokens = 0

    def take(self, delta: Delta) -> None:
        """Count what came."""
        self._num_tokens += delta.num_tokens
        self._facts.num_output_tokens = self._num_tokens
        if self._facts.first_token_s is None:
            self._facts.first_token_s = time.monotonic() - self._facts.arrived_at
        cached = self._num_cached_tokens
        cached[delta.choice] = max(cached[delta.choice], delta.num_cached_tokens)

    def usage(self) -> Usage:
        """The sums; of a prompt's choices the first says what was cached, the others may reuse it."""
        return Usage(self._num_prompt_tokens, self._num_tokens, sum(self._num_cached_tokens[:: self._n]))


def make_app(api: Api, tokens: TokenApi, admin: Admin, gate: Gate, max_body_bytes: int) -> web.Application:
    """The application with all routes."""
    app = web.Application(client_max_size=max_body_bytes)
    gate.install(app)
    app.router.add_post("/v1/chat/completions", api.chat_completions, expect_handler=_expect)
    app.router.add_post("/v1/completions", api.completions, expect_handler=_expect)
    app.router.add_post("/generate", api.generate, expect_handler=_expect)
    app.router.add_post("/tokenize", tokens.tokenize, expect_handler=_expect)
    app.router.add_post("/detokenize", tokens.detokenize, expect_handler=_expect)
    app.router.add_post("/abort", admin.abort)
    app.router.add_post("/flush_cache", admin.flush_cache)
    app.router.add_get("/v1/models", admin.models)
    app.router.add_get("/v1/models/{model:.+}", admin.one_model)
    app.router.add_get("/health", admin.health)
    app.router.add_get("/health/ready", admin.ready)
    app.router.add_get("/version", admin.version)
    app.router.add_get("/server_info", admin.server_info)
    app.router.add_get("/metrics", admin.metrics)
    app.router.add_get("/load", admin.load)
    app.router.add_get("/openapi.json", admin.openapi)
    return app


def _parse_generate(body: bytes) -> CompletionCall:
    fields: GenerateBody = GENERATE.read(body)[0]
    params = SamplingParams(max_tokens=fields.max_tokens, temperature=0.0, ignore_eos=bool(fields.ignore_eos))
    options = CallOptions(None, True, include_usage=False, continuous_usage=False, n=1, params=params)
    return CompletionCall([fields.prompt], options, is_plain=True)


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Called before a route's handler, and outside of the middleware, for a request with an Expect header."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # as the library does: no part of the answer is out yet
        return None
    return json_answer(error_body(417, "expectation_failed", "Expect may only be 100-continue"), 417)


def _join(deltas: Sequence[Delta], details: ChoiceDetails | None) -> Choice:
    """A choice that has ended."""
    text = "".join(delta.text for delta in deltas)
    reason = deltas[-1].finish_reason or ""
    if details is None:
        return Choice(text, reason)
    before, fields = details.take(
        [token_id for delta in deltas for token_id in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs or ()],
        deltas[0].prompt_logprobs,
    )
    return Choice(before + text, reason, fields)
