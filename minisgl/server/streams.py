"""The open requests of one server process: sends them to the engine and routes its tokens to their readers.

Promise: each request ends exactly once: by its last token, a stop string, an error, or because its reader
leaves. After that its entry is gone and later outputs for it are dropped. The engine is told to abort it,
unless the engine ended it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.ipc.calls import add_requests
from minisgl.ipc.messages import IDS_PER_SERVER, AbortRequest, StepOutput, ToEngine
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.seeds import base_seed
from minisgl.server.keys.meter import CallMeter
from minisgl.server.keys.room import check_queued_tokens, check_requests
from minisgl.server.open_choices import Delta, OpenChoice, PreparedCall, prepare
from minisgl.server.silence import SilenceLimit
from minisgl.server.stats import BusyClock, Rate, ServerStats
from minisgl.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LONGEST_RETRY_S = 300


class Stream:
    """The requests of one HTTP call, read together. Leaving the `with` block aborts those that still run.

    The call ends with a 504 if none of its requests gets a token for `timeout_s`, time in the queue included.
    `Streams.open` creates it and reserves room for `num_choices` requests.
    """

    def __init__(
        self,
        streams: "Streams",
        num_choices: int,
        timeout_s: float,
        name: str,
        key: str | None,
        meter: CallMeter | None,
    ) -> None:
        self.num_choices = num_choices
        self.name = name
        self.key = key
        self.meter = meter
        self.opened_at = time.monotonic()
        self.request_ids = range(0)  # of all choices; empty until the call is sent
        self.num_sent = 0  # requests that the engine was sent, in the order of their ids
        self.transport: asyncio.WriteTransport | None = None  # of a streamed answer, once it is sent
        self.taken_at = self.opened_at  # time.monotonic() when the reader last took a delta
        self._streams = streams
        self._unread: deque[Delta | MinisglError | None] = deque()  # None: see `arrivals`
        self._has_unread = asyncio.Event()
        self._num_unfinished = num_choices
        self._loop = asyncio.get_running_loop()
        self._last_delta_at = self._loop.time()
        late = RequestError(504, "request_timeout", f"the request got no token for {timeout_s:g} s")
        self._limit = self.limit_silence(timeout_s, lambda: self.fail(late))

    def limit_silence(self, limit_s: float, act: Callable[[], None]) -> SilenceLimit:
        """Call `act` once no delta has arrived for `limit_s` seconds (the first: since the call began)."""
        return SilenceLimit(limit_s, lambda: self._last_delta_at, act)

    @property
    def num_unread(self) -> int:
        """Deltas that the reader has not taken."""
        return len(self._unread)

    @property
    def is_over(self) -> bool:
        """Whether all choices have ended."""
        return not self._num_unfinished

    def prepare(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int = 1,
        prompt_field: str = "prompt",
        priority: int = 0,
        kept_special: frozenset[int] = frozenset(),
        cache_salt: str = "",
    ) -> PreparedCall:
        """Check and build `n` requests per prompt (token ids), `num_choices` in all. May run in a thread.

        Errors call the prompt `prompt_field`. Requests with a larger `priority` run sooner. `kept_special`:
        ids of special tokens that stay in the text in any case. `cache_salt`: see `AddRequest`.

        Raises:
            RequestError: 400 if a prompt is empty or too long.
        """
        return prepare(
            self,
            self._streams.tokenizer,
            prompts,
            params,
            n,
            max_context_tokens=self._streams.max_context_tokens,
            prompt_field=prompt_field,
            priority=priority,
            kept_special=kept_special,
            cache_salt=cache_salt,
        )

    async def submit(self, call: PreparedCall) -> None:
        """Send the call to the engine. Call it once. A large call is sent in slices; others run in between.

        Raises:
            RequestError: 429 if too many tokens are queued; then nothing was sent.
            EngineDeadError: the engine has ended.
        """
        if not self.is_over:  # no error ended the stream during tokenization
            await self._streams.submit(self, call)

    async def deltas(self) -> AsyncIterator[Delta]:
        """`arrivals` without the notes."""
        async for delta in self.arrivals():
            if delta is not None:
                yield delta

    async def arrivals(self) -> AsyncIterator[Delta | None]:
        """Yields the deltas of all choices as they arrive, until every choice has ended.

        None = the engine is being started again, and the client should hear that its answer goes on.

        Raises:
            RequestError: the engine refused a request, or produced no token within `timeout_s`.
            EngineDeadError: the engine died.
        """
        while self._num_unfinished or self._unread:
            while not self._unread:
                self._has_unread.clear()
                await self._has_unread.wait()
            item = self._unread.popleft()
            self.taken_at = time.monotonic()
            if isinstance(item, MinisglError):
                raise item.with_traceback(None)
            yield item

    def put(self, delta: Delta) -> None:
        """Queue a choice's next delta for the reader."""
        self._last_delta_at = self._loop.time()
        self._num_unfinished -= delta.finish_reason is not None
        self._unread.append(delta)
        self._has_unread.set()

    def note_wait(self) -> None:
        """Let the reader tell its client that the answer goes on later, unless it has something to read."""
        if self._num_unfinished and not self._unread:
            self._unread.append(None)
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
        users_share: whether there are users that share the room for open requests and queued tokens: none of
            them takes more than what it leaves free, so each new one finds some.
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
        users_share: Callable[[], bool] = lambda: False,
        rank: int = 0,
        seed: int | None = None,
    ) -> None:
        self._send = send
        self.tokenizer = tokenizer
        self._max_open = max_open
        self._timeout_s = timeout_s
        self._max_queued_tokens = max_queued_tokens
        self._users_share = users_share
        self._next_id = rank * IDS_PER_SERVER + 1
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
        self._loading = RequestError(503, "loading", "the model is still loading; try again in a moment")
        self._refusal: MinisglError | None = self._loading

    @property
    def num_open(self) -> int:
        """Requests whose stream is open, including those whose prompt is still being tokenized."""
        return self._num_open

    @property
    def open_streams(self) -> Collection[Stream]:
        """The streams whose call has not been answered to its end; to read."""
        return self._open_streams

    @property
    def num_running(self) -> int:
        """Requests that were submitted and have not ended."""
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
        """The engine is ready: accept requests of up to `max_context_tokens` tokens (prompt plus output).

        After `refuse_requests` they are still refused.
        """
        self._max_context_tokens = max_context_tokens
        if self._refusal is self._loading:
            self._refusal = None

    def refuse_requests(self, error: MinisglError) -> None:
        """Refuse new requests with `error` from now on. Open requests continue."""
        self._refusal = error

    def fail_all(self, error: MinisglError) -> None:
        """End every open request with `error`."""
        for stream in self._open_streams:
            stream.fail(error)

    def note_wait(self, request_ids: Iterable[int]) -> None:
        """Let the clients of these requests hear that their answers go on later."""
        for stream in dict.fromkeys(self._choices[one].stream for one in request_ids if one in self._choices):
            stream.note_wait()

    async def wait_until_empty(self) -> None:
        """Return when no request is open."""
        await self._empty.wait()

    def abort_calls(self, name: str | None, key: str | None = None) -> int:
        """End the calls of this name and API key (None = any) with a 409; returns the number of requests."""
        found = [one for one in self._open_streams if name in (None, one.name) and key in (None, one.key)]
        for stream in found:
            stream.fail(RequestError(409, "request_aborted", "the request was aborted through /abort"))
        return sum(stream.num_choices for stream in found)

    def open(
        self,
        num_choices: int,
        name: str = "",
        key: str | None = None,
        *,
        n: int = 1,
        prompt_field: str = "prompt",
        meter: CallMeter | None = None,
    ) -> Stream:
        """Reserve room for `num_choices` requests. Use the returned stream in a `with` block.

        `abort_calls` finds the call by `name` and `key` (which names the caller's API key). Errors name
        `prompt_field` if the prompts with `n` choices each are too many, and `n` if one prompt has too many.
        `meter` counts what the call uses.

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
                f"{num_choices // n} prompts with {n} choices each are {num_choices} requests in one call; "
                f"this server takes {self._max_open}; "
                + ("lower n" if n == num_choices else "send fewer at a time"),
                "n" if n == num_choices else prompt_field,
            )
        self.check_room(num_choices)
        if meter is not None and self._users_share():
            check_requests(meter.user, num_choices, self._max_open - self._num_open, self._seconds_for_ends)
        stream = Stream(self, num_choices, self._timeout_s, name, key, meter)
        self._open_streams.add(stream)
        self._num_open += num_choices
        self._open_time.set_busy(True)
        self._empty.clear()
        return stream

    def check_room(self, num_requests: int) -> None:
        """Refuse so many more requests, with a 429, if there is no room for them."""
        excess = self._num_open + num_requests - self._max_open
        if excess > 0:
            raise RequestError(
                429,
                "too_many_requests",
                f"{self._num_open} requests are open, this server takes {self._max_open}; "
                "try again in a moment",
                retry_after_s=self._seconds_for_ends(excess),
            )

    async def submit(self, stream: Stream, call: PreparedCall) -> None:
        """See `Stream.submit`."""
        self._check_queued_tokens(call.num_prompt_tokens, stream.meter)
        # Ids are taken after the checks, so that a refused call does not change the seeds of later calls.
        stream.request_ids = range(self._next_id, self._next_id + len(call.choices))
        self._next_id = stream.request_ids.stop
        # All requests are registered at once and sent slice by slice. `abort` removes them in any case.
        self._choices.update(zip(stream.request_ids, call.choices, strict=True))
        self._add_queued_tokens(call.num_prompt_tokens, stream)
        if stream.meter is not None:
            stream.meter.count_sent()
        n = len(call.choices) // len(call.prompts)
        messages = add_requests(
            stream.request_ids,
            call.prompts,
            call.params,
            base_seed=self._base_seed,
            priority=call.priority,
            cache_salt=call.cache_salt,
            call_id=stream.name,
            arrived_s=stream.opened_at,
            user=stream.meter.user.name if stream.meter is not None else "",
        )
        for message in messages:
            if stream.num_sent:
                await asyncio.sleep(0)
            if stream.is_over:  # an error has ended it meanwhile
                return
            self._send(message)
            for choice in call.choices[stream.num_sent : stream.num_sent + message.num_requests : n]:
                self._stats.num_prompt_tokens += n * choice.num_prompt_tokens
                self._stats.prompt_tokens.observe(choice.num_prompt_tokens, n)
            stream.num_sent += message.num_requests
        log.debug(
            "requests from %d on: %d prompts, %d choices each", stream.request_ids[0], len(call.prompts), n
        )

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
        for index, request_id in enumerate(stream.request_ids):
            if request_id in self._choices:
                self._remove(request_id, FinishReason.ABORT)
                if index < stream.num_sent:
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

    def _check_queued_tokens(self, more: int, meter: CallMeter | None) -> None:
        """Raise a 429 if `more` prompt tokens would overfill the queue. An empty queue takes any number."""
        most, queued = self._max_queued_tokens, self._stats.num_queued_tokens
        if most is not None and meter is not None and self._users_share():
            check_queued_tokens(meter.user, more, most - queued, self._seconds_for_tokens)
        if most is not None and queued and queued + more > most:
            raise RequestError(
                429,
                "too_many_tokens",
                f"{queued} prompt tokens wait for an answer, these {more} would be more than the {most} this "
                "server queues; try again in a moment",
                retry_after_s=self._seconds_for_tokens(queued + more - most),
            )

    def _seconds_for_ends(self, num_requests: int) -> int | None:
        return self._end_rate.seconds_for(num_requests, LONGEST_RETRY_S)

    def _seconds_for_tokens(self, num_tokens: int) -> int | None:
        return self._prefill_rate.seconds_for(num_tokens, LONGEST_RETRY_S)

    def _add_queued_tokens(self, num_tokens: int, stream: Stream) -> None:
        """Add `num_tokens`, which may be negative, to the number of queued prompt tokens."""
        if stream.meter is not None:
            stream.meter.user.num_queued_tokens += num_tokens
        self._stats.num_queued_tokens += num_tokens
        self._queue_time.set_busy(self._stats.num_queued_tokens > 0)

    def _remove(self, request_id: int, reason: FinishReason) -> None:
        """Remove a request that has ended and count it."""
        choice = self._choices.pop(request_id)
        stats = self._stats
        stats.ended[reason.value] = stats.ended.get(reason.value, 0) + 1
        if not choice.num_tokens:
            self._add_queued_tokens(-choice.num_prompt_tokens, choice.stream)
        if choice.stream.meter is not None:
            choice.stream.meter.count_end(reason)
        self._end_rate.count(1)
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            stats.request_s.observe(time.monotonic() - choice.stream.opened_at)
            stats.output_tokens.observe(choice.num_tokens)
            if choice.num_tokens > 1:
                stats.per_token_s.observe((choice.last_at - choice.first_at) / (choice.num_tokens - 1))

    def _count(self, choice: OpenChoice, num_tokens: int, num_cached_tokens: int, now: float) -> None:
        """Count `num_tokens` new tokens of a request, which arrived at `now` (time.monotonic())."""
        stats = self._stats
        stats.num_output_tokens += num_tokens
        if choice.num_tokens:
            stats.inter_token_s.observe((now - choice.last_at) / num_tokens, num_tokens)
        else:
            choice.first_at = now
            stats.first_token_s.observe(now - choice.stream.opened_at)
            self._add_queued_tokens(-choice.num_prompt_tokens, choice.stream)
            stats.num_cached_tokens += num_cached_tokens
            self._prefill_rate.count(choice.num_prompt_tokens)
        choice.num_tokens += num_tokens
        choice.last_at = now
        if choice.stream.meter is not None:
            choice.stream.meter.count_output(choice.index, num_tokens, num_cached_tokens)

    def _deliver(self, output: RequestOutput, choice: OpenChoice, now: float) -> None:
        try:
            piece = choice.text.receive(output)
        except RequestError as error:
            assert output.finish_reason is not None
            self._remove(output.request_id, output.finish_reason)
            choice.stream.fail(error)
            return
        if piece.token_ids:
            self._count(choice, len(piece.token_ids), piece.num_cached_tokens, now)
        if piece.finish_reason is not None:
            self._remove(output.request_id, piece.finish_reason)
        if piece.must_abort:
            self._tell_abort(output.request_id)
        for delta in choice.deltas(piece):
            choice.stream.put(delta)

    def _tell_abort(self, request_id: int) -> None:
        try:
            self._send(AbortRequest(request_id))
        except EngineDeadError:
            log.debug("request %d: no engine left to tell", request_id)
