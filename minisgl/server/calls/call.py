"""What an API that generates text consists of: a parsed call, and the format of its answer.

Promise: a new API is one file with its fields, a `Call` and an `AnswerFormat`. `completer.Completer` does
what all APIs share.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from minisgl.request import SamplingParams
from minisgl.server.calls.reply_plan import ReplyPlan, check_callable, plan_reply
from minisgl.server.calls.tools import NO_TOOLS, AskedTools
from minisgl.server.http.errors import Fault
from minisgl.server.open_choices import Delta
from minisgl.server.served_model import ServedModel
from minisgl.text.literals import hide_special_tokens, restored
from minisgl.text.tokenizer import Tokenizer


class CallOptions(NamedTuple):
    """The options of a call: everything in its body except the prompt and what its API alone has."""

    params: SamplingParams
    model: str | None = None  # None: the served model
    stream: bool = False
    n: int = 1
    priority: int = 0
    cache_salt: str = ""


class Truncation(NamedTuple):
    """Shortens prompts that are too long."""

    max_tokens: int
    """Tokens that are kept; -1: as many as the context has beside the output."""
    side: Literal["left", "right"] = "left"
    """Where tokens are dropped."""

    def cut(self, token_ids: list[int], params: SamplingParams, max_context_tokens: int) -> list[int]:
        """What is left of a prompt."""
        room = self.max_tokens
        if room == -1:
            room = max(max_context_tokens - max(params.max_tokens or 1, 1), 1)
        return token_ids[-room:] if self.side == "left" else token_ids[:room]


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


class EncodedCall(NamedTuple):
    """The prompts of a call as token ids, and how their replies are made and read."""

    prompts: Sequence[Sequence[int]]
    plan: ReplyPlan


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


class Conversation(NamedTuple):
    """Messages and all that makes a prompt and the plan for its replies of them."""

    messages: list[dict[str, Any]]  # from `normalize_messages`
    asked: AskedTools = NO_TOOLS
    template_variables: Mapping[str, Any] = {}  # never changed
    add_generation_prompt: bool = True
    field: str = "messages"  # names the prompt in errors
    truncation: Truncation | None = None
    continue_final_message: bool = False  # the prompt ends inside of the last message

    def encode(self, model: ServedModel, max_context_tokens: int, params: SamplingParams) -> EncodedCall:
        """The prompt, and how its replies are made and read. A template adds special tokens itself.

        Raises:
            RequestError: 400; the template refuses the messages, the prompt is far too long, the model can't
                be given tools, or no grammar can be made.
        """
        limit = max_context_tokens if self.truncation is None else None
        text, ids = self.render(model, limit)
        plan = plan_reply(model, text, params, self.asked)
        if self.truncation is not None:
            ids = self.truncation.cut(ids, params, max_context_tokens)
        return EncodedCall([ids], plan)

    def render(
        self, model: ServedModel, max_tokens: int | None, add_special_tokens: bool = False
    ) -> tuple[str, list[int]]:
        """The prompt and its token ids.

        Args:
            max_tokens: a text with far more tokens is refused before all of it is tokenized; None: never.

        Raises:
            RequestError: 400; the template refuses the messages, the prompt is far too long, or the model
                can't be given tools.
        """
        check_callable(model, self.asked)
        messages, literals = self.messages, {}
        if model.special_tokens is not None:
            messages, literals = hide_special_tokens(messages, model.special_tokens)
        text = model.template.render(
            messages,
            self.add_generation_prompt,
            self.template_variables,
            self.asked.for_template,
            self.continue_final_message,
        )
        ids = model.tokenizer.encode(
            text, add_special_tokens, max_tokens=max_tokens, param=self.field, literals=literals
        )
        return restored(text, literals), ids


def sse(data: bytes, name: str = "") -> bytes:
    """One server-sent event; with a `name` it has an `event:` line."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
