"""The table of open requests: one end each, nothing left, nothing after the end."""

import asyncio
import contextlib
import random
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import CONTEXT, EOS, make_folder
from virtual_time import run_in_virtual_time

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.ipc.messages import AbortRequest, AddRequest, StepOutput, ToEngine
from minisgl.request import FinishReason, PackedLogprobs, RequestOutput, SamplingParams
from minisgl.server.http_server import _share
from minisgl.server.streams import Delta, Stream, Streams
from minisgl.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_folder(tmp_path_factory.mktemp("model")))


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


PARAMS = SamplingParams(max_tokens=50)


def test_text_tokens_and_end_arrive(tokenizer: Tokenizer) -> None:
    hello, eos = tokenizer.encode("hello", False), tokenizer.encode(EOS, False)

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as stream:
            stream.submit([[1, 2, 3]], PARAMS)
            request = wire.added()[0]
            assert np.frombuffer(request.prompt_ids, "<i4").tolist() == [1, 2, 3]
            step(streams, RequestOutput(request.request_id, hello, None, 2))
            step(streams, RequestOutput(request.request_id, eos, FinishReason.STOP, 2))
            deltas = await read(stream)
        assert figures(deltas) == [(0, "hello", len(hello), 2, None), (0, "", 1, 2, "stop")]
        assert wire.aborted() == []  # the engine ended it

    run(tokenizer, scenario)


def test_a_stop_string_ends_the_request_and_tells_the_engine_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world and more", False)
    upto = len(tokenizer.encode("hello world", False))

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as stream:
            stream.submit([[1]], SamplingParams(stop=("world",)))
            request_id = wire.added()[0].request_id
            step(streams, RequestOutput(request_id, ids))
            step(streams, RequestOutput(request_id, ids))  # was on its way: dropped
            assert figures(await read(stream)) == [(0, "hello ", upto, 0, "stop")]
            assert wire.aborted() == [request_id]
        assert wire.aborted() == [request_id]

    run(tokenizer, scenario)


def test_an_ordinary_token_given_as_stop_token_is_counted_and_not_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello<tool>", False)

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as stream:
            stream.submit([[1]], SamplingParams(stop_token_ids=(ids[-1],)))
            step(streams, RequestOutput(wire.added()[0].request_id, ids, FinishReason.STOP))
            assert figures(await read(stream)) == [(0, "hello", len(ids), 0, "stop")]

    run(tokenizer, scenario)


