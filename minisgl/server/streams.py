"""The open requests of one server process: sends them to the engine and routes its tokens to their readers.

Promise: each request ends exactly once: by its last token, a stop string, an error, or because its reader
leaves. After that its entry is gone and later outputs for it are dropped. The engine is told to abort it,
unless the engine ended it.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import numpy as np

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.ipc.messages import IDS_PER_SERVER, AbortRequest, AddRequest, StepOutput, ToEngine
from minisgl.request import (
    FinishReason,
    PackedLogprobs,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    fit_to_context,
    without_stop_strings,
)
from minisgl.seeds import base_seed, request_seed
from minisgl.server.silence import SilenceLimit
from minisgl.server.stats import BusyClock, Rate, ServerStats
from minisgl.text.reply import ReplyText
from minisgl.text.stop import StopStrings
from minisgl.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LONGEST_RETRY_S = 300


class Delta(NamedTuple):
    """The new output of one choice, from one engine step."""

    choice: int  # index of the choice, in the order of `submit`
    text: str
    num_tokens: int  # new tokens that count as output
    num_cached_tokens: int  # prompt tokens found in the prefix cache; known with the first tokens
    finish_reason: str | None  # "stop" or "length" with the last delta of a choice
    token_ids: list[int]  # the tokens that `num_tokens` counts
    logprobs: list[TokenLogprobs] | None = None  # of `token_ids`, if requested
    prompt_logprobs: PackedLogprobs | None = None  # with a choice's first delta, if requested


class SharedPromptLogprobs:
    """Gives a prompt's log probabilities, which arrive with its first choice, to all choices of the prompt.

    The deltas of the other choices are held back until the log probabilities have arrived.
    """

    def __init__(self, first_choice: int) -> None:
        self._first_choice = first_choice
        self._found: PackedLogprobs | None = None
        self._held: list[Delta] = []
        self._started: set[int] = set()

    def add(self, delta: Delta) -> list[Delta]:
        """Take in a delta; returns the deltas to deliver now. Each choice's first has `prompt_logprobs`."""
        if delta.choice != self._first_choice:
            self._held.append(delta)
        if delta.prompt_logprobs is not None:
            self._found = delta.prompt_logprobs
        ready = [delta] if delta.choice == self._first_choice else []
        if self._found is not None:
            ready += map(self._with_logprobs, self._held)
            self._held.clear()
        return ready

    def _with_logprobs(self, delta: Delta) -> Delta:
        if delta.choice in self._started:
            return delta
        self._started.add(delta.choice)
        return delta._replace(prompt_logprobs=self._found)


class OpenChoice:
    """One request in the engine: the stream that reads it, its index there, its text and token counts."""

    __slots__ = ("index", "last_at", "num_prompt_tokens", "num_tokens", "shared", "stream", "text")

    def __init__(
        self,
        stream: "Stream",
        index: int,
        text: ReplyText,
        num_prompt_tokens: int,
        shared: SharedPromptLogprobs | None,
    ) -> None:
        self.stream = stream
        self.index = index
        self.text = text
        self.num_prompt_tokens = num_prompt_tokens
        self.shared = shared  # None = no prompt_logprobs requested, or n = 1
        self.num_tokens = 0
        self.last_at = 0.0  # time.monotonic() of the last tokens


