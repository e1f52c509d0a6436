"""The routes of the OpenAI API that generate text, and the application with all routes.

Promise: every call ends with an answer or an error object in OpenAI's format. When a client disconnects, its
requests are aborted in the engine.
"""

import contextlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiohttp import HttpVersion11, web

from minisgl.errors import MinisglError
from minisgl.request import SamplingParams, fit_to_context, with_bad_words_ids
from minisgl.server.admin import Admin
from minisgl.server.choice_details import ChoiceDetails, PromptDetails
from minisgl.server.http.middleware import CallFacts, Gate, facts_of, json_answer, require_admin
from minisgl.server.http.schemas import GENERATE, GenerateBody
from minisgl.server.http.uploads import Uploads
from minisgl.server.open_choices import Delta, PreparedCall
from minisgl.server.openai_schema import CallOptions, ChatCall, CompletionCall, parse_chat, parse_completion
from minisgl.server.replies import Choice, OpenAIFormat, PlainTextFormat, Usage, error_body, error_of, sse
from minisgl.server.served_model import ServedModel
from minisgl.server.streams import Stream, Streams
from minisgl.server.text_threads import TextThreads
from minisgl.server.tokens import TokenApi
from minisgl.text.bad_words import bad_words_ids

log = logging.getLogger(__name__)

DETAIL_BYTES = 64
"""Rough lower bound of the size of one token's log probabilities and ids as JSON."""
CHOICE_BYTES = 48
"""A choice takes about as long to build as this many bytes take to tokenize."""
WRITE_GRACE_S = 10.0
"""A client may take this much longer than --request-timeout-s to read its last tokens."""


class Api:
    """The handlers of the routes that generate text.

    Args:
        threads: parse, template and tokenize long input.
        uploads: reads request bodies.
        timeout_s: how long a request may wait for a token. The connection of a client that has not read the
            whole answer `timeout_s` + WRITE_GRACE_S after the last token is closed.
    """

    def __init__(
        self,
        model: ServedModel,
        streams: Streams,
        threads: TextThreads,
        uploads: Uploads,
        timeout_s: float,
    ) -> None:
        self._model = model
        self._uploads = uploads
        self._streams = streams
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
        """POST /generate, as in mini-sglang: greedy decoding, streamed as plain text."""
        return await self._complete(request, _parse_generate)

    async def _complete(
        self, request: web.Request, parse: Callable[[bytes], ChatCall | CompletionCall]
    ) -> web.StreamResponse:
        with contextlib.ExitStack() as open_streams:
            call = await self._receive(request, parse, open_streams)
            stream, counter, request_id = call.stream, call.counter, facts_of(request).request_id
            options = call.options
            so_far = counter.usage if options.continuous_usage else None
            answer_format = OpenAIFormat(
                call.is_chat, self._model.name, request_id, options.include_usage, so_far
            )
            if call.is_plain:
                return await self._send_stream(request, stream, PlainTextFormat(), counter, ())
            if options.stream:
                return await self._send_stream(request, stream, answer_format, counter, call.details)
            deltas: list[list[Delta]] = [[] for _ in range(stream.num_choices)]
            async for delta in stream.deltas():
                counter.count(delta)
                deltas[delta.choice].append(delta)
        return json_answer(await self._whole(call, answer_format, deltas))

    async def _whole(
        self, call: "Call", answer_format: OpenAIFormat, deltas: Sequence[Sequence[Delta]]
    ) -> bytes:
        """The answer of `stream: false`. Details of many tokens are encoded in a thread."""
        usage = call.counter.usage()
        if not call.details:
            return answer_format.whole([_join(own, None) for own in deltas], usage)
        num_tokens = usage.prompt_tokens * len(call.details) + usage.completion_tokens
        return await self._threads.run(
            num_tokens * DETAIL_BYTES,
            lambda: answer_format.whole(
                [_join(*pair) for pair in zip(deltas, call.details, strict=True)], usage
            ),
        )

    async def _receive(
        self,
        request: web.Request,
        parse: Callable[[bytes], ChatCall | CompletionCall],
        open_streams: contextlib.ExitStack,
    ) -> "Call":
        """Read, check and tokenize a call and send it to the engine. The body is released afterwards."""
        async with self._uploads.body(request) as body:
            call = await self._threads.run(len(body), lambda: parse(body))
            options, is_chat = call.options, isinstance(call, ChatCall)
            self._model.check_name(options.model)
            if options.priority > 0:
                require_admin(request, "a priority above 0", "priority")
            num_prompts = len(call.prompts) if isinstance(call, CompletionCall) else 1
            facts = facts_of(request)
            stream = open_streams.enter_context(
                self._streams.open(num_prompts * options.n, facts.request_id, facts.caller.key)
            )
            prompt_field = "messages" if is_chat else "prompt"

            def prepare() -> tuple[PreparedCall, list[ChoiceDetails]]:
                prompts, params, details = self._prepare(call)
                return stream.prepare(prompts, params, options.n, prompt_field, options.priority), details

            num_bytes = len(body) + CHOICE_BYTES * stream.num_choices
            prepared, details = await self._threads.run(num_bytes, prepare)
            await stream.submit(prepared)
            is_plain = isinstance(call, CompletionCall) and call.is_plain
            counter = UsageCounter(prepared.prompts, options.n, facts)
            return Call(stream, options, is_chat, is_plain, counter, details)

    async def _send_stream(
        self,
        request: web.Request,
        stream: Stream,
        answer_format: OpenAIFormat | PlainTextFormat,
        counter: "UsageCounter",
        details: Sequence[ChoiceDetails],
    ) -> web.StreamResponse:
        """Send server-sent events. An error before the first event becomes an ordinary HTTP error."""
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
        cut = stream.limit_silence(self._timeout_s + WRITE_GRACE_S, transport.abort)
        try:
            async for delta in stream.deltas():
                counter.count(delta)
                events = await self._events(answer_format, delta, details[delta.choice] if details else None)
                if not response.prepared:
                    await response.prepare(request)
                    events = answer_format.opening(stream.num_choices) + events
                if events:
                    await response.write(events)
            await response.write(answer_format.ending(counter.usage()))
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

    async def _events(
        self, answer_format: OpenAIFormat | PlainTextFormat, delta: Delta, details: ChoiceDetails | None
    ) -> bytes:
        """The events of one delta. Details of many tokens are encoded in a thread."""
        if details is None:
            return answer_format.piece(delta.choice, delta.text, delta.finish_reason)

        def make() -> bytes:
            before, fields = details.take(delta.token_ids, delta.logprobs, delta.prompt_logprobs)
            return answer_format.piece(delta.choice, before + delta.text, delta.finish_reason, fields)

        num_tokens = len(delta.token_ids) + len(delta.prompt_logprobs or ())
        return await self._threads.run(num_tokens * DETAIL_BYTES, make)

    def _prepare(
        self, call: ChatCall | CompletionCall
    ) -> tuple[list["array[int]"], SamplingParams, list[ChoiceDetails]]:
        """The prompts' token ids, the parameters with tokenized bad words, and each choice's details."""
        # Arrays, because the event loop sends them without a loop over the tokens.
        prompts, params = [array("i", ids) for ids in self._encode(call)], call.options.params
        if params.bad_words:
            params = with_bad_words_ids(params, bad_words_ids(self._model.tokenizer, params.bad_words))
        wanted, n = call.options.wanted, call.options.n
        if not wanted.any_requested:
            return prompts, params, []
        wanted.check(sum(map(len, prompts)), n)
        return prompts, params, self._details(call, prompts)

    def _details(
        self, call: ChatCall | CompletionCall, prompts: Sequence[Sequence[int]]
    ) -> list[ChoiceDetails]:
        """The details of each choice, in the order of the choices."""
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
            prompt = PromptDetails(tokenizer, wanted, prompt_ids, text)
            details += [
                ChoiceDetails(tokenizer, wanted, prompt, is_first=index == rank == 0)
                for rank in range(call.options.n)
            ]
        return details

    def _encode(self, call: ChatCall | CompletionCall) -> list[list[int]]:
        """Token ids of the call's prompts.

        A chat template adds special tokens itself, so none are added to its text.

        Raises:
            RequestError: 400 at the first prompt that is too long.
        """
        tokenizer, limit = self._model.tokenizer, self._streams.max_context_tokens
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
    """A call whose requests were sent to the engine."""

    stream: Stream
    options: CallOptions
    is_chat: bool
    is_plain: bool  # the answer is text without JSON around it
    counter: "UsageCounter"
    details: list[ChoiceDetails]  # one per choice; empty if only text was requested


