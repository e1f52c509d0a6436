"""From request id to reader: every open request of the server process, its text and its one end.

Promise: each request ends exactly once, by its last token, a stop string, an error or its reader
leaving; then its entry is gone, whatever still arrives for it is dropped, and the engine has been told
unless it was the engine that ended it.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.messages import IDS_PER_SERVER, AbortRequest, AddRequest, StepOutput, ToEngine
from minisgl.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs, fit_to_context
from minisgl.server.stats import BusyClock, FrontStats, Rate
from minisgl.text.reply import ReplyText
from minisgl.text.stop import StopStrings
from minisgl.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LONGEST_RETRY_S = 300


class Delta(NamedTuple):
    """What one step gave one choice."""

    choice: int  # which one, in the order of `submit`
    text: str
    num_tokens: int  # new tokens that count
    num_cached_tokens: int  # of its prompt; known with the first tokens
    finish_reason: str | None  # "stop" or "length" with the last delta of a choice
    token_ids: list[int]  # those that count
    logprobs: list[TokenLogprobs] | None = None  # of these, where asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # with a choice's first delta, where asked for


class Running:
    """One request the engine works on: who reads it, as which choice, its text and figures so far."""

    __slots__ = ("choice", "last_at", "num_prompt_tokens", "num_tokens", "stream", "text")

    def __init__(self, stream: "Stream", choice: int, text: ReplyText, num_prompt_tokens: int) -> None:
        self.stream = stream
        self.choice = choice
        self.text = text
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.last_at = 0.0  # when the last tokens came, time.monotonic()


class Stream:
    """The requests of one HTTP call, read together. Leaving its `with` block aborts what is still open.

    Made by `Frontend.open`, which set room aside for `num_choices` requests.
    """

    def __init__(self, frontend: "Frontend", num_choices: int, timeout_s: float, name: str) -> None:
        self.num_choices = num_choices
        self.name = name
        self.opened_at = time.monotonic()
        self.request_ids: list[int] = []
        self._frontend = frontend
        self._unread: deque[Delta | MinisglError] = deque()
        self._news = asyncio.Event()
        self._num_unfinished = num_choices
        late = RequestError(504, "request_timeout", f"the request did not end within {timeout_s:g} s")
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.fail, late)

    def submit(
        self,
        choices: Sequence[tuple[Sequence[int], SamplingParams]],
        prompt_field: str = "prompt",
        priority: int = 0,
    ) -> None:
        """Send the requests, each (prompt ids, parameters), to the engine; once, `num_choices` of them.

        `prompt_field` is what errors call the prompt; of larger `priority` run sooner.

        Raises:
            RequestError: 400 when a prompt is empty or too long, 429 when too many tokens wait; nothing was
                sent then.
            EngineDeadError: there is no engine any more.
        """
        if self._num_unfinished:  # not ended by an error while the prompt was tokenized
            self._frontend.start(self, choices, prompt_field, priority)

    async def deltas(self) -> AsyncIterator[Delta]:
        """All choices' deltas as they come, until every choice has ended.

        Raises:
            RequestError: the engine refused a request, or it took too long.
            EngineDeadError: the engine died.
        """
        while self._num_unfinished or self._unread:
            while not self._unread:
                self._news.clear()
                await self._news.wait()
            item = self._unread.popleft()
            if isinstance(item, MinisglError):
                raise item.with_traceback(None)
            yield item

    def put(self, delta: Delta) -> None:
        """A choice's next delta."""
        self._num_unfinished -= delta.finish_reason is not None
        self._unread.append(delta)
        self._news.set()

    def fail(self, error: MinisglError) -> None:
        """End the choices that have not ended with `error`, which comes after what can be read already."""
        if self._num_unfinished:
            self._num_unfinished = 0
            self._unread.append(error)
            self._news.set()
            self._frontend.abort(self)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._frontend.close(self)


