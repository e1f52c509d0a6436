"""POST /generate, as in mini-sglang: greedy decoding, streamed as plain text."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from minisgl.replies.conversation import EncodedCall
from minisgl.replies.plan import ReplyPlan
from minisgl.request import SamplingParams
from minisgl.server.apis.completions import Text, encode_prompt
from minisgl.server.calls.call import CallContext, CallOptions, sse
from minisgl.server.calls.call_fields import AtLeastOne
from minisgl.server.calls.completer import Completer
from minisgl.server.calls.openai_answer import DONE, failure
from minisgl.server.http.bodies import Body
from minisgl.server.http.errors import Fault
from minisgl.server.http.routes import EVENTS, Answer, Route
from minisgl.server.open_choices import Delta
from minisgl.server.served_model import ServedModel


def routes(completer: Completer) -> list[Route]:
    """The route of this API."""
    return [
        Route(
            "POST",
            "/generate",
            "Continue a text, greedily, as a stream of text.",
            partial(completer.answer, parse=parse_generate),
            Answer("One event for each new piece of text, then [DONE].", media_types=(EVENTS,)),
            GENERATE,
        )
    ]


class GenerateFields(Struct, frozen=True):
    """POST /generate, as in mini-sglang."""

    prompt: Text
    max_tokens: AtLeastOne
    ignore_eos: bool | None = None


GENERATE = Body("GenerateBody", (GenerateFields,))


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


def parse_generate(body: bytes, model: ServedModel) -> GenerateCall:
    """Parse a body of POST /generate.

    Raises:
        RequestError: 400 that names the invalid field.
    """
    fields: GenerateFields = GENERATE.read(body)[0]
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
