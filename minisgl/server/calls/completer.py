"""Answers the calls of every API that generates text: from the body to the last event.

Promise: every call ends with an answer or an error object. When a client disconnects, its requests are
aborted in the engine. What differs between APIs stands in their `Call` and `AnswerFormat`.
"""

import contextlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiohttp import web

from minisgl.errors import MinisglError
from minisgl.request import with_bad_words_ids
from minisgl.server.calls.call import AnswerFormat, Call, CallContext
from minisgl.server.calls.usage_counter import UsageCounter
from minisgl.server.http.errors import fault_of
from minisgl.server.http.middleware import facts_of, json_answer, require_admin
from minisgl.server.http.uploads import Uploads
from minisgl.server.keys.meter import CallNote, Meters
from minisgl.server.keys.users import User
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.open_choices import Delta, PreparedCall
from minisgl.server.served_model import ServedModel
from minisgl.server.streams import Stream, Streams
from minisgl.server.text_threads import TextThreads
from minisgl.text.bad_words import bad_words_ids

log = logging.getLogger(__name__)

DETAIL_BYTES = 64
"""Rough lower bound of the size of one token's log probabilities and ids as JSON."""
CHOICE_BYTES = 48
"""A choice takes about as long to build as this many bytes take to tokenize."""
RESTARTING = b": the engine is being started again\n\n"
"""A comment of server-sent events, which clients skip. It keeps connections open."""
UNANSWERED_S = 15.0
"""A call without any event gets the comment only after this time: before, an error can be an HTTP error."""
WRITE_GRACE_S = 10.0
"""A client may take this much longer than --request-timeout-s to read its last tokens."""


class OpenCall(NamedTuple):
    """A call whose requests were sent to the engine."""

    stream: Stream
    counter: UsageCounter
    answer_format: AnswerFormat
    is_streamed: bool


