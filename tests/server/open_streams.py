"""An open table of requests for tests, with a list in place of the engine."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from small_model import CONTEXT

from minisgl.errors import EngineDeadError
from minisgl.ipc.messages import AbortRequest, AddRequest, StepOutput, ToEngine
from minisgl.request import RequestOutput, SamplingParams
from minisgl.server.open_choices import Delta
from minisgl.server.streams import Stream, Streams
from minisgl.text.tokenizer import Tokenizer

PARAMS = SamplingParams(max_tokens=50)


class Wire:
    """Where the streams's messages go: a list, until it is cut."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.is_cut = False

    def send(self, message: ToEngine) -> None:
        if self.is_cut:
            raise EngineDeadError("cut")
        self.sent.append(message)

    def added(self) -> list[AddRequest]:
        return [message for message in self.sent if isinstance(message, AddRequest)]

    def aborted(self) -> list[int]:
        return [message.request_id for message in self.sent if isinstance(message, AbortRequest)]


def run(
    tokenizer: Tokenizer,
    scenario: Callable[[Streams, Wire], Coroutine[Any, Any, None]],
    max_open: int = 10,
    timeout_s: float = 60.0,
    max_queued_tokens: int | None = None,
) -> None:
    """Run `scenario` with a welcoming streams; afterwards nothing may be left in it."""

    async def main() -> None:
        wire = Wire()
        streams = Streams(wire.send, tokenizer, max_open, timeout_s, max_queued_tokens=max_queued_tokens)
        streams.accept_requests(CONTEXT)
        await scenario(streams, wire)
        assert_empty(streams)

    asyncio.run(main())


def assert_empty(streams: Streams) -> None:
    assert streams.num_open == 0
    assert streams.num_running == 0
    assert streams.stats.num_queued_tokens == 0
    assert not streams._open_streams


def step(streams: Streams, *outputs: RequestOutput) -> None:
    streams.deliver(StepOutput(list(outputs)))


def figures(deltas: list[Delta]) -> list[tuple[int, str, int, int, str | None]]:
    """Choice, text, tokens, cached tokens and end of each delta."""
    assert all(len(delta.token_ids) == delta.num_tokens for delta in deltas)
    return [delta[:5] for delta in deltas]


async def read(stream: Stream, into: list[Delta] | None = None) -> list[Delta]:
    """All deltas; those before an error are found in `into`."""
    into = [] if into is None else into
    async for delta in stream.deltas():
        into.append(delta)
    return into


async def submit(
    stream: Stream, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int = 1
) -> None:
    """Prepare a call and send it."""
    await stream.submit(stream.prepare(prompts, params, n))
