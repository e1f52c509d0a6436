"""Drives an engine in the caller's process and gives every reply its own text.

Promise: an output reaches the reply it belongs to, whichever thread steps the engine. An abandoned reply is
aborted and leaves nothing behind. This module loads no torch; the caller passes the engine in.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from minisgl.errors import DeviceFaultError, EngineDeadError, MinisglError, RequestError
from minisgl.ipc.calls import add_requests
from minisgl.ipc.messages import (
    AddRequest,
)
from minisgl.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs, fit_to_context
from minisgl.seeds import base_seed
from minisgl.text.formats.events import Event
from minisgl.text.reply import ReplyText


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The part of a reply that one step added. The one with a `finish_reason` is the last."""

    text: str
    """New text; empty while a character or a possible stop string is incomplete. Of a conversation's reply:
    new text of the answer, without thoughts and calls."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, where asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token of the prompt but the first, if asked for; in the first delta."""
    events: tuple[Event, ...] = ()
    """What `LLM.stream` reads in the new text, in order: thoughts, answer, and parts of calls."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the model made."""

    id: str
    name: str
    arguments: str
    """A JSON object; as far as it was written if the call is not `complete`."""
    complete: bool
    """False: the model, or max_tokens, broke off in the arguments."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A whole reply."""

    text: str
    """Without the stop string that ended it, and of a conversation's reply without thoughts and calls."""
    token_ids: tuple[int, ...]
    """Generated tokens, an end-of-sequence token included."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, where asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token of the prompt but the first, where asked for."""
    reasoning: str = ""
    """The thought before the answer, of a model that marks thoughts."""
    num_reasoning_tokens: int = 0
    """Those of `token_ids` that are thoughts, with their markers."""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message, to go on with the conversation. Calls that broke off are left out."""
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in self.tool_calls
            if one.complete
        ]
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {
            "role": "assistant",
            "content": self.text,
            **thought,
            **({"tool_calls": calls} if calls else {}),
        }


class StepEngine(Protocol):
    """The part of `minisgl.engine.engine.Engine` that this module uses."""

    @property
    def max_context_tokens(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: AddRequest, /) -> None: ...
    def abort(self, request_id: int, /) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def close(self) -> None: ...


class Reply:
    """One request as its caller sees it: deltas to read, then the end or an error."""

    def __init__(self, request_id: int, num_prompt_tokens: int, text: ReplyText) -> None:
        self.request_id = request_id
        self.ended = False
        self._error: MinisglError | None = None
        self._num_prompt_tokens = num_prompt_tokens
        self._text = text
        self._unread: deque[Delta] = deque()

    @property
    def is_readable(self) -> bool:
        """Whether `read` would return a delta or raise an error."""
        return bool(self._unread) or self._error is not None

    def read(self) -> list[Delta]:
        """The deltas that arrived since the last call.

        Raises:
            RequestError: the engine refused the request.
            MinisglError: the engine was closed or broke.
        """
        if self._error is not None:
            raise self._error
        deltas = list(self._unread)
        self._unread.clear()
        return deltas

    def fail(self, error: MinisglError) -> None:
        """End without an answer; the next `read` raises `error`."""
        self._error = error
        self.ended = True

    def receive(self, output: RequestOutput) -> bool:
        """Turn an output into a delta or an error; returns whether the engine must abort the request."""
        try:
            piece = self._text.receive(output)
        except RequestError as error:
            self.fail(error)
            return False
        self.ended = piece.finish_reason is not None
        self._unread.append(
            Delta(
                text=piece.text,
                token_ids=tuple(piece.token_ids),
                finish_reason=piece.finish_reason,
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=piece.num_cached_tokens,
                logprobs=None if piece.logprobs is None else tuple(piece.logprobs),
                prompt_logprobs=None
                if piece.prompt_logprobs is None
                else tuple(piece.prompt_logprobs.unpack()),
            )
        )
        return piece.must_abort


class OfflineDriver:
    """Submits requests to an engine, and steps it while a caller waits for a reply.

    On cpu several threads may share it: each waits for its own replies and steps for all. A compiled engine
    on cuda must be used only from the thread that built it.

    Args:
        make_text: takes a prompt, its parameters, and the special tokens that stay in the text.
        seed: base seed of requests without a seed; None = a fresh one.
    """

    def __init__(
        self,
        engine: StepEngine,
        make_text: Callable[[Sequence[int], SamplingParams, frozenset[int]], ReplyText],
        seed: int | None = None,
    ) -> None:
        self._base_seed = base_seed(seed)
        self._engine: StepEngine | None = engine
        self._make_text = make_text
        self.max_context_tokens = engine.max_context_tokens
        self._lock = threading.Lock()
        self._open: dict[int, Reply] = {}
        self._to_abort: deque[int] = deque()
        self._next_id = 0
        self._failure: str | None = None
        self._failure_kind = EngineDeadError

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        streamed: bool = True,
        kept_special: frozenset[int] = frozenset(),
    ) -> Reply:
        """Queue one request; `params` must have passed `check_prompt`.

        Args:
            streamed: the caller reads deltas as they come, so the pauses between them are bounded.
            kept_special: special tokens that stay in the text.

        Raises:
            MinisglError: the driver is closed or its engine broke.
        """
        return self.submit_choices(prompt_ids, params, 1, streamed=streamed, kept_special=kept_special)[0]

    def submit_choices(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        n: int,
        *,
        streamed: bool,
        kept_special: frozenset[int] = frozenset(),
    ) -> list[Reply]:
        """Like `submit`, for `n` choices; only the first gets the prompt's log probabilities."""
        with self._lock:
            engine = self._require_engine()
            request_ids = range(self._next_id, self._next_id + n)
            self._next_id += n
            replies = [
                Reply(request_id, len(prompt_ids), self._make_text(prompt_ids, params, kept_special))
                for request_id in request_ids
            ]
            self._open.update(zip(request_ids, replies, strict=True))
            try:
                for message in add_requests(
                    request_ids, [prompt_ids], params, base_seed=self._base_seed, streamed=streamed
                ):
                    engine.add(message)
            except BaseException:
                for request_id in request_ids:
                    del self._open[request_id]
                raise
        return replies

    def wait(self, replies: Collection[Reply]) -> None:
        """Step the engine until one of `replies` is readable, or all have ended.

        Raises:
            MinisglError: the driver was closed or its engine broke.
        """
        while not any(reply.is_readable for reply in replies) and not all(reply.ended for reply in replies):
            with self._lock:
                if any(reply.is_readable for reply in replies):
                    return  # another thread stepped the engine
                engine = self._require_engine()
                if not engine.has_work:
                    raise EngineDeadError("the engine has nothing left to do but a reply is missing")
                self._step(engine)

    def abandon(self, reply: Reply) -> None:
        """Forget `reply`, and abort it in the engine if it has not ended.

        Safe at any time, even when a generator is garbage-collected in the middle of a step.
        """
        if self._open.pop(reply.request_id, None) is not None:
            self._to_abort.append(reply.request_id)
        if self._lock.acquire(blocking=False):  # otherwise its holder sends the abort
            try:
                self._abort_and_drain()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Close the engine; open replies end with an error. May be called twice."""
        with self._lock:
            engine, self._engine = self._engine, None
            for reply in list(self._open.values()):
                reply.fail(MinisglError(CLOSED))
            self._open.clear()
            if engine is not None:
                engine.close()

    def _require_engine(self) -> StepEngine:
        if self._engine is None:
            raise MinisglError(CLOSED)
        if self._failure is not None:
            what_to_do = "make a new LLM"
            if self._failure_kind is DeviceFaultError:
                what_to_do += " in a new process"
            raise self._failure_kind(f"the engine broke earlier ({self._failure}); {what_to_do}")
        return self._engine

    def _step(self, engine: StepEngine) -> None:
        """Run one engine step and deliver its outputs. The caller holds the lock.

        Raises:
            DeviceFaultError: the GPU can't be used by this process any more.
        """
        with interrupts_deferred():
            try:
                self._send_aborts(engine)
                for output in engine.step():
                    self._deliver(output)
                self._send_aborts(engine)
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"
                if isinstance(error, DeviceFaultError):
                    self._failure_kind = DeviceFaultError
                for reply in list(self._open.values()):
                    reply.fail(self._failure_kind(f"the engine broke ({self._failure})"))
                self._open.clear()
                raise

    def _deliver(self, output: RequestOutput) -> None:
        reply = self._open.get(output.request_id)
        if reply is None:
            return  # abandoned while its step was in flight
        if reply.receive(output):
            self._to_abort.append(output.request_id)
        if reply.ended:
            del self._open[output.request_id]

    def _send_aborts(self, engine: StepEngine) -> None:
        while self._to_abort:
            engine.abort(self._to_abort.popleft())

    def _abort_and_drain(self) -> None:
        """Send the aborts now and, if no reply is open, step until the engine has no work left."""
        engine = self._engine
        if engine is None or self._failure is not None:
            return
        self._send_aborts(engine)
        while not self._open and engine.has_work:
            self._step(engine)


CLOSED = "this LLM is closed"


def check_prompt(prompt_ids: list[int], params: SamplingParams, max_context_tokens: int) -> SamplingParams:
    """Check token ids from the caller's Python, then `fit_to_context`.

    Raises:
        RequestError: 400 when the prompt is empty, holds an invalid token id, or leaves no room.
    """
    for token_id in prompt_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**31:
            raise RequestError(
                400, "invalid_value", f"a prompt of tokens needs ids >= 0, got {token_id!r}", "prompt"
            )
    return fit_to_context(len(prompt_ids), params, max_context_tokens)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the block ends, so that no step is interrupted; a second press acts at once.

    Works only in the main thread under Python's own SIGINT handler; elsewhere it does nothing.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def note(signum: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
