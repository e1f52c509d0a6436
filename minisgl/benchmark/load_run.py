"""One run of a load against a server: who is asked when, and what came back.

Promise: in the open loop a request is sent when it is due, however many answers are missing; the turns of a
conversation follow one another; what was sent late was late by the time that is reported.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from minisgl.benchmark.client_watch import ClientWatch
from minisgl.benchmark.datasets import Conversation, Dialogue, Turn
from minisgl.benchmark.load_client import Answer, LoadClient

PREPARED = 64
"""Requests that are kept ready, because traces have many arrivals at the same instant."""


class Load(NamedTuple):
    """How hard a server is pressed: one of the two is not None."""

    arrivals_s: Sequence[float] | None
    """Open loop: when each conversation begins, from the start of the run."""
    concurrency: int | None
    """Closed loop: how many conversations go on at a time."""


Prepared = tuple[int, Dialogue, bytes]
"""A conversation's place, and its first request."""


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
    on_answer: Callable[[int], None] = lambda num_over: None,
) -> Run:
    """Have all conversations and wait for the last answer; `on_answer` hears how many requests are over."""
    sent: list[Sent] = []
    num_skipped = 0
    client.max_open = 0

    async def converse(place: int, dialogue: Dialogue, body: bytes, due_at: float | None) -> None:
        """All turns of a conversation; `body` is the first one's request."""
        nonlocal num_skipped
        turns = conversations[place].turns
        for number, turn in enumerate(turns):
            if number:
                await asyncio.sleep(think_time_s)
                body = _body(client, dialogue, turn)
            num_left = len(turns) - number - 1
            answer = await client.send(body, keep_text=num_left > 0)
            sent.append(Sent(place, number, turn, due_at, answer))
            due_at = None  # later turns are due when the earlier ones are answered
            if answer.error is not None:
                num_skipped += num_left
            on_answer(len(sent) + num_skipped)
            if answer.error is not None:
                return
            dialogue.hear(answer.stream.text)

    def prepare(place: int) -> tuple[Dialogue, bytes]:
        dialogue = new_dialogue()
        return dialogue, _body(client, dialogue, conversations[place].turns[0])

    async def prepare_in_order(arrivals_s: Sequence[float], ready: "asyncio.Queue[Prepared]") -> None:
        for place in sorted(range(len(conversations)), key=arrivals_s.__getitem__):
            await ready.put((place, *prepare(place)))
            await asyncio.sleep(0)  # answers come in between

    async def keep_time(arrivals_s: Sequence[float]) -> None:
        ready: asyncio.Queue[Prepared] = asyncio.Queue(PREPARED)
        tasks.append(asyncio.ensure_future(prepare_in_order(arrivals_s, ready)))
        while not (ready.full() or tasks[0].done()):
            await asyncio.sleep(0)
        start = time.monotonic()
        for _ in conversations:
            place, dialogue, body = await ready.get()
            due_at = start + arrivals_s[place]
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            tasks.append(asyncio.ensure_future(converse(place, dialogue, body, due_at)))

    async def keep_busy(places: Iterator[int]) -> None:
        for place in places:
            await converse(place, *prepare(place), None)

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