class Stream:
    """The requests of one HTTP call, read together. Leaving the `with` block aborts those that still run.

    The call ends with a 504 if none of its requests gets a token for `timeout_s`, time in the queue included.
    `Streams.open` creates it and reserves room for `num_choices` requests.
    """

    def __init__(
        self, streams: "Streams", num_choices: int, timeout_s: float, name: str, key: int | None
    ) -> None:
        self.num_choices = num_choices
        self.name = name
        self.key = key
        self.opened_at = time.monotonic()
        self.request_ids: list[int] = []
        self._streams = streams
        self._unread: deque[Delta | MinisglError] = deque()
        self._has_unread = asyncio.Event()
        self._num_unfinished = num_choices
        self._loop = asyncio.get_running_loop()
        self._last_delta_at = self._loop.time()
        late = RequestError(504, "request_timeout", f"the request got no token for {timeout_s:g} s")
        self._limit = self.limit_silence(timeout_s, lambda: self.fail(late))

    def limit_silence(self, limit_s: float, act: Callable[[], None]) -> SilenceLimit:
        """Call `act` once no delta has arrived for `limit_s` seconds (the first: since the call began)."""
        return SilenceLimit(limit_s, lambda: self._last_delta_at, act)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        prompt_field: str = "prompt",
        priority: int = 0,
    ) -> None:
        """Send `n` requests per prompt (token ids), `num_choices` in all, to the engine. Call it once.

        Errors call the prompt `prompt_field`. Requests with a larger `priority` run sooner.

        Raises:
            RequestError: a prompt is empty or too long (400), or too many tokens are queued (429).
            EngineDeadError: the engine has ended.
        """
        if self._num_unfinished:  # no error ended the stream during tokenization
            self._streams.submit(self, prompts, params, n, prompt_field, priority)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yields the deltas of all choices as they arrive, until every choice has ended.

        Raises:
            RequestError: the engine refused a request, or produced no token within `timeout_s`.
            EngineDeadError: the engine died.
        """
        while self._num_unfinished or self._unread:
            while not self._unread:
                self._has_unread.clear()
                await self._has_unread.wait()
            item = self._unread.popleft()
            if isinstance(item, MinisglError):
                raise item.with_traceback(None)
            yield item

    def put(self, delta: Delta) -> None:
        """Queue a choice's next delta for the reader."""
        self._last_delta_at = self._loop.time()
        self._num_unfinished -= delta.finish_reason is not None
        self._unread.append(delta)
        self._has_unread.set()

    def fail(self, error: MinisglError) -> None:
        """End all choices that still run with `error`. The reader gets the queued deltas first."""
        if self._num_unfinished:
            self._num_unfinished = 0
            self._unread.append(error)
            self._has_unread.set()
            self._streams.abort(self)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._limit.cancel()
        self._streams.close(self)


