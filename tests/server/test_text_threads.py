"""Text of any length, on the event loop or in threads: short texts never wait for long ones."""

import asyncio
import sys
import threading

import pytest

from minisgl.server.text_threads import INLINE_BYTES, LONG_BYTES, NUM_LONG, NUM_SHORT, TextThreads

LIMIT_S = 10.0


def test_a_short_text_never_waits_for_long_ones() -> None:
    done = threading.Event()

    async def scenario() -> None:
        threads = TextThreads()
        long_ones = [
            asyncio.ensure_future(threads.run(LONG_BYTES + 1, lambda: done.wait(LIMIT_S)))
            for _ in range(NUM_SHORT + NUM_LONG)
        ]
        try:
            for num_bytes in (1, INLINE_BYTES + 1, LONG_BYTES):
                answer = threads.run(num_bytes, lambda: "short")
                assert await asyncio.wait_for(answer, LIMIT_S / 2) == "short"
            assert not any(one.done() for one in long_ones)
        finally:
            done.set()
        assert await asyncio.gather(*long_ones) == [True] * len(long_ones)
        threads.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("num_bytes", "name"),
    [(INLINE_BYTES, "MainThread"), (INLINE_BYTES + 1, "text_0"), (LONG_BYTES + 1, "long-text_0")],
)
def test_only_the_shortest_texts_are_handled_on_the_event_loop(num_bytes: int, name: str) -> None:
    async def scenario() -> str:
        threads = TextThreads()
        try:
            return await threads.run(num_bytes, lambda: threading.current_thread().name)
        finally:
            threads.close()

    assert asyncio.run(scenario()) == name


def test_a_thread_that_runs_python_gives_way_to_the_event_loop_within_a_millisecond() -> None:
    before = sys.getswitchinterval()
    try:
        TextThreads().close()
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before)