def test_nothing_comes_after_the_end(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as stream:
            stream.submit([[1]], PARAMS)
            request_id = wire.added()[0].request_id
            end = RequestOutput(request_id, [], FinishReason.LENGTH)
            ghost = RequestOutput(request_id, tokenizer.encode("ghost", False))
            step(streams, end, ghost, end, RequestOutput(999, [1], FinishReason.STOP))
            assert streams.num_running == 0
            assert figures(await read(stream)) == [(0, "", 0, 0, "length")]

    run(tokenizer, scenario)


def test_the_reader_who_leaves_takes_the_request_with_it(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(3) as stream:
            stream.submit([[1]], PARAMS, 3)
            ids = stream.request_ids
            step(streams, RequestOutput(ids[1], [], FinishReason.STOP))
        assert wire.aborted() == [ids[0], ids[2]]
        assert wire.sent.index(wire.added()[0]) < wire.sent.index(AbortRequest(ids[0]))

    run(tokenizer, scenario)


def test_choices_are_read_together_and_end_apart(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream:
            stream.submit([[1], [2, 3]], PARAMS)
            first, second = stream.request_ids
            step(
                streams,
                RequestOutput(second, [], FinishReason.LENGTH),
                RequestOutput(first, tokenizer.encode("a", False)),
            )
            step(streams, RequestOutput(first, [], FinishReason.STOP))
            got = [(delta.choice, delta.finish_reason) for delta in await read(stream)]
        assert got == [(1, "length"), (0, None), (0, "stop")]

    run(tokenizer, scenario)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_an_error_of_one_choice_ends_the_call(tokenizer: Tokenizer, reason: FinishReason) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream:
            stream.submit([[1]], PARAMS, 2)
            first, second = stream.request_ids
            step(streams, RequestOutput(first, [], reason, 0, 422, "refused", "no"))
            with pytest.raises(RequestError, match="no") as caught:
                await read(stream)
            assert (caught.value.status, caught.value.code) == (422, "refused")
            assert wire.aborted() == [second]

    run(tokenizer, scenario)


def test_above_the_cap_comes_a_429(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, _: Wire) -> None:
        with streams.open(2), streams.open(1):
            with pytest.raises(RequestError) as caught:
                streams.open(2)
            assert caught.value.status == 429
            streams.open(1).__exit__()
        with pytest.raises(RequestError) as caught:
            streams.open(5)
        assert caught.value.status == 400

    run(tokenizer, scenario, max_open=4)


def test_too_long_is_a_400_and_max_tokens_are_clamped(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        for length in (CONTEXT, CONTEXT + 1):
            with streams.open(1) as stream, pytest.raises(RequestError) as caught:
                stream.submit([[1] * length], PARAMS)
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        with streams.open(1) as stream, pytest.raises(RequestError, match="empty"):
            stream.submit([[]], PARAMS)
        assert wire.sent == []
        for max_tokens, length, sent in (
            (50, CONTEXT - 1, 1),
            (None, 6, CONTEXT - 6),
            (10**30, 6, CONTEXT - 6),
        ):
            with streams.open(1) as stream:
                stream.submit([[1] * length], SamplingParams(max_tokens=max_tokens))
            assert wire.added()[-1].params.max_tokens == sent

    run(tokenizer, scenario)


def test_one_too_long_prompt_of_several_sends_none(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream, pytest.raises(RequestError):
            stream.submit([[1], [1] * CONTEXT], PARAMS)
        assert wire.sent == []

    run(tokenizer, scenario)


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_a_request_is_aborted_when_no_token_has_come_for_the_timeout(
    tokenizer: Tokenizer, num_tokens: int
) -> None:
    timeout_s, pause_s = 60.0, 50.0  # 40 such pauses are far longer than the timeout
    (token,) = tokenizer.encode("a", False)

    async def main() -> None:
        wire, loop = Wire(), asyncio.get_running_loop()
        streams = Streams(wire.send, tokenizer, 10, timeout_s)
        streams.accept_requests(CONTEXT)
        with streams.open(2) as stream:
            stream.submit([[1]], PARAMS, 2)
            first = wire.added()[0].request_id
            second = first + 1
            for _ in range(num_tokens):
                await asyncio.sleep(pause_s)
                step(streams, RequestOutput(second, [token]))
            shown: list[Delta] = []
            with pytest.raises(RequestError, match="no token for 60 s") as caught:
                await read(stream, shown)
            assert (caught.value.status, caught.value.code) == (504, "request_timeout")
            assert loop.time() == pytest.approx(num_tokens * pause_s + timeout_s)
            assert len(shown) == num_tokens
            assert wire.aborted() == [first, second]
        assert_empty(streams)

    run_in_virtual_time(main())


def test_an_answer_that_has_ended_meets_no_timeout(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        wire = Wire()
        streams = Streams(wire.send, tokenizer, 10, 60.0)
        streams.accept_requests(CONTEXT)
        with streams.open(1) as stream:
            stream.submit([[1]], PARAMS)
            step(streams, RequestOutput(wire.added()[0].request_id, [], FinishReason.STOP))
            await asyncio.sleep(1000)  # its reader is slow
            assert [delta.finish_reason for delta in await read(stream)] == ["stop"]
        assert_empty(streams)

    run_in_virtual_time(main())


def test_when_the_engine_dies_every_reader_hears_it(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as first, streams.open(2) as second, streams.open(1) as third:
            first.submit([[1]], PARAMS)
            second.submit([[1]], PARAMS, 2)
            step(streams, RequestOutput(1, tokenizer.encode("so far", False)))
            wire.is_cut = True
            error = EngineDeadError("gone")
            streams.refuse_requests(error)
            streams.fail_all(error)
            third.submit([[1]], PARAMS)  # its prompt was being tokenized: no use any more, no harm
            shown: list[Delta] = []
            with pytest.raises(EngineDeadError):
                await read(first, shown)
            assert [delta.text for delta in shown] == ["so far"]
            for stream in (second, third):
                with pytest.raises(EngineDeadError):
                    await read(stream)
        with pytest.raises(EngineDeadError):
            streams.open(1)

    run(tokenizer, scenario)


def test_an_answer_that_is_complete_survives_the_engine(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as stream:
            stream.submit([[1]], PARAMS)
            step(streams, RequestOutput(wire.added()[0].request_id, [], FinishReason.STOP))
            streams.fail_all(EngineDeadError("gone"))
            assert [delta.finish_reason for delta in await read(stream)] == ["stop"]

    run(tokenizer, scenario)


def test_loading_and_draining_refuse_with_503(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        streams = Streams(Wire().send, tokenizer, 4, 60)
        with pytest.raises(RequestError) as caught:
            streams.open(1)
        assert (caught.value.status, caught.value.code) == (503, "loading")
        streams.accept_requests(CONTEXT)
        with streams.open(1):
            streams.refuse_requests(RequestError(503, "shutting_down", "bye"))
            with pytest.raises(RequestError):
                streams.open(1)
            empty = asyncio.ensure_future(streams.wait_until_empty())
            await asyncio.sleep(0)
            assert not empty.done()
        await asyncio.wait_for(empty, 10)
        assert_empty(streams)

    asyncio.run(main())


def test_a_defect_in_one_requests_text_ends_that_one_only(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Tokenizer.from_folder(make_folder(tmp_path))
    bad = broken.encode("a", False)[0]
    whole = broken.token_bytes

    def token_bytes(token_id: int) -> bytes:
        if token_id == bad:
            raise ZeroDivisionError
        return whole(token_id)

    monkeypatch.setattr(broken, "token_bytes", token_bytes)

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as first, streams.open(1) as second:
            first.submit([[1]], PARAMS)
            second.submit([[1]], PARAMS)
            one, two = (request.request_id for request in wire.added())
            step(streams, RequestOutput(one, [bad]), RequestOutput(two, [], FinishReason.LENGTH))
            with pytest.raises(RequestError) as caught:
                await read(first)
            assert caught.value.status == 500
            assert wire.aborted() == [one]
            assert len(await read(second)) == 1

    run(broken, scenario)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_after_any_mix_every_stream_ended_once_and_nothing_is_left(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)

    async def reader(stream: Stream, patience: int, ends: list[str]) -> None:
        with stream:
            await asyncio.sleep(0)
            try:
                stream.submit([[1, 2]], SamplingParams(stop=("o w",)), stream.num_choices)
                finished: list[int] = []
                async for delta in stream.deltas():
                    assert delta.choice not in finished
                    if delta.finish_reason:
                        finished.append(delta.choice)
                    patience -= 1
                    if not patience:
                        ends.append("left")
                        return
                assert sorted(finished) == list(range(stream.num_choices))
                ends.append("complete")
            except MinisglError:
                ends.append("error")

    async def scenario(streams: Streams, wire: Wire) -> None:
        ends: list[str] = []
        readers: list[asyncio.Task[None]] = []
        ids = tokenizer.encode("hello world hello", False)
        for _ in range(40):
            action = rng.random()
            if action < 0.3:
                num_choices = rng.randint(1, 3)
                if streams.num_open + num_choices > 10:
                    with pytest.raises(RequestError, match="try again"):
                        streams.open(num_choices)
                else:
                    stream = streams.open(num_choices)
                    readers.append(asyncio.ensure_future(reader(stream, rng.choice([1, 2, 100]), ends)))
            elif action < 0.35 and readers:
                rng.choice(readers).cancel()
            elif wire.added():
                one = rng.choice(wire.added()).request_id
                reason = rng.choice([None, None, None, *FinishReason])
                step(streams, RequestOutput(one, rng.sample(ids, rng.randint(0, 3)), reason))
            await asyncio.sleep(0)
        streams.fail_all(EngineDeadError("the end of the test"))
        results = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 10)
        cancelled = sum(isinstance(result, asyncio.CancelledError) for result in results)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert len(ends) + cancelled == len(readers)
        assert len(wire.aborted()) == len(set(wire.aborted()))
        # A reader cancelled before its first turn never entered its `with`.
        for stream in list(streams._open_streams):
            stream.__exit__()

    run(tokenizer, scenario)


def test_stop_strings_stay_on_the_servers_side(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream:
            stream.submit([[1]], SamplingParams(stop=("world",), seed=1), 2)
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
            stream.submit([[1], [1]], PARAMS, 2)
        with streams.open(1) as stream:
            stream.submit([[1]], PARAMS)
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
            stream.submit([[1], [1] * CONTEXT], PARAMS)
        with streams.open(1) as stream:
            stream.submit([[1]], PARAMS)
        assert wire.added()[0].request_id == 1  # the seed follows from it

    run(tokenizer, scenario)


def test_nothing_is_sent_before_every_choice_is_known_to_work(tokenizer: Tokenizer) -> None:
    class Broken(list[int]):
        def __reversed__(self) -> Any:
            raise ValueError("a defect")

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream, pytest.raises(ValueError, match="a defect"):
            stream.submit([[1], Broken([1])], PARAMS)
        assert wire.sent == []

    run(tokenizer, scenario)


def test_an_engine_that_is_lost_as_a_call_comes_leaves_nothing(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        wire.is_cut = True
        with streams.open(2) as stream, pytest.raises(EngineDeadError):
            stream.submit([[1], [2]], PARAMS)
        assert streams.num_running == 0
        assert wire.sent == []

    run(tokenizer, scenario)


def test_a_call_is_one_message_however_many_prompts_and_choices_it_has(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(6) as stream:
            stream.submit([[1], [2, 3]], SamplingParams(max_tokens=CONTEXT), 3)
            (request,) = wire.added()
            prompts = [
                np.frombuffer(data, "<i4").tolist() for data in (request.prompt_ids, *request.more_prompts)
            ]
            assert (prompts, request.num_choices) == ([[1], [2, 3]], 3)
            assert stream.request_ids == list(range(request.request_id, request.request_id + 6))
            assert request.params.max_tokens == CONTEXT - 1  # the engine cuts it to the room of each prompt
            step(streams, *(RequestOutput(one, [], FinishReason.STOP) for one in stream.request_ids))
            assert [delta.choice for delta in await read(stream)] == list(range(6))

    run(tokenizer, scenario)


def test_every_choice_gives_the_prompts_logprobs_that_the_first_one_brings(tokenizer: Tokenizer) -> None:
    found = PackedLogprobs(bytes(4), bytes(8))

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(4) as stream:
            stream.submit([[1, 2], [3]], SamplingParams(max_tokens=50, prompt_logprobs=0), 2)
            first, second, third, fourth = stream.request_ids
            step(streams, RequestOutput(second, [5]), RequestOutput(fourth, [5], FinishReason.STOP))
            assert not stream._unread  # they wait for the first of their prompt
            step(
                streams,
                RequestOutput(third, [], FinishReason.LENGTH, prompt_logprobs=PackedLogprobs(b"", b"")),
            )
            step(streams, RequestOutput(second, [6]), RequestOutput(first, [5], prompt_logprobs=found))
            step(streams, *(RequestOutput(one, [], FinishReason.LENGTH) for one in (first, second)))
            told = [(delta.choice, delta.prompt_logprobs) for delta in await read(stream)]
        empty = PackedLogprobs(b"", b"")
        assert told == [(2, empty), (3, empty), (0, found), (1, found), (1, None), (0, None), (1, None)]

    run(tokenizer, scenario)


def test_a_refusal_keeps_nothing_of_the_calls_it_refused(tokenizer: Tokenizer) -> None:
    class Body:
        """Stands for what a call holds while it is refused."""

    bodies: list[weakref.ref[Body]] = []

    def call(streams: Streams) -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        streams.open(1)

    async def scenario(streams: Streams, wire: Wire) -> None:
        streams.refuse_requests(RequestError(503, "shutting_down", "the server is shutting down"))
        for _ in range(5):
            with contextlib.suppress(RequestError):
                call(streams)
        assert [body() for body in bodies[:-1]] == [None] * 4

    run(tokenizer, scenario)


def test_a_prompts_tokens_are_queued_once_until_its_first_token_or_its_end(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("a", False)

    async def scenario(streams: Streams, wire: Wire) -> None:
        def queued() -> int:
            return streams.stats.num_queued_tokens

        def submit(stream: Stream, *lengths: int) -> list[int]:
            """Their request ids."""
            stream.submit([[1] * length for length in lengths], PARAMS)
            return stream.request_ids

        with streams.open(2) as two, streams.open(1) as third, streams.open(1) as fourth:
            first, second = submit(two, 6, 3)
            assert queued() == 9
            with (
                streams.open(2) as pair,
                pytest.raises(RequestError, match="9 prompt tokens wait for an answer, these 2") as error,
            ):
                submit(pair, 1, 1)
            assert (error.value.status, error.value.code) == (429, "too_many_tokens")
            assert queued() == 9
            (last,) = submit(third, 1)  # just as many as may be
            assert queued() == 10
            for _ in range(3):  # with the first token they are queued no longer, and count no second time
                step(streams, RequestOutput(first, word, None))
                assert queued() == 4
            (full,) = submit(fourth, 6)
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
            submit(alone, 11)  # more than there is room for, but nobody waits
            assert queued() == 11

    run(tokenizer, scenario, max_queued_tokens=10)


@pytest.mark.parametrize(("whole", "num_servers"), [(10, 1), (10, 3), (9, 3), (2, 3)])
def test_servers_that_share_a_limit_have_it_together_once(whole: int, num_servers: int) -> None:
    shares = [_share(whole, num_servers, rank) for rank in range(num_servers)]
    assert sum(shares) == max(whole, num_servers)
    assert max(shares) - min(shares) <= 1