class Streams:
    """All open requests of this server process. All methods run on the event loop's thread.

    Args:
        send: hands a message to the engine without waiting; raises EngineDeadError.
        max_open: `open` refuses requests beyond this number with a 429.
        timeout_s: how long a call may wait for its next token.
        max_queued_tokens: limit on prompt tokens that wait for a first output token; `Stream.submit` refuses
            more with a 429. None = no limit.
        rank: of this server process; its request ids start at rank * IDS_PER_SERVER.
        seed: with the request id, it seeds requests that bring no seed; None = a random one.
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
        seed: int | None = None,
    ) -> None:
        self._send = send
        self._tokenizer = tokenizer
        self._max_open = max_open
        self._timeout_s = timeout_s
        self._max_queued_tokens = max_queued_tokens
        self._ids = itertools.count(rank * IDS_PER_SERVER + 1)
        self._base_seed = base_seed(seed)
        self._stats = ServerStats()
        self._open_time = BusyClock()  # runs while requests are open
        self._queue_time = BusyClock()  # runs while prompt tokens are queued
        self._end_rate = Rate(self._open_time.now)
        self._prefill_rate = Rate(self._queue_time.now)  # prompt tokens that got a first output token
        self._choices: dict[int, OpenChoice] = {}
        self._open_streams: set[Stream] = set()
        self._num_open = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._max_context_tokens = 0
        self._refusal: MinisglError | None = RequestError(
            503, "loading", "the model is still loading; try again in a moment"
        )

    @property
    def num_open(self) -> int:
        """Requests whose stream is open, including those whose prompt is still being tokenized."""
        return self._num_open

    @property
    def num_running(self) -> int:
        """Requests that the engine has and has not ended."""
        return len(self._choices)

    @property
    def stats(self) -> ServerStats:
        """The current statistics. The caller may set the fields that it counts itself."""
        self._stats.num_open_requests = self._num_open
        self._stats.num_running_requests = len(self._choices)
        return self._stats

    @property
    def max_context_tokens(self) -> int:
        """Maximum tokens of one request, prompt plus output; 0 until the engine is ready."""
        return self._max_context_tokens

    @property
    def refusal(self) -> MinisglError | None:
        """The error that new requests get now; None = new requests are accepted."""
        return self._refusal

    def accept_requests(self, max_context_tokens: int) -> None:
        """Accept requests from now on, of up to `max_context_tokens` tokens (prompt plus output)."""
        self._max_context_tokens = max_context_tokens
        self._refusal = None

    def refuse_requests(self, error: MinisglError) -> None:
        """Refuse new requests with `error` from now on. Open requests continue."""
        self._refusal = error

    def fail_all(self, error: MinisglError) -> None:
        """End every open request with `error`."""
        for stream in self._open_streams:
            stream.fail(error)

    async def wait_until_empty(self) -> None:
        """Return when no request is open."""
        await self._empty.wait()

    def abort_calls(self, name: str | None, key: int | None = None) -> int:
        """End the calls of this name and API key (None = any) with a 409; returns the number of requests."""
        found = [one for one in self._open_streams if name in (None, one.name) and key in (None, one.key)]
        for stream in found:
            stream.fail(RequestError(409, "request_aborted", "the request was aborted through /abort"))
        return sum(stream.num_choices for stream in found)

    def open(self, num_choices: int, name: str = "", key: int | None = None) -> Stream:
        """Reserve room for `num_choices` requests. Use the returned stream in a `with` block.

        `abort_calls` finds the call by `name` and `key` (the index of the caller's API key).

        Raises:
            RequestError: 400 if `num_choices` exceeds the limit by itself, 429 if too many requests are open,
                503 while the model is loading or the server is shutting down.
            EngineDeadError: the engine died.
        """
        if self._refusal is not None:
            # The same error is raised many times. Its traceback would keep every caller's body alive.
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
                retry_after_s=self._end_rate.seconds_for(excess, LONGEST_RETRY_S),
            )
        stream = Stream(self, num_choices, self._timeout_s, name, key)
        self._open_streams.add(stream)
        self._num_open += num_choices
        self._open_time.set_busy(True)
        self._empty.clear()
        return stream

    def submit(
        self,
        stream: Stream,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
        prompt_field: str,
        priority: int,
    ) -> None:
        """See `Stream.submit`."""
        limit = self._max_context_tokens
        # All prompts share one message. It has the largest max_tokens; the engine lowers it for each prompt.
        fitted = [fit_to_context(len(prompt_ids), params, limit, prompt_field) for prompt_ids in prompts]
        largest = max(fitted, key=lambda one: one.max_tokens or 0)
        stops = StopStrings(params.stop)
        new_choices: list[OpenChoice] = []
        for prompt_index, prompt_ids in enumerate(prompts):
            is_shared = n > 1 and params.prompt_logprobs is not None
            shared = SharedPromptLogprobs(prompt_index * n) if is_shared else None
            for index in range(prompt_index * n, prompt_index * n + n):
                text = ReplyText(
                    self._tokenizer,
                    prompt_ids,
                    stops,
                    skip_special_tokens=params.skip_special_tokens,
                    include_stop=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )
                new_choices.append(OpenChoice(stream, index, text, len(prompt_ids), shared))
        self._check_queued_tokens(sum(entry.num_prompt_tokens for entry in new_choices))
        # Ids are taken after the checks, so that a refused call does not change the seeds of later calls.
        request_ids = [next(self._ids) for _ in new_choices]
        seeds: tuple[int, ...] = ()
        if params.seed is None:
            seeds = tuple(request_seed(self._base_seed, request_id) for request_id in request_ids)
        first, *others = [np.asarray(prompt_ids, "<i4").tobytes() for prompt_ids in prompts]
        # One message for all requests, so that the parameters are sent, decoded and checked once.
        message = AddRequest(
            request_ids[0],
            first,
            without_stop_strings(largest),
            priority,
            num_choices=n,
            more_prompts=tuple(others),
            seeds=seeds,
        )
        # Sending comes last, because only the engine can fail after it; `close` aborts what was sent.
        for request_id, entry in zip(request_ids, new_choices, strict=True):
            self._choices[request_id] = entry
            self._add_queued_tokens(entry.num_prompt_tokens)
            self._stats.num_prompt_tokens += entry.num_prompt_tokens
            self._stats.prompt_tokens.observe(entry.num_prompt_tokens)
        stream.request_ids += request_ids
        self._send(message)
        log.debug("requests from %d on: %d prompts, %d choices each", request_ids[0], len(prompts), n)

    def deliver(self, message: StepOutput) -> None:
        """Route one step's outputs to their streams. Outputs of requests that have ended are dropped."""
        now = time.monotonic()
        for output in message.outputs:
            choice = self._choices.get(output.request_id)
            if choice is None:
                continue
            try:
                self._deliver(output, choice, now)
            except Exception:  # a defect in one request's text must not end the others
                log.exception("request %d failed in the server", output.request_id)
                choice.stream.fail(RequestError(500, "internal_error", "the server failed on this request"))

    def abort(self, stream: Stream) -> None:
        """Remove the stream's requests and tell the engine. The room stays reserved until `close`."""
        for request_id in stream.request_ids:
            if request_id in self._choices:
                self._remove(request_id, FinishReason.ABORT)
                self._tell_abort(request_id)

    def close(self, stream: Stream) -> None:
        """The reader has left: abort the stream's requests and release the room."""
        self.abort(stream)
        if stream in self._open_streams:
            self._open_streams.remove(stream)
            self._num_open -= stream.num_choices
            if not self._num_open:
                self._open_time.set_busy(False)
                self._empty.set()

    def _check_queued_tokens(self, more: int) -> None:
        """Raise a 429 if `more` prompt tokens would overfill the queue. An empty queue takes any number."""
        most, queued = self._max_queued_tokens, self._stats.num_queued_tokens
        if most is not None and queued and queued + more > most:
            raise RequestError(
                429,
                "too_many_tokens",
                f"{queued} prompt tokens wait for an answer, these {more} would be more than the {most} this "
                "server queues; try again in a moment",
                retry_after_s=self._prefill_rate.seconds_for(queued + more - most, LONGEST_RETRY_S),
            )

    def _add_queued_tokens(self, num_tokens: int) -> None:
        """Add `num_tokens`, which may be negative, to the number of queued prompt tokens."""
        self._stats.num_queued_tokens += num_tokens
        self._queue_time.set_busy(self._stats.num_queued_tokens > 0)

    def _remove(self, request_id: int, reason: FinishReason) -> None:
        """Remove a request that has ended and count it."""
        choice = self._choices.pop(request_id)
        stats = self._stats
        stats.ended[reason.value] = stats.ended.get(reason.value, 0) + 1
        if not choice.num_tokens:
            self._add_queued_tokens(-choice.num_prompt_tokens)
        self._end_rate.count(1)
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            stats.request_s.observe(time.monotonic() - choice.stream.opened_at)
            stats.output_tokens.observe(choice.num_tokens)

    def _count(self, choice: OpenChoice, num_tokens: int, num_cached_tokens: int, now: float) -> None:
        """Count `num_tokens` new tokens of a request, which arrived at `now` (time.monotonic())."""
        stats = self._stats
        stats.num_output_tokens += num_tokens
        if choice.num_tokens:
            stats.inter_token_s.observe((now - choice.last_at) / num_tokens, num_tokens)
        else:
            stats.first_token_s.observe(now - choice.stream.opened_at)
            self._add_queued_tokens(-choice.num_prompt_tokens)
            stats.num_cached_tokens += num_cached_tokens
            self._prefill_rate.count(choice.num_prompt_tokens)
        choice.num_tokens += num_tokens
        choice.last_at = now

    def _deliver(self, output: RequestOutput, choice: OpenChoice, now: float) -> None:
        reason = output.finish_reason
        if reason is FinishReason.ERROR or reason is FinishReason.ABORT:
            self._remove(output.request_id, reason)
            choice.stream.fail(
                RequestError(
                    output.error_status or 500,
                    output.error_code or "internal_error",
                    output.error_message or f"the engine ended this request: {reason.value}",
                    output.error_param,
                )
            )
            return
        if reason is None:
            piece = choice.text.push(output.token_ids)
        else:
            piece = choice.text.finish(output.token_ids, drop_last=reason is FinishReason.STOP)
        if piece.num_tokens:
            self._count(choice, piece.num_tokens, output.num_cached_tokens, now)
        ended = FinishReason.STOP if piece.stopped else reason
        if ended is not None:
            self._remove(output.request_id, ended)
            if reason is None:
                self._tell_abort(output.request_id)
        num_tokens = piece.num_tokens
        delta = Delta(
            choice.index,
            piece.text,
            num_tokens,
            output.num_cached_tokens,
            None if ended is None else ended.value,
            output.token_ids[:num_tokens],
            None if output.logprobs is None else output.logprobs[:num_tokens],
            output.prompt_logprobs,
        )
        for ready in [delta] if choice.shared is None else choice.shared.add(delta):
            choice.stream.put(ready)

    def _tell_abort(self, request_id: int) -> None:
        try:
            self._send(AbortRequest(request_id))
        except EngineDeadError:
            log.debug("request %d: no engine left to tell", request_id)
