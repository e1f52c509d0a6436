"""Sends requests to an OpenAI-compatible server and times the answers.

Promise: `send` raises no exception for a failure of a server or a network. Every request ends in an `Answer`
with times on the monotonic clock and the server's own token counts, or with one kind of error. The client
runs on one core.
"""

import asyncio
import contextlib
import errno
import resource
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from minisgl.benchmark.load.sse import AnswerStream, BadEventError, StreamedServerError, Usage
from minisgl.errors import ConfigError

CONNECT_TIMEOUT_S = 60.0
CHECK_INTERVAL_S = 1.0

ERROR_KINDS = {
    "connect": "no connection to the server",
    "client_limit": "this client may not open more connections (ulimit -n)",
    "no_answer": "the server closed the connection without an answer",
    "http": "an HTTP status other than 200, its number behind http_",
    "not_a_stream": "the answer is no stream of events",
    "bad_event": "an event is not of OpenAI's form",
    "stream_error": "the stream holds an error object",
    "truncated": "the stream ended before the answer did",
    "no_usage": "the stream ended without the usage that was asked for, so its tokens can't be counted",
    "empty_answer": "the answer has no token",
    "client_timeout": "nothing came for --timeout-s: the client gave up, the server may not be at fault",
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server, and the fields that all requests share."""

    url: str
    """Without a path, such as http://127.0.0.1:8000."""
    is_chat: bool = False
    """True: /v1/chat/completions; False: /v1/completions."""
    model: str = ""
    api_key: str | None = None
    fields: Mapping[str, Any]
    """Further fields of every request body, besides model, prompt, max_tokens and streaming."""
    timeout_s: float = 1800.0
    """The client cancels a request after this long without data from the server."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, prompt: object, max_tokens: int) -> bytes:
        """A request for `max_tokens` tokens; `prompt` is text or token ids, or messages with `is_chat`."""
        return msgspec.json.encode(
            {
                "model": self.model,
                "messages" if self.is_chat else "prompt": prompt,
                "max_tokens": max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.fields,
            }
        )


class Answer:
    """The outcome of one request; times in seconds on the monotonic clock."""

    __slots__ = ("error", "error_message", "has_assumed_usage", "sent_at", "stream")

    def __init__(self, sent_at: float, stream: AnswerStream) -> None:
        self.sent_at = sent_at
        self.stream = stream
        self.error: str | None = None
        """One of ERROR_KINDS, or http_ with the status; None = the answer is complete."""
        self.error_message = ""
        self.has_assumed_usage = False
        """The server sent no usage, and the counts are the requested ones."""

    @property
    def usage(self) -> Usage:
        """The server's counts of a complete answer."""
        assert self.stream.usage is not None
        return self.stream.usage


class Failure(Exception):
    """Ends one request with a kind of error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class LoadClient:
    """Sends requests inside one event loop; `open_client` makes it."""

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self.target = target
        self._session = session
        self._silent_since: dict[asyncio.Task[Any], float] = {}
        self._timed_out: set[asyncio.Task[Any]] = set()
        self.num_open = 0
        """Requests whose answer is not complete yet."""
        self.max_open = 0
        """The largest `num_open` so far; a caller may reset it."""

    async def find_model(self) -> str:
        """The first name in GET /v1/models.

        Raises:
            ConfigError: no OpenAI-compatible server answers there.
        """
        url = f"{self.target.url}/v1/models"
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=60)) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConfigError(
                f"no server answers at {self.target.url} ({_one_line(error)}); start one with "
                "`minisgl serve`, or name another with --url"
            ) from None
        try:
            if response.status != 200:
                raise ValueError(f"HTTP status {response.status}")
            return str(msgspec.json.decode(body)["data"][0]["id"])
        except (msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{url} does not name a model ({_one_line(error)}): {_excerpt(body)!r}; --url must be an "
                "OpenAI-compatible server's, without a path; --served-model-name leaves this out"
            ) from None

    async def send(self, body: bytes, keep_text: bool = False, assumed: Usage | None = None) -> Answer:
        """Send one request now and follow its answer to the end.

        Args:
            keep_text: keep the answer's text in `stream.text`.
            assumed: the counts to use where the server sends none; None = that is an error.
        """
        task = asyncio.current_task()
        assert task is not None
        answer = Answer(time.monotonic(), AnswerStream(self.target.is_chat, keep_text))
        self._silent_since[task] = answer.sent_at
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            with _translate_errors(answer.stream):
                await self._follow(task, body, answer, assumed)
        except Failure as failure:
            answer.error, answer.error_message = failure.kind, str(failure)
        except asyncio.CancelledError:
            if task not in self._timed_out:
                raise
            answer.error = "client_timeout"
            answer.error_message = f"nothing came for {self.target.timeout_s:g} s (--timeout-s)"
        finally:
            self.num_open -= 1
            self._timed_out.discard(task)
            del self._silent_since[task]
        return answer

    async def _follow(
        self, task: asyncio.Task[Any], body: bytes, answer: Answer, assumed: Usage | None
    ) -> None:
        now, stream = time.monotonic, answer.stream
        url = self.target.url + self.target.path
        async with self._session.post(url, data=body, allow_redirects=False) as response:
            if response.status != 200:
                raise Failure(f"http_{response.status}", _error_text(await response.content.read(65536)))
            kind = response.content_type
            if kind != "text/event-stream":
                raise Failure("not_a_stream", f"{kind}: {_excerpt(await response.content.read(65536))}")
            read = response.content.readany
            silent_since = self._silent_since
            while data := await read():
                at = now()
                silent_since[task] = at
                stream.feed(data, at)
        stream.finish()
        if stream.finish_reason is None:
            raise Failure("truncated", "the stream ended without a finish reason")
        if stream.usage is None and assumed is not None:
            stream.usage, answer.has_assumed_usage = assumed, True
        if stream.usage is None:
            raise Failure("no_usage", "the server answered stream_options.include_usage without usage")
        if stream.usage.completion_tokens == 0 or not any(stream.counts):
            raise Failure(
                "empty_answer",
                f"{stream.usage.completion_tokens} tokens in the usage, {sum(stream.counts)} in the stream",
            )

    async def cancel_silent_requests(self) -> None:
        """Cancel requests that got no data for `timeout_s`; runs until it is cancelled itself."""
        while True:
            await asyncio.sleep(min(CHECK_INTERVAL_S, self.target.timeout_s / 4))
            oldest = time.monotonic() - self.target.timeout_s
            for task, since in self._silent_since.items():
                if since < oldest and task not in self._timed_out:
                    self._timed_out.add(task)
                    task.cancel()


@contextlib.asynccontextmanager
async def open_client(target: Target) -> AsyncIterator[LoadClient]:
    """A client for the `async with` block.

    Every request opens its own connection. A server may close a kept-alive connection at the moment the
    client reuses it, and the request would then fail through no fault of the server.
    """
    key = target.api_key
    _raise_open_file_limit()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers={
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {key}"} if key is not None else {}),
        },
    ) as session:
        client = LoadClient(target, session)
        watch = asyncio.get_running_loop().create_task(client.cancel_silent_requests())
        try:
            yield client
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch


def _raise_open_file_limit() -> None:
    """Raise the limit of open files: every open request is one, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def _translate_errors(stream: AnswerStream) -> Iterator[None]:
    """Turn exceptions of the network and the stream into a Failure with one of ERROR_KINDS."""
    try:
        yield
    except StreamedServerError as error:
        raise Failure("stream_error", str(error)) from None
    except BadEventError as error:
        raise Failure("bad_event", str(error)) from None
    except aiohttp.ClientConnectorError as error:
        cause = getattr(error, "os_error", error)
        kind = "client_limit" if cause.errno in (errno.EMFILE, errno.ENFILE) else "connect"
        raise Failure(kind, _one_line(cause)) from None
    except aiohttp.ConnectionTimeoutError as error:
        raise Failure("connect", _one_line(error)) from None
    except (aiohttp.ClientError, OSError) as error:
        raise Failure("truncated" if stream.times else "no_answer", _one_line(error)) from None


def _error_text(body: bytes) -> str:
    """The message of OpenAI's error object; of another body its beginning."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError):
        return _excerpt(body)


def _excerpt(body: bytes) -> str:
    return " ".join(body[:200].decode("utf-8", "replace").split())


def _one_line(error: BaseException) -> str:
    """An exception's message on one line; its class name where it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
