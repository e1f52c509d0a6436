"""A call on its way to the engine: checked, numbered and counted as a whole, sent in slices."""

import asyncio
from array import array
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from open_streams import PARAMS, Wire, read, run, step, submit
from small_model import CONTEXT, make_folder

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.ipc.messages import SLICE_BYTES, SLICE_REQUESTS, AddRequest
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.seeds import request_seed
from minisgl.server import open_choices
from minisgl.server.open_choices import Delta
from minisgl.server.streams import Stream, Streams
from minisgl.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_folder(tmp_path_factory.mktemp("model")))


def test_too_long_is_a_400_and_max_tokens_are_clamped(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        for length in (CONTEXT, CONTEXT + 1):
            with streams.open(1) as stream, pytest.raises(RequestError) as caught:
                await submit(stream, [[1] * length], PARAMS)
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        with streams.open(1) as stream, pytest.raises(RequestError, match="empty"):
            await submit(stream, [[]], PARAMS)
        assert wire.sent == []
        for max_tokens, length, sent in (
            (50, CONTEXT - 1, 1),
            (None, 6, CONTEXT - 6),
            (10**30, 6, CONTEXT - 6),
        ):
            with streams.open(1) as stream:
                await submit(stream, [[1] * length], SamplingParams(max_tokens=max_tokens))
            assert wire.added()[-1].params.max_tokens == sent

    run(tokenizer, scenario)


def test_one_too_long_prompt_of_several_sends_none(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream, pytest.raises(RequestError):
            await submit(stream, [[1], [1] * CONTEXT], PARAMS)
        assert wire.sent == []

    run(tokenizer, scenario)


def test_stop_strings_stay_on_the_servers_side(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream:
            await submit(stream, [[1]], SamplingParams(stop=("world",), seed=1), 2)
            (request,) = wire.added()
            assert (request.params.stop, request.params.seed, request.num_choices) == ((), 1, 2)

    run(tokenizer, scenario)


def seeds_of(tokenizer: Tokenizer, *, seed: int | None = None, rank: int = 0) -> list[int]:
    """Of the two prompts and choices of an unseeded call, and of the next call."""
    found: list[int] = []

    async def main() -> None:
        wire = Wire()
        streams = Streams(wire.send, tokenizer, 10, 60.0, rank=rank, seed=seed)
        streams.accept_requests(CONTEXT)
        with streams.open(4) as stream:
            await submit(stream, [[1], [1]], PARAMS, 2)
        with streams.open(1) as stream:
            await submit(stream, [[1]], PARAMS)
        found.extend(seed for request in wire.added() for seed in request.seeds)

    asyncio.run(main())
    return found


def test_every_unseeded_choice_has_a_seed_of_its_own_that_is_fresh_at_every_start(
    tokenizer: Tokenizer,
) -> None:
    found = [*seeds_of(tokenizer), *seeds_of(tokenizer), *seeds_of(tokenizer, rank=1)]
    assert len(set(found)) == len(found) == 15


def test_seeds_repeat_under_a_given_one_and_differ_by_server_process(tokenizer: Tokenizer) -> None:
    found = seeds_of(tokenizer, seed=5)
    assert found == seeds_of(tokenizer, seed=5)
    assert len({*found, *seeds_of(tokenizer, seed=5, rank=1), *seeds_of(tokenizer, seed=6)}) == 15


def test_a_refusal_changes_nobodys_seed(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream, pytest.raises(RequestError):
            await submit(stream, [[1], [1] * CONTEXT], PARAMS)
        with streams.open(1) as stream:
            await submit(stream, [[1]], PARAMS)
        assert wire.added()[0].request_id == 1  # the seed follows from it

    run(tokenizer, scenario)


def test_nothing_is_sent_before_every_choice_is_known_to_work(tokenizer: Tokenizer) -> None:
    class Broken(list[int]):
        def __reversed__(self) -> Any:
            raise ValueError("a defect")

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream, pytest.raises(ValueError, match="a defect"):
            await submit(stream, [[1], Broken([1])], PARAMS)
        assert wire.sent == []

    run(tokenizer, scenario)


def test_an_engine_that_is_lost_as_a_call_comes_leaves_nothing(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        wire.is_cut = True
        with streams.open(2) as stream, pytest.raises(EngineDeadError):
            await submit(stream, [[1], [2]], PARAMS)
        assert streams.num_running == 0
        assert wire.sent == []

    run(tokenizer, scenario)


def test_a_call_of_moderate_size_is_one_message(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(6) as stream:
            await submit(stream, [[1], [2, 3]], SamplingParams(max_tokens=CONTEXT), 3)
            (request,) = wire.added()
            prompts = [
                np.frombuffer(data, "<i4").tolist() for data in (request.prompt_ids, *request.more_prompts)
            ]
            assert (prompts, request.num_choices) == ([[1], [2, 3]], 3)
            assert stream.request_ids == range(request.request_id, request.request_id + 6)
            assert request.params.max_tokens == CONTEXT - 1  # the engine cuts it to the room of each prompt
            step(streams, *(RequestOutput(one, [], FinishReason.STOP) for one in stream.request_ids))
            assert [delta.choice for delta in await read(stream)] == list(range(6))

    run(tokenizer, scenario)


def test_a_prompts_tokens_are_queued_once_until_its_first_token_or_its_end(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("a", False)

    async def scenario(streams: Streams, wire: Wire) -> None:
        def queued() -> int:
            return streams.stats.num_queued_tokens

        async def send(stream: Stream, *lengths: int) -> range:
            """Their request ids."""
            await submit(stream, [[1] * length for length in lengths], PARAMS)
            return stream.request_ids

        with streams.open(2) as two, streams.open(1) as third, streams.open(1) as fourth:
            first, second = await send(two, 6, 3)
            assert queued() == 9
            with (
                streams.open(2) as pair,
                pytest.raises(RequestError, match="9 prompt tokens wait for an answer, these 2") as error,
            ):
                await send(pair, 1, 1)
            assert (error.value.status, error.value.code) == (429, "too_many_tokens")
            assert queued() == 9
            (last,) = await send(third, 1)  # just as many as may be
            assert queued() == 10
            for _ in range(3):  # with the first token they are queued no longer, and count no second time
                step(streams, RequestOutput(first, word, None))
                assert queued() == 4
            (full,) = await send(fourth, 6)
            assert queued() == 10
            step(streams, RequestOutput(first, word, FinishReason.LENGTH))
            assert queued() == 10
            step(streams, RequestOutput(second, word, FinishReason.LENGTH))  # its first token is its last
            assert queued() == 7
            step(streams, RequestOutput(last, [], FinishReason.ABORT))  # no token at all
            assert queued() == 6
        assert queued() == 0
        assert wire.aborted() == [full]
        with streams.open(1) as alone:
            await send(alone, 11)  # more than there is room for, but nobody waits
            assert queued() == 11

    run(tokenizer, scenario, max_queued_tokens=10)


NUM_MANY = 2 * SLICE_REQUESTS + 5
MANY = [[1 + index % 7] * (1 + index % 3) for index in range(NUM_MANY)]


def prompts_of(message: AddRequest) -> list[list[int]]:
    return [np.frombuffer(data, "<i4").tolist() for data in (message.prompt_ids, *message.more_prompts)]


@pytest.mark.parametrize("n", [1, 3, SLICE_REQUESTS + 1])
def test_a_large_call_is_sent_in_slices_with_other_work_in_between(tokenizer: Tokenizer, n: int) -> None:
    many = MANY[: 2 * SLICE_REQUESTS // n + 2]

    async def main() -> None:
        wire, sent_by_turn = Wire(), [0]
        streams = Streams(wire.send, tokenizer, n * len(many), 60.0, seed=3)
        streams.accept_requests(CONTEXT)

        async def watch() -> None:
            while True:
                sent_by_turn.append(len(wire.sent))
                await asyncio.sleep(0)

        with streams.open(n * len(many)) as stream:
            watching = asyncio.ensure_future(watch())
            await submit(stream, many, PARAMS, n)
            watching.cancel()
            messages = wire.added()
            assert max(after - before for before, after in pairwise([*sent_by_turn, len(wire.sent)])) == 1
            assert all(message.num_requests <= max(n, SLICE_REQUESTS) for message in messages)
            assert 3 <= len(messages) <= 2 + n * len(many) // max(1, SLICE_REQUESTS // n * n)
            assert [prompt for message in messages for prompt in prompts_of(message)] == many
            ids = [message.request_id + rank for message in messages for rank in range(message.num_requests)]
            assert ids == [*range(1, 1 + n * len(many))] == [*stream.request_ids]
            assert [seed for one in messages for seed in one.seeds] == [request_seed(3, one) for one in ids]
            lengths = [len(prompt) for prompt in many]
            assert streams.stats.num_queued_tokens == streams.stats.num_prompt_tokens == n * sum(lengths)
            assert sum(streams.stats.prompt_tokens.counts) == n * len(many)

    asyncio.run(main())


def test_long_prompts_are_sent_in_slices_of_limited_size(tokenizer: Tokenizer) -> None:
    tokens_per_slice = SLICE_BYTES // 4
    lengths = [tokens_per_slice // 2, tokens_per_slice // 2, 1, tokens_per_slice + 1, 1, 1]

    async def main() -> None:
        wire = Wire()
        streams = Streams(wire.send, tokenizer, 10, 60.0)
        streams.accept_requests(4 * tokens_per_slice)
        with streams.open(len(lengths)) as stream:
            await submit(stream, [array("i", bytes(4 * length)) for length in lengths], PARAMS)
        found = [[len(prompt) for prompt in prompts_of(message)] for message in wire.added()]
        assert found == [lengths[:2], lengths[2:3], lengths[3:4], lengths[4:]]

    asyncio.run(main())


def test_a_reader_who_leaves_while_the_call_is_sent_aborts_what_was_sent(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        async def call() -> None:
            with streams.open(NUM_MANY) as stream:
                await submit(stream, MANY, PARAMS)

        calling = asyncio.ensure_future(call())
        await asyncio.sleep(0)  # the first slice
        assert streams.num_running == NUM_MANY
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert len(wire.added()) == 1
        assert wire.aborted() == list(range(1, 1 + SLICE_REQUESTS))

    run(tokenizer, scenario, max_open=NUM_MANY)


@pytest.mark.parametrize(
    ("is_cut", "error"), [(True, EngineDeadError("gone")), (False, RequestError(409, "aborted", "by /abort"))]
)
def test_nothing_more_is_sent_of_a_call_that_has_ended(
    tokenizer: Tokenizer, is_cut: bool, error: MinisglError
) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(NUM_MANY) as stream:
            sending = asyncio.ensure_future(submit(stream, MANY, PARAMS))
            await asyncio.sleep(0)
            step(streams, RequestOutput(1, tokenizer.encode("so far", False)))
            wire.is_cut = is_cut  # an engine that dies
            streams.fail_all(error)
            assert streams.num_running == 0
            wire.is_cut = False  # nobody may send because sending would work again
            await sending
            shown: list[Delta] = []
            with pytest.raises(type(error)):
                await read(stream, shown)
            assert [delta.text for delta in shown] == ["so far"]
        assert len(wire.added()) == 1
        assert wire.aborted() == ([] if is_cut else list(range(1, 1 + SLICE_REQUESTS)))

    run(tokenizer, scenario, max_open=NUM_MANY)


def test_an_engine_that_is_lost_between_two_slices_ends_the_call(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(NUM_MANY) as stream:
            sending = asyncio.ensure_future(submit(stream, MANY, PARAMS))
            await asyncio.sleep(0)
            wire.is_cut = True
            with pytest.raises(EngineDeadError):
                await sending
        assert len(wire.sent) == 1

    run(tokenizer, scenario, max_open=NUM_MANY)


def test_a_call_that_comes_while_another_is_sent_sees_all_of_its_tokens(tokenizer: Tokenizer) -> None:
    num_tokens = sum(map(len, MANY))

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(NUM_MANY) as stream, streams.open(2) as other, streams.open(1) as fitting:
            sending = asyncio.ensure_future(submit(stream, MANY, PARAMS))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match=f"{num_tokens} prompt tokens wait"):
                await submit(other, [[1], [1]], PARAMS)
            await submit(fitting, [[1]], PARAMS)
            await sending
            assert fitting.request_ids == range(NUM_MANY + 1, NUM_MANY + 2)
            assert [message.request_id for message in wire.added()][:2] == [1, NUM_MANY + 1]

    run(tokenizer, scenario, max_open=NUM_MANY + 3, max_queued_tokens=num_tokens + 1)


def test_the_event_loop_builds_neither_texts_nor_stop_tables(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream:
            params = SamplingParams(max_tokens=5, stop=("x" * 1000,))
            call = await asyncio.to_thread(stream.prepare, [[1]], params, 2)
            for name in ("ReplyText", "StopStrings", "fit_to_context"):
                monkeypatch.delattr(open_choices, name)
            await stream.submit(call)
            assert wire.added()[0].num_choices == 2

    run(tokenizer, scenario)
