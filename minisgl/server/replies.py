"""Encodes the OpenAI API's answers as JSON: whole answers, stream chunks and errors.

Promise: every field that OpenAI's clients read is present, with OpenAI's name and type.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.server.choice_details import ExtraFields

DONE = b"data: [DONE]\n\n"
RETRY_AFTER_S = 2
RETRYABLE = (429, 503)
CHAT_ID = "chatcmpl-"
COMPLETION_ID = "cmpl-"


class Usage(msgspec.Struct):
    """Token counts. Each prompt counts once, whatever the number of its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """The `usage` object in OpenAI's format."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


NO_FIELDS = ExtraFields({}, {})


class Choice(NamedTuple):
    """One choice of a whole answer."""

    text: str
    finish_reason: str
    fields: ExtraFields = NO_FIELDS


class OpenAIFormat:
    """Encodes the answers of one endpoint.

    Args:
        chat: True for /v1/chat/completions, False for /v1/completions.
        model: the model's name in the answer.
        request_id: id of the HTTP call, part of the answer's id.
        include_usage: whether a stream ends with a usage chunk; all its other chunks have `usage: null`.
        usage_so_far: gives the usage to put into every chunk; None = chunks have no running usage.
    """

    def __init__(
        self,
        chat: bool,
        model: str,
        request_id: str,
        include_usage: bool = False,
        usage_so_far: Callable[[], Usage] | None = None,
    ) -> None:
        self._chat = chat
        self._include_usage = include_usage
        self._usage_so_far = usage_so_far
        self._head = {
            "id": (CHAT_ID if chat else COMPLETION_ID) + request_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._chunk_head = {**self._head, "object": "chat.completion.chunk" if chat else "text_completion"}
        self._encode = msgspec.json.Encoder().encode

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer of `stream: false`."""
        return self._encode(
            {
                **self._head,
                "choices": [
                    {
                        "index": index,
                        **(
                            {"message": {"role": "assistant", "content": text, "refusal": None}}
                            if self._chat
                            else {"text": text}
                        ),
                        "logprobs": None,
                        "finish_reason": reason,
                        **fields.choice,
                    }
                    for index, (text, reason, fields) in enumerate(choices)
                ],
                "usage": usage.as_json(),
                **choices[0].fields.call,
            }
        )

    def opening(self, num_choices: int) -> bytes:
        """The events before any text: in a chat, one with the role for each choice."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._event(index, {"delta": delta}, None) for index in range(num_choices))

    def piece(
        self, index: int, text: str, finish_reason: str | None, fields: ExtraFields = NO_FIELDS
    ) -> bytes:
        """The events for new text or fields and for the end of a choice; empty if there is neither."""
        is_news = bool(text) or fields is not NO_FIELDS
        if not self._chat:
            if not is_news and finish_reason is None:
                return b""
            return self._event(index, {"text": text}, finish_reason, fields)
        events = self._event(index, {"delta": {"content": text}}, None, fields) if is_news else b""
        return events if finish_reason is None else events + self._event(index, {"delta": {}}, finish_reason)

    def ending(self, usage: Usage) -> bytes:
        """The final events: the usage chunk if requested, then [DONE]."""
        if not self._include_usage:
            return DONE
        return sse(self._encode({**self._chunk_head, "choices": [], "usage": usage.as_json()})) + DONE

    def _event(
        self, index: int, content: dict[str, Any], finish_reason: str | None, fields: ExtraFields = NO_FIELDS
    ) -> bytes:
        choice = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": finish_reason,
            **fields.choice,
        }
        chunk = {**self._chunk_head, "choices": [choice], **fields.call}
        if self._usage_so_far is not None:
            chunk["usage"] = self._usage_so_far().as_json()
        elif self._include_usage:
            chunk["usage"] = None
        return sse(self._encode(chunk))


class PlainTextFormat:
    """Encodes the events of /generate: the bare text, one `data:` line per line of text."""

    def opening(self, num_choices: int) -> bytes:
        """No events."""
        return b""

    def piece(
        self, index: int, text: str, finish_reason: str | None, fields: ExtraFields = NO_FIELDS
    ) -> bytes:
        """The event of new text."""
        return sse(b"\ndata: ".join(text.encode().split(b"\n"))) if text else b""

    def ending(self, usage: Usage) -> bytes:
        """The final event, [DONE]."""
        return DONE


def sse(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_body(status: int, code: str | None, message: str, param: str | None = None) -> bytes:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_of(error: Exception) -> tuple[int, bytes]:
    """HTTP status and body for an exception. Exceptions that are not ours show no details."""
    if isinstance(error, RequestError):
        return error.status, error_body(error.status, error.code, error.message, error.param)
    if isinstance(error, EngineDeadError):
        return 503, error_body(503, "engine_dead", str(error))
    if isinstance(error, MinisglError):
        return 500, error_body(500, "internal_error", str(error))
    return 500, error_body(500, "internal_error", "internal error; the server's log has the details")
