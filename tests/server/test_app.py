"""The API's handlers without a server."""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from unittest.mock import Mock

import pytest
from aiohttp import StreamReader
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from served_routes import model, served_routes
from small_model import CONTEXT
from virtual_time import run_in_virtual_time

from minisgl.errors import RequestError
from minisgl.request import PackedLogprobs, SamplingParams
from minisgl.server.apis.completions import CompletionCall
from minisgl.server.apis.generate import PlainTextFormat
from minisgl.server.app import make_app
from minisgl.server.calls import completer as completer_module
from minisgl.server.calls.call import CallOptions
from minisgl.server.calls.completer import WRITE_GRACE_S, Completer, OpenCall
from minisgl.server.calls.usage_counter import UsageCounter
from minisgl.server.http.middleware import CallFacts, Gate
from minisgl.server.http.openapi import openapi_document
from minisgl.server.http.uploads import STALL_BYTES, Uploads
from minisgl.server.keys.meter import Meters
from minisgl.server.model_in_use import ModelInUse
from minisgl.server.open_choices import Delta
from minisgl.server.page import is_page
from minisgl.server.streams import Stream, Streams
from minisgl.server.text_threads import TextThreads

NOTHING: Any = None


class Seen:
    """In place of an answer's format: notes what comes, and in which thread it is written."""

    is_slow = True

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.choices: Sequence[Delta] = ()

    def piece(self, delta: Delta) -> bytes:
        self.thread = threading.current_thread()
        return delta.text.encode()

    def whole(self, choices: Sequence[Delta]) -> bytes:
        self.thread, self.choices = threading.current_thread(), choices
        return b"whole"


@pytest.mark.parametrize(("num_tokens", "is_aside"), [(3, False), (5000, True)])
def test_details_of_a_long_prompt_do_not_hold_the_event_loop(num_tokens: int, is_aside: bool) -> None:
    seen = Seen()
    counter = UsageCounter(1, 1, CallFacts("id"))
    counter.count_prompts([[7] * num_tokens])
    call = OpenCall(NOTHING, counter, cast(Any, seen), False)
    deltas = [[Delta(0, "te", 1, 0, None, [1]), Delta(0, "xt", 1, 0, "stop", [2])]]
    threads = TextThreads()
    completer = Completer(NOTHING, NOTHING, threads, NOTHING, 1.0, NOTHING)
    assert asyncio.run(completer._whole(call, deltas)) == b"whole"
    threads.close()
    assert [(choice.text, choice.finish_reason, choice.token_ids) for choice in seen.choices] == [
        ("text", "stop", [1, 2])
    ]
    assert (seen.thread is not threading.main_thread()) == is_aside


@pytest.mark.parametrize(("num_tokens", "is_aside"), [(3, False), (5000, True)])
def test_the_first_event_about_a_long_prompt_does_not_hold_the_event_loop(
    num_tokens: int, is_aside: bool
) -> None:
    seen, threads = Seen(), TextThreads()
    completer = Completer(NOTHING, NOTHING, threads, NOTHING, 1.0, NOTHING)
    of_prompt = PackedLogprobs(bytes(4 * num_tokens), bytes(8 * num_tokens))
    delta = Delta(0, "text", 1, 0, None, [1], None, of_prompt)
    assert asyncio.run(completer._events(cast(Any, seen), delta)) == b"text"
    threads.close()
    assert (seen.thread is not threading.main_thread()) == is_aside


