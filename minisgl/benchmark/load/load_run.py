"""One run of a load against a server: who is asked when, and what came back.

Promise: in the open loop a request is sent when it is due, however many answers are missing; the turns of a
conversation follow one another; what was sent late was late by the time that is reported.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from minisgl.benchmark.client_watch import ClientWatch
from minisgl.benchmark.datasets import Conversation, Dialogue, Turn
from minisgl.benchmark.load_client import Answer, LoadClient
from minisgl.benchmark.sse import Usage

PREPARED = 64
"""Requests that are kept ready, because traces have many arrivals at the same instant."""


class Load(NamedTuple):
    """How hard a server is pressed: one of the two is not None."""

    arrivals_s: Sequence[float] | None
    """Open loop: when each conversation begins, from the start of the run."""
    concurrency: int | None
    """Closed loop: how many conversations go on at a time."""


class Prepared(NamedTuple):
    """A conversation that may begin."""

    place: int
    dialogue: Dialogue
    body: bytes  # of the first turn's request


class Sent(NamedTuple):
    """A request that was sent."""

    conversation: int
    number: int  # of the turn in its conversation, from 0
    turn: Turn
    due_at: float | None  # monotonic clock, as all times; None in the closed loop
    answer: Answer


class Run(NamedTuple):
    """What happened."""

    sent: list[Sent]  # in the order of their ends
    num_skipped: int  # turns that were not sent, because an earlier one of their conversation failed
    max_open: int
    watch: ClientWatch


async def run_load(
    client: LoadClient,
    conversations: Sequence[Conversation],
    load: Load,
    *,
    new_dialogue: Callable[[], Dialogue],
    think_time_s: float = 0.0,
    assume_usage: bool = False,
    on_answer: Callable[[int], None] = lambda num_over: None,
) -> Run:
    """Have all conversations and wait for the last answer.

    Args:
        assume_usage: a server that sends no usage is taken to count what was made up and asked for.
        on_answer: hears how many requests are over.
    """
    sent: list[Sent] = []
    num_skipped = 0
    client.max_open = 0

    async def converse(prepared: Prepared, due_at: float | None) -> None:
        """All turns of a conversation."""
        nonlocal num_skipped
        place, dialogue, body = prepared
        num_tokens = 0  # of all that was said, as far as it is known
        turns = conversations[place].turns
        for number, turn in enumerate(turns):
            if number:
                await asyncio.sleep(think_time_s)
                body = _body(client, dialogue, turn)
            num_left = len(turns) - number - 1
            num_tokens += turn.num_prompt_tokens or 0
            assumed = Usage(num_tokens, turn.num_output_tokens) if assume_usage else None
            answer = await client.send(body, num_left > 0, assumed)
            num_tokens += turn.num_output_tokens
            sent.append(Sent(place, number, turn, due_at, answer))
            due_at = None  # later turns are due when the earlier ones are answered
            if answer.error is not None:
                num_skipped += num_left
            on_answer(len(sent) + num_skipped)
            if answer.error is not None:
                return
            dialogue.hear(answer.stream.text)

    def prepare(place: int) -> Prepared:
        dialogue = new_dialogue()
        return Prepared(place, dialogue, _body(client, dialogue, conversations[place].turns[0]))

    async def keep_time(arrivals_s: Sequence[float]) -> None:
        later = iter(sorted(range(len(conversations)), key=arrivals_s.__getitem__))
        ready = deque(map(prepare, islice(later, PREPARED)))
        start = time.monotonic()
        while ready:
            first = ready.popleft()
            due_at = start + arrivals_s[first.place]
            while (not ready or time.monotonic() < due_at) and len(ready) < PREPARED:
                place = next(later, None)
                if place is None:
                    break
                ready.append(prepare(place))
                await asyncio.sleep(0)  # answers come in between
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            tasks.append(asyncio.ensure_future(converse(first, due_at)))

    async def keep_busy(places: Iterator[int]) -> None:
        for place in places:
            await converse(prepare(place), None)

    tasks: list[asyncio.Task[None]] = []
    async with ClientWatch() as watch:
        try:
            if load.arrivals_s is not None:
                await keep_time(load.arrivals_s)
            else:
                assert load.concurrency is not None
                places = iter(range(len(conversations)))
                tasks += [asyncio.ensure_future(keep_busy(places)) for _ in range(load.concurrency)]
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return Run(sent, num_skipped, client.max_open, watch)


def _body(client: LoadClient, dialogue: Dialogue, turn: Turn) -> bytes:
    return client.target.body(dialogue.ask(turn), turn.num_output_tokens)
