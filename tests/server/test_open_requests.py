"""The table of open requests: one end each, nothing left, nothing after the end."""

import asyncio
import contextlib
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from open_streams import PARAMS, Wire, assert_empty, figures, read, run, step, submit
from small_model import CONTEXT, EOS, make_folder
from virtual_time import run_in_virtual_time

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.ipc.messages import AbortRequest
from minisgl.request import FinishReason, PackedLogprobs, RequestOutput, SamplingParams
from minisgl.server.http_server import _share
from minisgl.server.open_choices import Delta
from minisgl.server.streams import Stream, Streams
from minisgl.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_folder(tmp_path_factory.mktemp("model")))


def test_text_tokens_and_end_arrive(tokenizer: Tokenizer) -> None:
    hello, eos = tokenizer.encode("hello", False), tokenizer.encode(EOS, False)

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as stream:
            await submit(stream, [[1, 2, 3]], PARAMS)
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
            await submit(stream, [[1]], SamplingParams(stop=("world",)))
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
            await submit(stream, [[1]], SamplingParams(stop_token_ids=(ids[-1],)))
            step(streams, RequestOutput(wire.added()[0].request_id, ids, FinishReason.STOP))
            assert figures(await read(stream)) == [(0, "hello", len(ids), 0, "stop")]

    run(tokenizer, scenario)


def test_nothing_comes_after_the_end(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as stream:
            await submit(stream, [[1]], PARAMS)
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
            await submit(stream, [[1]], PARAMS, 3)
            ids = stream.request_ids
            step(streams, RequestOutput(ids[1], [], FinishReason.STOP))
        assert wire.aborted() == [ids[0], ids[2]]
        assert wire.sent.index(wire.added()[0]) < wire.sent.index(AbortRequest(ids[0]))

    run(tokenizer, scenario)


def test_choices_are_read_together_and_end_apart(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(2) as stream:
            await submit(stream, [[1], [2, 3]], PARAMS)
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
            await submit(stream, [[1]], PARAMS, 2)
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
            await submit(stream, [[1]], PARAMS, 2)
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
            await submit(stream, [[1]], PARAMS)
            step(streams, RequestOutput(wire.added()[0].request_id, [], FinishReason.STOP))
            await asyncio.sleep(1000)  # its reader is slow
            assert [delta.finish_reason for delta in await read(stream)] == ["stop"]
        assert_empty(streams)

    run_in_virtual_time(main())


def test_when_the_engine_dies_every_reader_hears_it(tokenizer: Tokenizer) -> None:
    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(1) as first, streams.open(2) as second, streams.open(1) as third:
            await submit(first, [[1]], PARAMS)
            await submit(second, [[1]], PARAMS, 2)
            step(streams, RequestOutput(1, tokenizer.encode("so far", False)))
            wire.is_cut = True
            error = EngineDeadError("gone")
            streams.refuse_requests(error)
            streams.fail_all(error)
            await submit(third, [[1]], PARAMS)  # its prompt was being tokenized: no use any more, no harm
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
            await submit(stream, [[1]], PARAMS)
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
            await submit(first, [[1]], PARAMS)
            await submit(second, [[1]], PARAMS)
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
                await submit(stream, [[1, 2]], SamplingParams(stop=("o w",)), stream.num_choices)
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


def test_every_choice_gives_the_prompts_logprobs_that_the_first_one_brings(tokenizer: Tokenizer) -> None:
    found = PackedLogprobs(bytes(4), bytes(8))

    async def scenario(streams: Streams, wire: Wire) -> None:
        with streams.open(4) as stream:
            await submit(stream, [[1, 2], [3]], SamplingParams(max_tokens=50, prompt_logprobs=0), 2)
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


@pytest.mark.parametrize(("whole", "num_servers"), [(10, 1), (10, 3), (9, 3), (2, 3)])
def test_servers_that_share_a_limit_have_it_together_once(whole: int, num_servers: int) -> None:
    shares = [_share(whole, num_servers, rank) for rank in range(num_servers)]
    assert sum(shares) == max(whole, num_servers)
    assert max(shares) - min(shares) <= 1