@pytest.mark.parametrize(("num_prompts", "n", "is_aside"), [(2, 3, False), (1000, 1, True), (8, 125, True)])
def test_many_choices_are_built_in_a_thread_however_short_the_body_is(
    monkeypatch: pytest.MonkeyPatch, num_prompts: int, n: int, is_aside: bool
) -> None:
    found: list[threading.Thread] = []

    def prepare(*_: object) -> NoReturn:
        found.append(threading.current_thread())
        raise RequestError(400, "stop", "the test has seen enough")

    @contextlib.asynccontextmanager
    async def body(_: object) -> AsyncIterator[bytes]:
        yield b"{}"

    async def main() -> None:
        threads, streams = TextThreads(), Streams(lambda _: None, NOTHING, 1000, 60.0)
        streams.accept_requests(CONTEXT)
        call = CompletionCall([[7]] * num_prompts, CallOptions(SamplingParams(), n=n))
        served: Any = SimpleNamespace(check_name=lambda _: None, tokenizer=NOTHING, name="tiny")
        uploads, meters = cast(Any, SimpleNamespace(body=body)), Meters(streams.stats, None)
        model = ModelInUse(served, NOTHING, NOTHING, 60.0)
        completer = Completer(model, streams, threads, uploads, 60.0, meters)
        request = make_mocked_request("POST", "/")
        with contextlib.ExitStack() as stack, pytest.raises(RequestError, match="seen enough"):
            await completer._receive(request, lambda *_: call, stack)
        threads.close()

    monkeypatch.setattr(completer_module, "facts_of", lambda _: CallFacts("id"))
    monkeypatch.setattr(Stream, "prepare", prepare)
    asyncio.run(main())
    assert [thread is not threading.main_thread() for thread in found] == [is_aside]


def test_a_client_that_stops_reading_is_cut_off_some_time_after_the_last_token_and_no_sooner() -> None:
    timeout_s, pause_s, num_tokens = 60.0, 50.0, 40

    async def main() -> None:
        loop = asyncio.get_running_loop()
        streams = Streams(lambda _: None, NOTHING, 1, timeout_s)
        streams.accept_requests(CONTEXT)
        aborted_at = loop.create_future()
        transport = Mock(abort=lambda: aborted_at.set_result(loop.time()))
        request = make_mocked_request("POST", "/", transport=transport, writer=Mock(write_headers=nothing))
        written: list[bytes] = []

        async def write(data: bytes, *_: object) -> None:
            written.append(data)
            if len(written) > num_tokens:  # from now on the client does not read
                await aborted_at
                raise ConnectionResetError

        async def give(stream: Stream) -> None:
            for number in range(num_tokens + 1):
                await asyncio.sleep(pause_s)
                stream.put(Delta(0, "a", 1, 0, "stop" if number == num_tokens else None, [1]))

        request._payload_writer.write = write  # pyright: ignore[reportAttributeAccessIssue] (a mock)
        with streams.open(1) as stream:
            giving = asyncio.ensure_future(give(stream))
            completer = Completer(NOTHING, streams, NOTHING, NOTHING, timeout_s, NOTHING)
            call = OpenCall(stream, UsageCounter(1, 1, CallFacts("id")), PlainTextFormat(), True)
            await completer._send_stream(request, call)
            await giving
        assert aborted_at.result() == (num_tokens + 1) * pause_s + timeout_s + WRITE_GRACE_S

    async def nothing(*_: object) -> None:
        pass

    run_in_virtual_time(main())


def test_every_route_is_in_the_document_of_the_api() -> None:
    app = make_app(served_routes(), ModelInUse(model(300), NOTHING, NOTHING, 1.0), Gate())
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None
        and route.method not in ("HEAD", "*")  # "*": not_served.py
        and not is_page(route.resource.canonical)
    }
    handlers = {route.resource.canonical: route.handler for route in app.router.routes() if route.resource}
    answer = asyncio.run(cast(Any, handlers["/openapi.json"])(NOTHING))
    paths = json.loads(answer.body)["paths"]
    described = {(method, path) for path, item in paths.items() for method in item if method != "parameters"}
    assert routes == described


