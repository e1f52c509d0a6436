"""An engine driven in the caller's process: requests go in, and every reply gets its own text back.

Promise: whoever steps the engine, an output reaches the reply it belongs to and no other; a reply that
nobody wants any more is aborted and leaves nothing behind. Torch-free; the engine is handed in.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.messages import AddRequest
from minisgl.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs, fit_to_context
from minisgl.text.reply import ReplyText


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What one step added to a reply. The one with a `finish_reason` is the last."""

    text: str
    """New text; may be empty while a character or a possible stop string is incomplete."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, where asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token of the prompt but the first, where asked for; with the first delta."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A whole reply."""

    text: str
    """Without the stop string that ended it."""
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


class StepEngine(Protocol):
    """The part of `minisgl.engine.engine.Engine` that is used here."""

    @property
    def max_context_tokens(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: AddRequest, /) -> None: ...
    def abort(self, request_id: int, /) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def close(self) -> None: ...


class Reply:
    """One open request as its caller sees it: deltas to read, then an end or an error."""

    def __init__(self, request_id: int, num_prompt_tokens: int, text: ReplyText) -> None:
        self.request_id = request_id
        self.ended = False
        self._error: MinisglError | None = None
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._text = text
        self._unread: deque[Delta] = deque()

    @property
    def has_news(self) -> bool:
        """Whether `read` would return or raise something."""
        return bool(self._unread) or self._error is not None

    def read(self) -> list[Delta]:
        """The deltas that arrived since the last call.

        Raises:
            RequestError: the engine refused the request.
            MinisglError: the engine was closed meanwhile.
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

    def take(self, output: RequestOutput) -> None:
        """Turn the engine's tokens into text; a stop string ends the reply before the engine does."""
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason is FinishReason.ERROR:
            self.fail(
                RequestError(
                    output.error_status or 500,
                    output.error_code or "internal_error",
                    output.error_message or "the engine failed on this request",
                    output.error_param,
                )
            )
            return
        finish_reason = output.finish_reason
        if finish_reason is None:
            piece = self._text.push(output.token_ids)
        else:
            piece = self._text.finish(output.token_ids, drop_last=finish_reason is FinishReason.STOP)
        if piece.stopped:
            finish_reason = FinishReason.STOP
        self.ended = finish_reason is not None
        self._unread.append(
            Delta(
                text=piece.text,
                token_ids=tuple(output.token_ids[: piece.num_tokens]),
                finish_reason=finish_reason,
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
                logprobs=None if output.logprobs is None else tuple(output.logprobs[: piece.num_tokens]),
                prompt_logprobs=None if output.prompt_logprobs is None else tuple(output.prompt_logprobs),
            )
        )


class OfflineDriver:
    """Submits requests to an engine and steps it whenever somebody waits for a reply.

    Several threads may share it on cpu: each waits for its own replies and steps for all. A compiled
    engine on cuda wants one thread, the one it was built in.
    """

    def __init__(
        self, engine: StepEngine, new_text: Callable[[Sequence[int], SamplingParams], ReplyText]
    ) -> None:
        self._engine: StepEngine | None = engine
        self._new_text = new_text
        self.max_context_tokens = engine.max_context_tokens
        self._lock = threading.Lock()
        self._open: dict[int, Reply] = {}
        self._unwanted: deque[int] = deque()
        self._next_id = 0
        self._failure: str | None = None

    def submit(self, prompt_ids: list[int], params: SamplingParams, *, streamed: bool = True) -> Reply:
        """Queue one request; `params` must have passed `check_prompt`.

        Args:
            streamed: its deltas are read as they come, so the pauses between them are to be bounded.

        Raises:
            MinisglError: the driver is closed or its engine broke.
        """
        with self._lock:
            engine = self._living_engine()
            request_id = self._next_id
            self._next_id += 1
            reply = Reply(request_id, len(prompt_ids), self._new_text(prompt_ids, params))
            self._open[request_id] = reply
            try:
                engine.add(
                    AddRequest(
                        request_id=request_id,
                        prompt_ids=np.asarray(prompt_ids, dtype="<i4").tobytes(),
                        params=params,
                        streamed=streamed,
                    )
                )
            except BaseException:
                del self._open[request_id]
                raise
        return reply

    def wait(self, replies: Collection[Reply]) -> None:
        """Step the engine until one of `replies` has news; returns at once if one has or all have ended.

        Raises:
            MinisglError: the driver was closed or its engine broke.
        """
        while not any(reply.has_news for reply in replies) and not all(reply.ended for reply in replies):
            with self._lock:
                if any(reply.has_news for reply in replies):
                    return  # another thread's step brought it
                engine = self._living_engine()
                if not engine.has_work:
                    raise EngineDeadError("the engine has nothing left to do but a reply is missing")
                self._step(engine)

    def abandon(self, reply: Reply) -> None:
        """Forget `reply`, and abort it in the engine if it has not ended.

        Safe at any moment, also from a generator that is collected in the middle of a step.
        """
        if self._open.pop(reply.request_id, None) is not None:
            self._unwanted.append(reply.request_id)
        if self._lock.acquire(blocking=False):  # else: who holds it applies it before the next step
            try:
                self._settle()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Let go of the engine; open replies end with an error. May be called twice."""
        with self._lock:
            engine, self._engine = self._engine, None
            for reply in list(self._open.values()):
                reply.fail(MinisglError(CLOSED))
            self._open.clear()
            if engine is not None:
                engine.close()

    def _living_engine(self) -> StepEngine:
        if self._engine is None:
            raise MinisglError(CLOSED)
        if self._failure is not None:
            raise EngineDeadError(f"the engine broke earlier ({self._failure}); make a new LLM")
        return self._engine

    def _step(self, engine: StepEngine) -> None:
        """One engine step and its outputs to their replies. Under the lock."""
        with interrupts_deferred():
            try:
                self._abort_unwanted(engine)
                for output in engine.step():
                    self._deliver(output)
                self._abort_unwanted(engine)
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"
                for reply in list(self._open.values()):
                    reply.fail(EngineDeadError(f"the engine broke ({self._failure})"))
                self._open.clear()
                raise

    def _deliver(self, output: RequestOutput) -> None:
        reply = self._open.get(output.request_id)
        if reply is None:
            return  # abandoned while its step was in flight
        reply.take(output)
        if reply.ended:
            del self._open[output.request_id]
            if output.finish_reason is None:  # a stop string matched; the engine would go on
                self._unwanted.append(output.request_id)

    def _abort_unwanted(self, engine: StepEngine) -> None:
        while self._unwanted:
            engine.abort(self._unwanted.popleft())

    def _settle(self) -> None:
        """Apply aborts now and, if nobody waits for anything, let the engine free what they held."""
        engine = self._engine
        if engine is None or self._failure is not None:
            return
        self._abort_unwanted(engine)
        while not self._open and engine.has_work:
            self._step(engine)


CLOSED = "this LLM is closed"


def check_prompt(prompt_ids: list[int], params: SamplingParams, max_context_tokens: int) -> SamplingParams:
    """`fit_to_context`, for token ids that come from the caller's Python.

    Raises:
        RequestError: 400 when the prompt is empty, has something that is no token id, or leaves no room.
    """
    for token_id in prompt_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**31:
            raise RequestError(
                400, "invalid_value", f"a prompt of tokens needs ids >= 0, got {token_id!r}", "prompt"
            )
    return fit_to_context(len(prompt_ids), params, max_context_tokens)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, so that no engine step is torn; pressed twice, it doesn't.

    Only where Ctrl-C means KeyboardInterrupt (the main thread under Python's own handler).
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