class Completer:
    """Completes the prompts of calls.

    Args:
        threads: parse, template and tokenize long input, and write long answers.
        uploads: reads request bodies.
        timeout_s: how long a request may wait for a token. The connection of a client that has not read the
            whole answer `timeout_s` + WRITE_GRACE_S after the last token is closed.
        meters: count what calls use.
    """

    def __init__(
        self,
        model: ModelInUse,
        streams: Streams,
        threads: TextThreads,
        uploads: Uploads,
        timeout_s: float,
        meters: Meters,
    ) -> None:
        self._model = model
        self._meters = meters
        self._uploads = uploads
        self._streams = streams
        self._threads = threads
        self._timeout_s = timeout_s

    async def answer(
        self, request: web.Request, parse: Callable[[bytes, ServedModel], Call]
    ) -> web.StreamResponse:
        """Answer one HTTP call, whose body `parse` reads.

        Raises:
            MinisglError: the call is refused or failed, before anything was sent.
        """
        with contextlib.ExitStack() as open_calls:
            call = await self._receive(request, parse, open_calls)
            if call.is_streamed:
                return await self._send_stream(request, call)
            deltas: list[list[Delta]] = [[] for _ in range(call.stream.num_choices)]
            async for delta in call.stream.deltas():
                call.counter.count(delta)
                deltas[delta.choice].append(delta)
        return json_answer(await self._whole(call, deltas))

    async def count_prompt_tokens(
        self, request: web.Request, parse: Callable[[bytes, ServedModel], Call]
    ) -> int:
        """The number of prompt tokens of an HTTP call, whose body `parse` reads. Nothing is generated.

        Raises:
            MinisglError: the call is refused.
        """

        model = self._model.current

        def count(body: bytes) -> int:
            call = parse(body, model)
            model.check_name(call.options.model)
            encoded = call.encode(model, self._streams.max_context_tokens)
            return sum(map(len, encoded.prompts))

        async with self._uploads.body(request) as body:
            if self._streams.refusal is not None:
                raise self._streams.refusal.with_traceback(None)
            return await self._threads.run(len(body), lambda: count(body))

    async def _receive(
        self,
        request: web.Request,
        parse: Callable[[bytes, ServedModel], Call],
        open_calls: contextlib.ExitStack,
    ) -> OpenCall:
        """Read, check and tokenize a call and send it to the engine. The body is released afterwards."""
        async with self._uploads.body(request) as body, self._model.prepared() as model:
            call = await self._threads.run(len(body), lambda: parse(body, model))
            options = call.options
            model.check_name(options.model)
            facts = facts_of(request)
            user = facts.caller.user or User("")
            if options.priority is not None and options.priority > user.priority:
                require_admin(request, f"a priority above {user.priority}", "priority")
            num_choices = call.num_prompts * options.n
            facts.is_metered = True
            note = CallNote(facts.request_id, request.path, facts.arrived_at, model.name)
            meter = open_calls.enter_context(self._meters.call(user, num_choices, options.n, note))
            stream = open_calls.enter_context(
                self._streams.open(
                    num_choices,
                    facts.request_id,
                    facts.caller.key,
                    n=options.n,
                    prompt_field=call.prompt_field,
                    meter=meter,
                )
            )
            counter = UsageCounter(num_choices, options.n, facts)
            context = CallContext(model.tokenizer, model.name, facts.request_id, counter.usage)
            prepared, answer_format = await self._threads.run(
                len(body) + CHOICE_BYTES * num_choices,
                lambda: self._prepare(call, model, context, stream, user.priority),
            )
            counter.count_prompts(prepared.prompts)
            meter.take_prompts(facts.num_prompt_tokens)
            facts.is_streamed = options.stream
            await stream.submit(prepared)
            facts.request_numbers = stream.request_ids
            return OpenCall(stream, counter, answer_format, options.stream)

    def _prepare(
        self, call: Call, model: ServedModel, context: CallContext, stream: Stream, default_priority: int
    ) -> tuple[PreparedCall, AnswerFormat]:
        """Tokenize the prompts and the bad words, and make what the stream and the answer need."""
        # Arrays, because the event loop sends them without a loop over the tokens.
        encoded = call.encode(model, self._streams.max_context_tokens)
        prompts = [array("i", ids) for ids in encoded.prompts]
        params, options = encoded.plan.params, call.options
        if params.bad_words:
            params = with_bad_words_ids(params, bad_words_ids(model.tokenizer, params.bad_words))
        prepared = stream.prepare(
            prompts,
            params,
            options.n,
            call.prompt_field,
            default_priority if options.priority is None else options.priority,
            encoded.plan.kept_special,
            options.cache_salt,
        )
        return prepared, call.answer_format(encoded._replace(prompts=prompts), context)

    async def _whole(self, call: OpenCall, deltas: Sequence[Sequence[Delta]]) -> bytes:
        """The answer of `stream: false`."""
        if not call.answer_format.is_slow:
            return call.answer_format.whole([_joined(own) for own in deltas])
        usage = call.counter.usage()
        num_tokens = usage.prompt_tokens * len(deltas) + usage.completion_tokens
        return await self._threads.run(
            num_tokens * DETAIL_BYTES, lambda: call.answer_format.whole([_joined(own) for own in deltas])
        )

    async def _send_stream(self, request: web.Request, call: OpenCall) -> web.StreamResponse:
        """Send server-sent events. An error before the first event becomes an ordinary HTTP error."""
        stream, answer_format = call.stream, call.answer_format
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
        stream.transport = transport
        cut = stream.limit_silence(self._timeout_s + WRITE_GRACE_S, transport.abort)
        try:
            async for delta in stream.arrivals():
                events = b"" if response.prepared else answer_format.opening(stream.num_choices)
                if delta is None:
                    waited_s = time.monotonic() - facts_of(request).arrived_at
                    if not response.prepared and waited_s < UNANSWERED_S:
                        continue
                    events += RESTARTING
                else:
                    call.counter.count(delta)
                    events += await self._events(answer_format, delta)
                if not response.prepared:
                    await response.prepare(request)
                if events:
                    await response.write(events)
            await response.write(answer_format.ending())
        except ConnectionResetError:
            log.debug("a client left while its answer was written")
        except Exception as error:
            if not response.prepared:
                raise
            if not isinstance(error, MinisglError):
                log.exception("a stream failed in the server")
            fault = fault_of(error)
            facts_of(request).error_code = fault.code or str(fault.status)
            with contextlib.suppress(ConnectionResetError):
                await response.write(answer_format.failure(fault))
        finally:
            cut.cancel()
        return response

    async def _events(self, answer_format: AnswerFormat, delta: Delta) -> bytes:
        """The events of one delta."""
        if not answer_format.is_slow:
            return answer_format.piece(delta)
        num_tokens = len(delta.token_ids) + len(delta.prompt_logprobs or ())
        return await self._threads.run(num_tokens * DETAIL_BYTES, lambda: answer_format.piece(delta))


def _joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return last._replace(
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs or ()],
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