class UsageCounter:
    """Counts the tokens of one call, and writes the counts to its `CallFacts`. Each prompt counts once."""

    def __init__(self, prompts: Sequence[Sequence[int]], n: int, facts: CallFacts) -> None:
        self._facts = facts
        self._num_prompt_tokens = facts.num_prompt_tokens = sum(map(len, prompts))
        self._num_cached_tokens = [0] * (len(prompts) * n)
        self._n = n
        self._num_tokens = 0

    def count(self, delta: Delta) -> None:
        """Count the tokens of a delta."""
        self._num_tokens += delta.num_tokens
        self._facts.num_output_tokens = self._num_tokens
        if self._facts.first_token_s is None:
            self._facts.first_token_s = time.monotonic() - self._facts.arrived_at
        cached = self._num_cached_tokens
        cached[delta.choice] = max(cached[delta.choice], delta.num_cached_tokens)

    def usage(self) -> Usage:
        """The totals. Cached tokens are those of each prompt's first choice; others may reuse its pages."""
        return Usage(self._num_prompt_tokens, self._num_tokens, sum(self._num_cached_tokens[:: self._n]))


def make_app(api: Api, tokens: TokenApi, admin: Admin, gate: Gate) -> web.Application:
    """The application with all routes."""
    app = web.Application()
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
    """Handle the Expect header. aiohttp calls this before the handler and outside the middleware."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # as aiohttp does: no part of the answer has been sent
        return None
    return json_answer(error_body(417, "expectation_failed", "Expect may only be 100-continue"), 417)


def _join(deltas: Sequence[Delta], details: ChoiceDetails | None) -> Choice:
    """The complete choice from all its deltas."""
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