class Frontend:
    """All open requests. Everything here runs on the event loop's thread.

    Args:
        send: hands a message to the engine without waiting; raises EngineDeadError.
        max_open: requests beyond which `open` answers 429.
        timeout_s: how long a request may take.
        max_queued_tokens: prompt tokens without an answer yet beyond which `Stream.submit` answers 429;
            None = any number.
        rank: of this server process; its request ids start at rank * IDS_PER_SERVER.
    """

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        tokenizer: Tokenizer,
        max_open: int,
        timeout_s: float,
        *,
        max_queued_tokens: int | None = None,
        rank: int = 0,
    ) -> None:
        self._send = send
        self._tokenizer = tokenizer
        self._max_open = max_open
        self._timeout_s = timeout_s
        self._max_queued_tokens = max_queued_tokens
        self._ids = itertools.count(rank * IDS_PER_SERVER + 1)
        self._stats = FrontStats()
        self._open_time = BusyClock()  # runs while requests are open
        self._queue_time = BusyClock()  # runs while prompt tokens are queued
        self._ends = Rate(self._open_time.now)
        self._prefills = Rate(self._queue_time.now)  # prompt tokens whose answer has begun
        self._running: dict[int, Running] = {}
        self._streams: set[Stream] = set()
        self._num_open = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._max_context_tokens = 0
        self._refusal: MinisglError | None = RequestError(
            503, "loading", "the model is still loading; try again in a moment"
        )

    @property
    def num_open(self) -> int:
        """Requests whose reader has not left, including those whose prompt is still being tokenized."""
        return self._num_open

    @property
    def num_running(self) -> int:
        """Requests that wait for the engine."""
        return len(self._running)

    @property
    def stats(self) -> FrontStats:
        """All figures as they are now; the caller may add to it what it counts itself."""
        self._stats.num_open_requests = self._num_open
        self._stats.num_running_requests = len(self._running)
        return self._stats

    @property
    def max_context_tokens(self) -> int:
        """Most tokens of one request, prompt and output together; 0 until the engine is ready."""
        return self._max_context_tokens

    @property
    def refusal(self) -> MinisglError | None:
        """Why no request is welcome now, or None."""
        return self._refusal

    def welcome(self, max_context_tokens: int) -> None:
        """The engine is ready: take requests of up to this many tokens, prompt and output together."""
        self._max_context_tokens = max_context_tokens
        self._refusal = None

    def refuse(self, error: MinisglError) -> None:
        """Take no new requests from now on; the open ones go on."""
        self._refusal = error

    def fail_all(self, error: MinisglError) -> None:
        """End every open request with `error`."""
        for stream in self._streams:
            stream.fail(error)

    async def wait_until_empty(self) -> None:
        """Returns when no request is open."""
        await self._empty.wait()

    def abort_named(self, name: str | None) -> int:
        """End the calls of this name (None: all) with an error; how many requests that were."""
        found = [stream for stream in self._streams if name is None or stream.name == name]
        for stream in found:
            stream.fail(RequestError(409, "request_aborted", "the request was aborted through /abort"))
        return sum(stream.num_choices for stream in found)

    def open(self, num_choices: int, name: str = "") -> Stream:
        """Set room aside for `num_choices` requests; use the result in a `with` block.

        `name` is what `abort_named` knows the call by.

        Raises:
            RequestError: 429 when too many are open, 503 while loading or shutting down.
            EngineDeadError: the engine died.
        """
        if self._refusal is not None:
            # Raised often: its traceback would keep the frames, and with them the bodies, of all who came.
            raise self._refusal.with_traceback(None)
        if num_choices > self._max_open:
            raise RequestError(
                400,
                "invalid_value",
                f"{num_choices} choices in one call; this server takes {self._max_open}",
                "n",
            )
        if self._num_open + num_choices > self._max_open:
            excess = self._num_open + num_choices - self._max_open
            raise RequestError(
                429,
                "too_many_requests",
                f"{self._num_open} requests are open, this server takes {self._max_open}; "
                "try again in a moment",
                retry_after_s=_time_for(excess, self._ends),
            )
        stream = Stream(self, num_choices, self._timeout_s, name)
        self._streams.add(stream)
        self._num_open += num_choices
        self._open_time.run(True)
        self._empty.clear()
        return stream

    def start(
        self,
        stream: Stream,
        choices: Sequence[tuple[Sequence[int], SamplingParams]],
        prompt_field: str,
        priority: int,
    ) -> None:
        """What `Stream.submit` does."""
        limit = self._max_context_tokens
        stops = {params.stop: StopStrings(params.stop) for _, params in choices}
        running: list[Running] = []
        messages: list[AddRequest] = []
        for choice, (prompt_ids, params) in enumerate(choices):
            fitted = fit_to_context(len(prompt_ids), params, limit, prompt_field)
            # Stop strings are watched here, the engine has no use for them.
            bare = msgspec.structs.replace(fitted, stop=()) if fitted.stop else fitted
            prompt = np.asarray(prompt_ids, "<i4").tobytes()
            messages.append(AddRequest(next(self._ids), prompt, bare, priority))
            text = ReplyText(
                self._tokenizer,
                prompt_ids,
                stops[params.stop],
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
            running.append(Running(stream, choice, text, len(prompt_ids)))
        self._check_queued_tokens(sum(entry.num_prompt_tokens for entry in running))
        # Sent last, when nothing can fail any more but the engine: `close` then aborts what was sent.
        for message, entry in zip(messages, running, strict=True):
            self._running[message.request_id] = entry
            self._queue(entry.num_prompt_tokens)
            self._stats.num_prompt_tokens += entry.num_prompt_tokens
            self._stats.prompt_tokens.observe(entry.num_prompt_tokens)
            stream.request_ids.append(message.request_id)
        for message in messages:
            self._send(message)
            log.debug("request %d: %d prompt tokens", message.request_id, len(message.prompt_ids) // 4)

    def take(self, message: StepOutput) -> None:
        """One step's tokens; those of requests that have ended are dropped."""
        now = time.monotonic()
        for output in message.outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            try:
                self._take(output, running, now)
            except Exception:  # a defect in one request's text must not end the others
                log.exception("request %d failed in the server", output.request_id)
                running.stream.fail(RequestError(500, "internal_error", "the server failed on this request"))

    def abort(self, stream: Stream) -> None:
        """Drop the stream's running requests and tell the engine; its room stays taken until `close`."""
        for request_id in stream.request_ids:
            if request_id in self._running:
                self._end(request_id, FinishReason.ABORT)
                self._tell_abort(request_id)

    def close(self, stream: Stream) -> None:
        """The reader left: abort what runs, give the room back."""
        self.abort(stream)
        if stream in self._streams:
            self._streams.remove(stream)
            self._num_open -= stream.num_choices
            if not self._num_open:
                self._open_time.run(False)
                self._empty.set()

    def _check_queued_tokens(self, more: int) -> None:
        """Refuse `more` prompt tokens where they are too many; whoever comes first is always taken."""
        most, queued = self._max_queued_tokens, self._stats.num_queued_tokens
        if most is not None and queued and queued + more > most:
            raise RequestError(
                429,
                "too_many_tokens",
                f"{queued} prompt tokens wait for an answer, these {more} would be more than the {most} this "
                "server queues; try again in a moment",
                retry_after_s=_time_for(queued + more - most, self._prefills),
            )

    def _queue(self, num_tokens: int) -> None:
        """So many prompt tokens more are queued (or less)."""
        self._stats.num_queued_tokens += num_tokens
        self._queue_time.run(self._stats.num_queued_tokens > 0)

    def _end(self, request_id: int, reason: FinishReason) -> None:
        """The request's entry goes, and is counted."""
        running = self._running.pop(request_id)
        stats = self._stats
        stats.ended[reason.value] = stats.ended.get(reason.value, 0) + 1
        if not running.num_tokens:
            self._queue(-running.num_prompt_tokens)
        self._ends.count(1)
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            stats.request_s.observe(time.monotonic() - running.stream.opened_at)
            stats.output_tokens.observe(running.num_tokens)

    def _count(self, running: Running, num_tokens: int, num_cached_tokens: int, now: float) -> None:
        """So many tokens came for a request."""
        stats = self._stats
        stats.num_output_tokens += num_tokens
        if running.num_tokens:
            stats.inter_token_s.observe((now - running.last_at) / num_tokens, num_tokens)
        else:
            stats.first_token_s.observe(now - running.stream.opened_at)
            self._queue(-running.num_prompt_tokens)
            stats.num_cached_tokens += num_cached_tokens
            self._prefills.count(running.num_prompt_tokens)
        running.num_tokens += num_tokens
        running.last_at = now

    def _take(self, output: RequestOutput, running: Running, now: float) -> None:
        reason = output.finish_reason
        if reason is FinishReason.ERROR or reason is FinishReason.ABORT:
            self._end(output.request_id, reason)
            running.stream.fail(
                RequestError(
                    output.error_status or 500,
                    output.error_code or "internal_error",
                    output.error_message or f"the engine ended this request: {reason.value}",
                    output.error_param,
                )
            )
            return
        if reason is None:
            piece = running.text.push(output.token_ids)
        else:
            piece = running.text.finish(output.token_ids, drop_last=reason is FinishReason.STOP)
        if piece.num_tokens:
            self._count(running, piece.num_tokens, output.num_cached_tokens, now)
        ended = FinishReason.STOP if piece.stopped else reason
        if ended is not None:
            self._end(output.request_id, ended)
            if reason is None:
                self._tell_abort(output.request_id)
        word = None if ended is None else ended.value
        num_tokens = piece.num_tokens
        running.stream.put(
            Delta(
                running.choice,
                piece.text,
                num_tokens,
                output.num_cached_tokens,
                word,
                output.token_ids[:num_tokens],
                None if output.logprobs is None else output.logprobs[:num_tokens],
                output.prompt_logprobs,
            )
        )

    def _tell_abort(self, request_id: int) -> None:
        try:
            self._send(AbortRequest(request_id))
        except EngineDeadError:
            log.debug("request %d: no engine left to tell", request_id)


def _time_for(things: int, rate: Rate) -> int | None:
    """Whole seconds in which so many of what `rate` counts will have happened; None = nothing is known."""
    per_s = rate.per_s()
    return min(LONGEST_RETRY_S, max(1, math.ceil(things / per_s))) if per_s > 0 else None
