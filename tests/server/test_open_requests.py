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

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.messages import AbortRequest, AddRequest, StepOutput, ToEngine
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.server.frontend import Delta, Frontend, Stream
from minisgl.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_folder(tmp_path_factory.mktemp("model")))


class Wire:
    """Where the frontend's messages go: a list, until it is cut."""

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
    scenario: Callable[[Frontend, Wire], Coroutine[Any, Any, None]],
    max_open: int = 10,
    timeout_s: float = 60.0,
) -> None:
    """Run `scenario` with a welcoming frontend; afterwards nothing may be left in it."""

    async def main() -> None:
        wire = Wire()
        frontend = Frontend(wire.send, tokenizer, max_open, timeout_s)
        frontend.welcome(CONTEXT)
        await scenario(frontend, wire)
        assert_empty(frontend)

    asyncio.run(main())


def assert_empty(frontend: Frontend) -> None:
    assert frontend.num_open == 0
    assert frontend.num_running == 0
    assert not frontend._streams


def step(frontend: Frontend, *outputs: RequestOutput) -> None:
    frontend.take(StepOutput(list(outputs)))


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

    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(1) as stream:
            stream.submit([([1, 2, 3], PARAMS)])
            request = wire.added()[0]
            assert np.frombuffer(request.prompt_ids, "<i4").tolist() == [1, 2, 3]
            step(frontend, RequestOutput(request.request_id, hello, None, 2))
            step(frontend, RequestOutput(request.request_id, eos, FinishReason.STOP, 2))
            deltas = await read(stream)
        assert figures(deltas) == [(0, "hello", len(hello), 2, None), (0, "", 1, 2, "stop")]
        assert wire.aborted() == []  # the engine ended it

    run(tokenizer, scenario)


def test_trap_21_a_stop_string_ends_the_request_and_tells_the_engine_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world and more", False)
    upto = len(tokenizer.encode("hello world", False))

    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(1) as stream:
            stream.submit([([1], SamplingParams(stop=("world",)))])
            request_id = wire.added()[0].request_id
            step(frontend, RequestOutput(request_id, ids))
            step(frontend, RequestOutput(request_id, ids))  # was on its way: dropped
            assert figures(await read(stream)) == [(0, "hello ", upto, 0, "stop")]
            assert wire.aborted() == [request_id]
        assert wire.aborted() == [request_id]

    run(tokenizer, scenario)


def test_an_ordinary_token_given_as_stop_token_is_counted_and_not_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello<tool>", False)

    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(1) as stream:
            stream.submit([([1], SamplingParams(stop_token_ids=(ids[-1],)))])
            step(frontend, RequestOutput(wire.added()[0].request_id, ids, FinishReason.STOP))
            assert figures(await read(stream)) == [(0, "hello", len(ids), 0, "stop")]

    run(tokenizer, scenario)


