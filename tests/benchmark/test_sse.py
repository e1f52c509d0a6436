"""Streams: every event counted once however the bytes are cut; tokens only from usage."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.benchmark.load.sse import AnswerStream, BadEventError, StreamedServerError, Usage


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(words: str, finish: str | None = None) -> bytes:
    return event(choices=[{"text": words, "finish_reason": finish}], usage=None)


def delta(finish: str | None = None, **fields: object) -> bytes:
    return event(choices=[{"delta": fields, "finish_reason": finish}])


def usage(num: int, **more: object) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": num, **more})


DONE = b"data: [DONE]\n\n"


def stream_of(reads: list[bytes], is_chat: bool = False, keep_text: bool = False) -> AnswerStream:
    """Read number i comes at second i."""
    stream = AnswerStream(is_chat, keep_text)
    for at, read in enumerate(reads):
        stream.feed(read, float(at))
    stream.finish()
    return stream


def arrivals(stream: AnswerStream) -> list[tuple[float, int]]:
    return [(at, count) for at, count in zip(stream.times, stream.counts, strict=True) if count]


def test_one_event_to_a_read() -> None:
    stream = stream_of([text(" a"), text(" b"), text(" c", "length"), usage(3), DONE])
    assert arrivals(stream) == [(0, 1), (1, 1), (2, 1)]
    assert stream.usage == Usage(9, 3)
    assert Usage(9, 3).num_cached_tokens is None
    assert (stream.finish_reason, stream.is_done, stream.ended_at) == ("length", True, 2)


def test_cached_tokens_come_from_the_details() -> None:
    stream = stream_of([text("a", "stop"), usage(1, prompt_tokens_details={"cached_tokens": 5}), DONE])
    assert stream.usage is not None
    assert stream.usage.num_cached_tokens == 5


def test_long_streams_are_counted_without_being_kept() -> None:
    reads = [text(" a") for _ in range(100)]
    stream = stream_of([*reads, text(" a") + text(" a", "length") + usage(102) + DONE])
    assert arrivals(stream) == [*((at, 1) for at in range(100)), (100, 2)]


@given(st.data())
def test_no_cut_of_the_bytes_changes_the_count(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 30))
    words = st.text(st.sampled_from('a \\"{}\n:é中')).map(lambda word: word + "data: x\n\ndata: ")
    newline = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    parts = [b": ping\n\n" * data.draw(st.integers(0, 1)) + text(data.draw(words)) for _ in range(num - 1)]
    whole = b"".join([*parts, text("end", "length"), usage(num), DONE]).replace(b"\n", newline)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=40)))
    stream = AnswerStream(is_chat=False)
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        if whole[start:end]:
            stream.feed(whole[start:end], float(start))
    stream.finish()
    assert sum(stream.counts) == num
    assert (stream.usage, stream.is_done, stream.finish_reason) == (Usage(9, num), True, "length")


def test_an_event_counts_when_its_end_has_come() -> None:
    first = text(" a")
    stream = stream_of(
        [first[:20], first[20:] + text(" b")[:-1], b"\n", text("", "length") + usage(2) + DONE]
    )
    assert arrivals(stream) == [(1, 1), (2, 1)]


def test_the_last_event_may_lack_its_blank_line() -> None:
    stream = stream_of([text(" a", "stop"), usage(1), b"data: [DONE]"])
    assert (stream.is_done, sum(stream.counts)) == (True, 1)


def test_a_chats_role_and_bare_finish_are_no_tokens() -> None:
    opening = delta(role="assistant", content="")
    stream = stream_of(
        [opening, delta(content="a") + delta(content="b"), delta("stop"), usage(2), DONE], True
    )
    assert arrivals(stream) == [(1, 2)]
    assert stream.ended_at == 2


def test_reasoning_is_output_too() -> None:
    stream = stream_of([delta(reasoning_content="hm"), delta("stop", content="b"), usage(2), DONE], True)
    assert arrivals(stream) == [(0, 1), (1, 1)]


def test_a_bare_finish_stands_for_a_token_that_has_no_event() -> None:
    stream = stream_of([text(" a"), text(""), text("", "stop"), usage(3), DONE])
    assert arrivals(stream) == [(0, 1), (1, 1), (2, 1)]
    stream = stream_of([text(" a"), text(" b"), text("", "stop"), usage(2), DONE])
    assert arrivals(stream) == [(0, 1), (1, 1)]
    only = stream_of([delta(role="assistant"), delta("stop"), usage(1), DONE], True)
    assert arrivals(only) == [(1, 1)]


def test_usage_in_every_chunk_is_not_taken_for_its_end() -> None:
    chunk = {"choices": [{"text": "a", "finish_reason": None}]}
    reads = [event(**chunk, usage={"prompt_tokens": 9, "completion_tokens": num}) for num in (1, 2)]
    stream = stream_of([*reads, text("b", "stop"), usage(3), DONE])
    assert (sum(stream.counts), stream.usage) == (3, Usage(9, 3))


def test_the_text_is_kept_when_asked_for() -> None:
    reads = [text(f" {number}") for number in range(50)]
    assert stream_of([*reads, text("!", "stop"), usage(51)], keep_text=True).text == (
        "".join(f" {number}" for number in range(50)) + "!"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"error": {"message": "engine died", "type": "server_error"}},
        {"error": "engine died"},
        {"object": "error", "message": "engine died"},
    ],
)
@pytest.mark.parametrize("place", [0, 1, 6])
def test_an_error_object_ends_the_stream(fields: dict, place: int) -> None:
    reads = [text(" a") for _ in range(8)]
    reads[place] = event(**fields)
    with pytest.raises(StreamedServerError, match="engine died"):
        stream_of([*reads, DONE])


def test_text_that_speaks_of_errors_is_text() -> None:
    stream = stream_of([text("a"), text('"error": {"error": 1}'), text("b", "stop"), usage(3), DONE])
    assert sum(stream.counts) == 3


@pytest.mark.parametrize(
    "data", [b"data: {]\n\n", b"data: 7\n\n", b'data: {"choices": 3}\n\n', b"data: \xff\n\n"]
)
def test_what_is_no_chunk_is_refused(data: bytes) -> None:
    with pytest.raises(BadEventError):
        stream_of([data])
    with pytest.raises(BadEventError):
        stream_of([text("a"), data])
