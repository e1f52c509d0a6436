"""What an API that generates text consists of: a parsed call, and the format of its answer.

Promise: a new API is one file with its fields, a `Call` and an `AnswerFormat`. `completer.Completer` does
what all APIs share.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from minisgl.replies.conversation import EncodedCall
from minisgl.request import SamplingParams
from minisgl.server.http.errors import Fault
from minisgl.server.open_choices import Delta
from minisgl.server.served_model import ServedModel
from minisgl.text.tokenizer import Tokenizer


class CallOptions(NamedTuple):
    """The options of a call: everything in its body except the prompt and what its API alone has."""

    params: SamplingParams
    model: str | None = None  # None: the served model
    stream: bool = False
    n: int = 1
    priority: int | None = None  # None: that of the caller's key
    cache_salt: str = ""


class Usage(NamedTuple):
    """Token counts of a call. A prompt counts once, whatever the number of its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class CallContext(NamedTuple):
    """What the writer of an answer knows of the call, besides its body."""

    tokenizer: Tokenizer
    model_name: str
    request_id: str
    usage: Callable[[], Usage]
    """The usage so far."""


class AnswerFormat(Protocol):
    """Writes the answer of one call, whole or as server-sent events.

    `is_slow`: more is done for each token than to copy its text, so many tokens are written in a thread.
    """

    is_slow: bool

    def whole(self, choices: Sequence[Delta]) -> bytes:
        """The body of the whole answer. Each choice is one delta with all its tokens.

        The choices of the first prompt come first.
        """
        ...

    def opening(self, num_choices: int) -> bytes:
        """The events before any text. They are made before the first delta's, and sent with them."""
        ...

    def piece(self, delta: Delta) -> bytes:
        """The events of a delta; may be empty."""
        ...

    def ending(self) -> bytes:
        """The events after the last delta."""
        ...

    def failure(self, fault: Fault) -> bytes:
        """The events of an error after the first event; nothing follows them."""
        ...


class Call(Protocol):
    """A parsed call of one API. `prompt_field` names the prompt in errors."""

    @property
    def options(self) -> CallOptions: ...
    @property
    def prompt_field(self) -> str: ...
    @property
    def num_prompts(self) -> int: ...

    def encode(self, model: ServedModel, max_context_tokens: int) -> EncodedCall:
        """The token ids of each prompt.

        Raises:
            RequestError: 400 at the first prompt that is invalid or too long, or if no grammar can be made.
        """
        ...

    def answer_format(self, encoded: EncodedCall, context: CallContext) -> AnswerFormat:
        """The writer of the answer.

        Raises:
            RequestError: 400 if the answer would be too large.
        """
        ...


def sse(data: bytes, name: str = "") -> bytes:
    """One server-sent event; with a `name` it has an `event:` line."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