def test_trap_5_and_26_nothing_comes_after_the_end(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(1) as stream:
            stream.submit([([1], PARAMS)])
            request_id = wire.added()[0].request_id
            end = RequestOutput(request_id, [], FinishReason.LENGTH)
            ghost = RequestOutput(request_id, tokenizer.encode("ghost", False))
            step(frontend, end, ghost, end, RequestOutput(999, [1], FinishReason.STOP))
            assert frontend.num_running == 0
            assert figures(await read(stream)) == [(0, "", 0, 0, "length")]

    run(tokenizer, scenario)


def test_the_reader_who_leaves_takes_the_request_with_it(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(3) as stream:
            stream.submit([([1], PARAMS)] * 3)
            ids = [request.request_id for request in wire.added()]
            step(frontend, RequestOutput(ids[1], [], FinishReason.STOP))
        assert wire.aborted() == [ids[0], ids[2]]
        assert wire.sent.index(wire.added()[0]) < wire.sent.index(AbortRequest(ids[0]))

    run(tokenizer, scenario)


def test_choices_are_read_together_and_end_apart(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(2) as stream:
            stream.submit([([1], PARAMS), ([2, 3], PARAMS)])
            first, second = (request.request_id for request in wire.added())
            step(
                frontend,
                RequestOutput(second, [], FinishReason.LENGTH),
                RequestOutput(first, tokenizer.encode("a", False)),
            )
            step(frontend, RequestOutput(first, [], FinishReason.STOP))
            got = [(delta.choice, delta.finish_reason) for delta in await read(stream)]
        assert got == [(1, "length"), (0, None), (0, "stop")]

    run(tokenizer, scenario)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_an_error_of_one_choice_ends_the_call(tokenizer: Tokenizer, reason: FinishReason) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(2) as stream:
            stream.submit([([1], PARAMS)] * 2)
            first, second = (request.request_id for request in wire.added())
            step(frontend, RequestOutput(first, [], reason, 0, 422, "refused", "no"))
            with pytest.raises(RequestError, match="no") as caught:
                await read(stream)
            assert (caught.value.status, caught.value.code) == (422, "refused")
            assert wire.aborted() == [second]

    run(tokenizer, scenario)


def test_trap_29_above_the_cap_comes_a_429(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, _: Wire) -> None:
        with frontend.open(2), frontend.open(1):
            with pytest.raises(RequestError) as caught:
                frontend.open(2)
            assert caught.value.status == 429
            frontend.open(1).__exit__()
        with pytest.raises(RequestError) as caught:
            frontend.open(5)
        assert caught.value.status == 400

    run(tokenizer, scenario, max_open=4)


def test_trap_28_too_long_is_a_400_and_max_tokens_are_clamped(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        for length in (CONTEXT, CONTEXT + 1):
            with frontend.open(1) as stream, pytest.raises(RequestError) as caught:
                stream.submit([([1] * length, PARAMS)])
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
        with frontend.open(1) as stream, pytest.raises(RequestError, match="empty"):
            stream.submit([([], PARAMS)])
        assert wire.sent == []
        for max_tokens, length, sent in (
            (50, CONTEXT - 1, 1),
            (None, 6, CONTEXT - 6),
            (10**30, 6, CONTEXT - 6),
        ):
            with frontend.open(1) as stream:
                stream.submit([([1] * length, SamplingParams(max_tokens=max_tokens))])
            assert wire.added()[-1].params.max_tokens == sent

    run(tokenizer, scenario)


def test_one_too_long_prompt_of_several_sends_none(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(2) as stream, pytest.raises(RequestError):
            stream.submit([([1], PARAMS), ([1] * CONTEXT, PARAMS)])
        assert wire.sent == []

    run(tokenizer, scenario)


def test_trap_29_a_request_that_takes_too_long_is_aborted(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(1) as stream:
            stream.submit([([1], PARAMS)])
            with pytest.raises(RequestError) as caught:
                await asyncio.wait_for(read(stream), 10)
            assert caught.value.code == "request_timeout"
            assert wire.aborted() == [wire.added()[0].request_id]

    run(tokenizer, scenario, timeout_s=0.01)


def test_trap_25_when_the_engine_dies_every_reader_hears_it(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(1) as first, frontend.open(2) as second, frontend.open(1) as third:
            first.submit([([1], PARAMS)])
            second.submit([([1], PARAMS)] * 2)
            step(frontend, RequestOutput(1, tokenizer.encode("so far", False)))
            wire.is_cut = True
            error = EngineDeadError("gone")
            frontend.refuse(error)
            frontend.fail_all(error)
            third.submit([([1], PARAMS)])  # its prompt was being tokenized: no use any more, no harm
            shown: list[Delta] = []
            with pytest.raises(EngineDeadError):
                await read(first, shown)
            assert [delta.text for delta in shown] == ["so far"]
            for stream in (second, third):
                with pytest.raises(EngineDeadError):
                    await read(stream)
        with pytest.raises(EngineDeadError):
            frontend.open(1)

    run(tokenizer, scenario)


def test_an_answer_that_is_complete_survives_the_engine(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(1) as stream:
            stream.submit([([1], PARAMS)])
            step(frontend, RequestOutput(wire.added()[0].request_id, [], FinishReason.STOP))
            frontend.fail_all(EngineDeadError("gone"))
            assert [delta.finish_reason for delta in await read(stream)] == ["stop"]

    run(tokenizer, scenario)


def test_loading_and_draining_refuse_with_503(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        frontend = Frontend(Wire().send, tokenizer, 4, 60)
        with pytest.raises(RequestError) as caught:
            frontend.open(1)
        assert (caught.value.status, caught.value.code) == (503, "loading")
        frontend.welcome(CONTEXT)
        with frontend.open(1):
            frontend.refuse(RequestError(503, "shutting_down", "bye"))
            with pytest.raises(RequestError):
                frontend.open(1)
            empty = asyncio.ensure_future(frontend.wait_until_empty())
            await asyncio.sleep(0)
            assert not empty.done()
        await asyncio.wait_for(empty, 10)
        assert_empty(frontend)

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

    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(1) as first, frontend.open(1) as second:
            first.submit([([1], PARAMS)])
            second.submit([([1], PARAMS)])
            one, two = (request.request_id for request in wire.added())
            step(frontend, RequestOutput(one, [bad]), RequestOutput(two, [], FinishReason.LENGTH))
            with pytest.raises(RequestError) as caught:
                await read(first)
            assert caught.value.status == 500
            assert wire.aborted() == [one]
            assert len(await read(second)) == 1

    run(broken, scenario)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_trap_26_after_any_mix_every_stream_ended_once_and_nothing_is_left(
    tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)

    async def reader(stream: Stream, patience: int, ends: list[str]) -> None:
        with stream:
            await asyncio.sleep(0)
            try:
                stream.submit([([1, 2], SamplingParams(stop=("o w",)))] * stream.num_choices)
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

    async def scenario(frontend: Frontend, wire: Wire) -> None:
        ends: list[str] = []
        readers: list[asyncio.Task[None]] = []
        ids = tokenizer.encode("hello world hello", False)
        for _ in range(40):
            action = rng.random()
            if action < 0.3:
                num_choices = rng.randint(1, 3)
                if frontend.num_open + num_choices > 10:
                    with pytest.raises(RequestError, match="try again"):
                        frontend.open(num_choices)
                else:
                    stream = frontend.open(num_choices)
                    readers.append(asyncio.ensure_future(reader(stream, rng.choice([1, 2, 100]), ends)))
            elif action < 0.35 and readers:
                rng.choice(readers).cancel()
            elif wire.added():
                one = rng.choice(wire.added()).request_id
                reason = rng.choice([None, None, None, *FinishReason])
                step(frontend, RequestOutput(one, rng.sample(ids, rng.randint(0, 3)), reason))
            await asyncio.sleep(0)
        frontend.fail_all(EngineDeadError("the end of the test"))
        results = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 10)
        cancelled = sum(isinstance(result, asyncio.CancelledError) for result in results)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert len(ends) + cancelled == len(readers)
        assert len(wire.aborted()) == len(set(wire.aborted()))
        # A reader cancelled before its first turn never entered its `with`.
        for stream in list(frontend._streams):
            stream.__exit__()

    run(tokenizer, scenario)


def test_stop_strings_stay_on_the_servers_side(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(2) as stream:
            stream.submit([([1], SamplingParams(stop=("world",), seed=seed)) for seed in (1, 2)])
            assert [request.params.stop for request in wire.added()] == [(), ()]
            assert [request.params.seed for request in wire.added()] == [1, 2]

    run(tokenizer, scenario)


def test_nothing_is_sent_before_every_choice_is_known_to_work(tokenizer: Tokenizer) -> None:
    class Broken(list[int]):
        def __reversed__(self) -> Any:
            raise ValueError("a defect")

    async def scenario(frontend: Frontend, wire: Wire) -> None:
        with frontend.open(2) as stream, pytest.raises(ValueError, match="a defect"):
            stream.submit([([1], PARAMS), (Broken([1]), PARAMS)])
        assert wire.sent == []

    run(tokenizer, scenario)


def test_an_engine_that_is_lost_between_two_choices_leaves_nothing(tokenizer: Tokenizer) -> None:
    async def scenario(frontend: Frontend, wire: Wire) -> None:
        whole = wire.send

        def cut_after_one(message: ToEngine) -> None:
            whole(message)
            wire.is_cut = True

        frontend._send = cut_after_one
        with frontend.open(2) as stream, pytest.raises(EngineDeadError):
            stream.submit([([1], PARAMS), ([2], PARAMS)])
        assert frontend.num_running == 0
        assert len(wire.added()) == 1

    run(tokenizer, scenario)


def test_a_refusal_keeps_nothing_of_the_calls_it_refused(tokenizer: Tokenizer) -> None:
    class Body:
        """Stands for what a call holds while it is refused."""

    bodies: list[weakref.ref[Body]] = []

    def call(frontend: Frontend) -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        frontend.open(1)

    async def scenario(frontend: Frontend, wire: Wire) -> None:
        frontend.refuse(RequestError(503, "shutting_down", "the server is shutting down"))
        for _ in range(5):
            with contextlib.suppress(RequestError):
                call(frontend)
        assert [body() for body in bodies[:-1]] == [None] * 4

    run(tokenizer, scenario)
