"""One run of a load against a server: sends the requests and collects the answers.

Promise: in the open loop, a request is sent when it is due, however many answers are outstanding. A turn is
sent after the answer to the turn before it. A late request's delay is its `sent_at` minus its `due_at`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from minisgl.benchmark.load.client_watch import ClientWatch
from minisgl.benchmark.load.datasets import Conversation, Dialogue, Turn
from minisgl.benchmark.load.load_client import Answer, LoadClient
from minisgl.benchmark.load.sse import Usage

PREPARED = 64
"""Requests to prepare in advance, because traces have many arrivals at the same instant."""


class Load(NamedTuple):
    """The load on a server; exactly one of the two fields is not None."""

    arrivals_s: Sequence[float] | None
    """Open loop: seconds from the start of the run until each conversation begins."""
    concurrency: int | None
    """Closed loop: number of conversations at a time."""


class PreparedConversation(NamedTuple):
    """A conversation whose first request is ready."""

    place: int
    dialogue: Dialogue
    body: bytes  # of the first turn's request


class SentRequest(NamedTuple):
    """A request that was sent."""

    conversation: int
    number: int  # index of the turn in its conversation, from 0
    turn: Turn
    due_at: float | None  # on the monotonic clock; None in the closed loop
    answer: Answer


class LoadRun(NamedTuple):
    """The outcome of a run."""

    sent: list[SentRequest]  # in the order in which they ended
    num_skipped: int  # turns not sent, because an earlier turn of their conversation failed
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
) -> LoadRun:
    """Run all conversations and wait for the last answer.

    Args:
        assume_usage: where a server sends no usage, use the tokens of the synthetic prompts and the requested
            output tokens.
        on_answer: called with the number of requests that have ended.
    """
    sent: list[SentRequest] = []
    num_skipped = 0
    client.max_open = 0

    async def converse(prepared: PreparedConversation, due_at: float | None) -> None:
        """Send all turns of one conversation, one after another."""
        nonlocal num_skipped
        place, dialogue, body = prepared
        num_tokens = 0  # of the conversation so far; texts from files count as 0
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
            sent.append(SentRequest(place, number, turn, due_at, answer))
            due_at = None  # later turns are due when the earlier ones are answered
            if answer.error is not None:
                num_skipped += num_left
            on_answer(len(sent) + num_skipped)
            if answer.error is not None:
                return
            dialogue.add_answer(answer.stream.text)

    def prepare(place: int) -> PreparedConversation:
        dialogue = new_dialogue()
        return PreparedConversation(place, dialogue, _body(client, dialogue, conversations[place].turns[0]))

    async def run_open_loop(arrivals_s: Sequence[float]) -> None:
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
                await asyncio.sleep(0)  # lets the event loop read answers
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))
            tasks.append(asyncio.ensure_future(converse(first, due_at)))

    async def run_closed_loop(places: Iterator[int]) -> None:
        for place in places:
            await converse(prepare(place), None)

    tasks: list[asyncio.Task[None]] = []
    async with ClientWatch() as watch:
        try:
            if load.arrivals_s is not None:
                await run_open_loop(load.arrivals_s)
            else:
                assert load.concurrency is not None
                places = iter(range(len(conversations)))
                tasks += [asyncio.ensure_future(run_closed_loop(places)) for _ in range(load.concurrency)]
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return LoadRun(sent, num_skipped, client.max_open, watch)


def _body(client: LoadClient, dialogue: Dialogue, turn: Turn) -> bytes:
    return client.target.body(dialogue.next_prompt(turn), turn.num_output_tokens)
