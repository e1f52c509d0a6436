"""The API's handlers without a server."""

import asyncio
import re
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisgl.request import TokenLogprobs
from minisgl.server.admin import Admin
from minisgl.server.app import Api, Call, Tally, make_app
from minisgl.server.debug import Debug
from minisgl.server.frontend import Delta
from minisgl.server.middleware import CallFacts, Gate
from minisgl.server.openapi import openapi_document
from minisgl.server.replies import NO_FIELDS, Choice, Usage
from minisgl.server.text_threads import TextThreads
from minisgl.server.tokens import TokenApi
from minisgl.server.uploads import Uploads

NOTHING: Any = None


class Seen:
    """In place of an answer's shape and details: notes what comes, and in which thread it is written."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.choices: Sequence[Choice] = ()

    def take(self, *_: object) -> tuple[str, Any]:
        return "before ", NO_FIELDS

    def piece(self, _: int, text: str, reason: str | None, fields: Any) -> bytes:
        self.thread = threading.current_thread()
        return text.encode()

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        self.thread, self.choices = threading.current_thread(), choices
        return b"%d" % usage.prompt_tokens


@pytest.mark.parametrize(("num_tokens", "is_aside"), [(3, False), (5000, True)])
def test_details_of_a_long_prompt_do_not_hold_the_event_loop(num_tokens: int, is_aside: bool) -> None:
    seen = Seen()
    tally = Tally([[7] * num_tokens], 1, CallFacts("id"))
    call = Call(NOTHING, NOTHING, False, False, tally, cast(Any, [seen]))
    deltas = [[Delta(0, "te", 1, 0, None, [1]), Delta(0, "xt", 1, 0, "stop", [2])]]
    threads = TextThreads()
    api = Api(NOTHING, NOTHING, threads, NOTHING, 1.0)
    assert asyncio.run(api._whole(call, cast(Any, seen), deltas)) == b"%d" % num_tokens
    threads.close()
    assert seen.choices == [Choice("before text", "stop")]
    assert (seen.thread is not threading.main_thread()) == is_aside


@pytest.mark.parametrize(("num_tokens", "is_aside"), [(3, False), (5000, True)])
def test_the_first_event_about_a_long_prompt_does_not_hold_the_event_loop(
    num_tokens: int, is_aside: bool
) -> None:
    seen, threads = Seen(), TextThreads()
    api = Api(NOTHING, NOTHING, threads, NOTHING, 1.0)
    of_prompt = [TokenLogprobs(7, -1.0, 1, [], [])] * num_tokens
    delta = Delta(0, "text", 1, 0, None, [1], None, of_prompt)
    assert asyncio.run(api._events(cast(Any, seen), delta, cast(Any, seen))) == b"before text"
    threads.close()
    assert (seen.thread is not threading.main_thread()) == is_aside


def test_every_route_is_in_the_document_of_the_api() -> None:
    model: Any = SimpleNamespace(name="tiny", tokenizer=SimpleNamespace(vocab_size=300))
    app = make_app(
        Api(model, NOTHING, NOTHING, NOTHING, 1.0),
        TokenApi(model, NOTHING, NOTHING, NOTHING),
        Admin(model, NOTHING, NOTHING, NOTHING, NOTHING, (NOTHING, NOTHING), 1),
        Gate(),
        1,
    )
    Debug(NOTHING).add_routes(app)
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    paths = openapi_document("tiny", 300)["paths"]
    described = {(method, path) for path, item in paths.items() for method in item if method != "parameters"}
    assert routes == described


@pytest.mark.parametrize("vocab_size", [1, 6, 10, 11, 100, 101, 300, 1200])
def test_the_document_allows_exactly_the_models_token_ids(vocab_size: int) -> None:
    fields = openapi_document("tiny", vocab_size)["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["stop_token_ids"]["anyOf"][0]["items"]["maximum"] == vocab_size - 1
    keys = fields["logit_bias"]["anyOf"][0]["propertyNames"]["pattern"]
    allowed = [number for number in range(3000) if re.search(keys, str(number))]
    assert allowed == list(range(vocab_size))
    assert not any(re.search(keys, text) for text in ("", "00", "01", "-1", "1.0", " 1"))


def test_a_client_that_leaves_as_its_body_ends_is_noticed() -> None:
    class Leaving:
        transport = None

        async def read(self) -> bytes:
            reading.cancel()  # as the HTTP library does when the connection is lost
            return b"{}"

    async def scenario() -> None:
        nonlocal reading
        reading = asyncio.ensure_future(Uploads(10, 10, 60.0).read(cast(Any, Leaving())))
        await asyncio.wait([reading])

    reading: Any = None
    asyncio.run(scenario())
    assert reading.cancelled()
