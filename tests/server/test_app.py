"""The API's handlers without a server."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from minisgl.server.app import Api, Call, Tally
from minisgl.server.frontend import Delta
from minisgl.server.middleware import CallFacts
from minisgl.server.replies import NO_FIELDS, Choice, Usage
from minisgl.server.text_threads import TextThreads


class Seen:
    """In place of an answer's shape and details: notes what comes, and in which thread."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.choices: Sequence[Choice] = ()

    def take(self, *_: object) -> tuple[str, Any]:
        return "before ", NO_FIELDS

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        self.thread, self.choices = threading.current_thread(), choices
        return b"%d" % usage.prompt_tokens


@pytest.mark.parametrize(("num_tokens", "is_aside"), [(3, False), (5000, True)])
def test_details_of_a_long_prompt_do_not_hold_the_event_loop(num_tokens: int, is_aside: bool) -> None:
    seen = Seen()
    tally = Tally([[7] * num_tokens], 1, CallFacts("id"))
    call = Call(cast(Any, None), cast(Any, None), False, False, tally, cast(Any, [seen]))
    deltas = [[Delta(0, "te", 1, 0, None, [1]), Delta(0, "xt", 1, 0, "stop", [2])]]
    threads = TextThreads()
    api = Api(cast(Any, None), cast(Any, None), threads, cast(Any, None), 1.0)
    assert asyncio.run(api._whole(call, cast(Any, seen), deltas)) == b"%d" % num_tokens
    threads.close()
    assert seen.choices == [Choice("before text", "stop")]
    assert (seen.thread is not threading.main_thread()) == is_aside
