"""POST /generate, with the bodies of mini-sglang (`prompt`) and of SGLang (`text` or `input_ids`).

Promise: a body is one of the two. SGLang's answers are in `native_generate`; mini-sglang's are plain text.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from minisgl.replies.conversation import EncodedCall
from minisgl.replies.plan import ReplyPlan
from minisgl.request import SamplingParams
from minisgl.server.apis.completions import Text, encode_prompt
from minisgl.server.apis.native_generate import (
    EITHER_BODY,
    NATIVE_OTHERS,
    NativeAnswer,
    NativeCall,
    NativeFields,
    native_call,
)
from minisgl.server.calls.call import CallContext, CallOptions, sse
from minisgl.server.calls.call_fields import AtLeastOne
from minisgl.server.calls.completer import Completer
from minisgl.server.calls.openai_answer import DONE, failure
from minisgl.server.http.bodies import Body
from minisgl.server.http.errors import Fault
from minisgl.server.http.routes import EVENTS, JSON, Answer, Route
from minisgl.server.open_choices import Delta
from minisgl.server.served_model import ServedModel


def routes(completer: Completer) -> list[Route]:
    """The route of this API."""
    return [
        Route(
            "POST",
            "/generate",
            "Continue a text: SGLang's fields, or mini-sglang's prompt, max_tokens and ignore_eos.",
            partial(completer.answer, parse=parse_generate),
            Answer(
                "Of text or input_ids: the answer, or its events when stream is true. Of a prompt: one event "
                "for each new piece of text, then [DONE].",
                NativeAnswer,
                (JSON, EVENTS),
                or_list=True,
            ),
            GENERATE,
        )
    ]


class GenerateFields(Struct, frozen=True):
    """POST /generate, as in mini-sglang: a `prompt`, continued greedily and streamed as plain text."""

    prompt: Text | None = None
    max_tokens: AtLeastOne | None = None
    """Only with a prompt, which needs it."""
    ignore_eos: bool | None = None
    """Only with a prompt."""


GENERATE = Body("GenerateBody", (GenerateFields, NativeFields), EITHER_BODY, NATIVE_OTHERS)


class GenerateCall(NamedTuple):
    """A parsed call."""

    prompt: str
    options: CallOptions
    prompt_field: str = "prompt"
    num_prompts: int = 1

    def encode(self, model: ServedModel, max_context_tokens: int) -> EncodedCall:
        """See `Call`."""
        params = self.options.params
        prompt = encode_prompt(self.prompt, params, model, max_context_tokens)
        return EncodedCall([prompt], ReplyPlan(params))

    def answer_format(self, encoded: EncodedCall, context: CallContext) -> "PlainTextFormat":
        """See `Call`."""
        return PlainTextFormat()


def parse_generate(body: bytes, model: ServedModel) -> GenerateCall | NativeCall:
    """Parse a body of POST /generate.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    fields, native = GENERATE.read(body)
    if fields.prompt is None:
        return native_call(native, model)
    params = SamplingParams(max_tokens=fields.max_tokens, temperature=0.0, ignore_eos=bool(fields.ignore_eos))
    return GenerateCall(fields.prompt, CallOptions(params, stream=True))


class PlainTextFormat:
    """Writes the bare text as events, one `data:` line per line of text."""

    is_slow = False

    def whole(self, choices: Sequence[Delta]) -> bytes:
        """The text of the only choice."""
        return choices[0].text.encode()

    def opening(self, num_choices: int) -> bytes:
        """No events."""
        return b""

    def piece(self, delta: Delta) -> bytes:
        """The event of new text."""
        return sse(b"\ndata: ".join(delta.text.encode().split(b"\n"))) if delta.text else b""

    def ending(self) -> bytes:
        """The final event, [DONE]."""
        return DONE

    def failure(self, fault: Fault) -> bytes:
        """An event with OpenAI's error object."""
        return failure(fault)