@pytest.mark.parametrize("vocab_size", [1, 6, 10, 11, 100, 101, 300, 1200])
def test_the_document_allows_exactly_the_models_token_ids(vocab_size: int) -> None:
    fields = openapi_document(served_routes(), "tiny", vocab_size)["components"]["schemas"]["ChatBody"][
        "properties"
    ]
    assert fields["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == vocab_size - 1
    keys = fields["logit_bias"]["anyOf"][0]["propertyNames"]["pattern"]
    allowed = [number for number in range(3000) if re.search(keys, str(number))]
    assert allowed == list(range(vocab_size))
    assert not any(re.search(keys, text) for text in ("", "00", "01", "-1", "1.0", " 1"))


def test_a_client_that_leaves_as_its_body_ends_is_noticed() -> None:
    uploads = Uploads(10, 10, 60.0)

    async def read(upload: Coming) -> None:
        async with uploads.body(upload.request):
            raise AssertionError("nobody waits for the answer")

    async def scenario() -> None:
        upload = Coming()
        reading = asyncio.ensure_future(read(upload))
        await asyncio.sleep(0)
        upload.content.feed_data(b"{}")
        upload.content.feed_eof()
        reading.cancel()  # as the HTTP library does when the connection is lost
        await asyncio.wait([reading])
        assert reading.cancelled()
        assert uploads.num_bytes == 0

    asyncio.run(scenario())


def test_only_bytes_that_came_take_room() -> None:
    uploads = Uploads(100, 150, 60.0)

    async def scenario() -> None:
        held = [Coming(Content_Length="100") for _ in range(10)] + [Coming() for _ in range(20)]
        reading = [asyncio.ensure_future(whole(uploads, one)) for one in held]
        await asyncio.sleep(0)
        assert uploads.num_bytes == 0
        for one in held[:2]:
            one.content.feed_data(b"x" * 60)
        await asyncio.sleep(0)
        assert uploads.num_bytes == 120
        held[2].content.feed_data(b"x" * 31)
        with pytest.raises(RequestError, match="too many request bodies") as refused:
            await reading[2]
        assert refused.value.status == 429
        held[0].content.feed_eof()
        assert await reading[0] == b"x" * 60
        held[3].content.feed_data(b"x" * 90)
        held[3].content.feed_eof()
        assert await reading[3] == b"x" * 90
        for one in reading:
            one.cancel()
        await asyncio.wait(reading)
        assert uploads.num_bytes == 0

    asyncio.run(scenario())


def test_a_body_may_come_slowly_but_not_stall() -> None:
    uploads = Uploads(10**6, 10**6, 60.0, stall_s=10.0)

    async def scenario() -> None:
        loop, now = asyncio.get_running_loop(), [0.0]
        loop.time = lambda: now[0]
        slow, stalled, dripping = Coming(), Coming(), Coming()
        reading = [asyncio.ensure_future(whole(uploads, one)) for one in (slow, stalled, dripping)]
        stalled.content.feed_data(b"x" * 5000)
        for now[0] in range(59):
            slow.content.feed_data(b"x" * (STALL_BYTES // 10 + 1))
            dripping.content.feed_data(b"x")
            await settle()
            assert [one.done() for one in reading] == [False, now[0] >= 20, now[0] >= 10]
        for one in reading[1:]:
            with pytest.raises(RequestError, match="stalled") as refused:
                await one
            assert refused.value.status == 408
        now[0] = 60.0
        await settle()
        with pytest.raises(RequestError, match="not complete within 60 s"):
            await reading[0]
        assert uploads.num_bytes == 0

    asyncio.run(scenario())


async def settle() -> None:
    """Let the event loop do everything that is due."""
    for _ in range(5):
        await asyncio.sleep(0)


class Coming:
    """A request whose body comes as the test feeds it."""

    def __init__(self, **headers: str) -> None:
        protocol: Any = Mock(connected=True, _reading_paused=False)
        self.content = StreamReader(protocol, 2**16, loop=asyncio.get_running_loop())
        named = CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()})
        self.request: Any = make_mocked_request("POST", "/", named, payload=self.content)


async def whole(uploads: Uploads, upload: Coming) -> bytes:
    async with uploads.body(upload.request) as body:
        return body
