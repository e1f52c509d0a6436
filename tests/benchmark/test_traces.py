"""Traces: what is read of each format, what scaling keeps, what is refused."""

import math
from fractions import Fraction
from pathlib import Path

import pytest

from minisgl.benchmark.load.traces import FORMATS, TraceRequest, read_trace, scale_trace
from minisgl.errors import ConfigError

TRACES = Path(__file__).resolve().parent.parent / "data" / "traces"


def test_mooncake_in_milliseconds_sorted_from_zero() -> None:
    first, second, third = read_trace(TRACES / "mooncake.jsonl")
    assert first == TraceRequest(
        arrival_s=0.0, num_prompt_tokens=1100, num_output_tokens=40, block_ids=(7, 8, 9), block_tokens=512
    )
    assert (second.arrival_s, second.block_ids) == (pytest.approx(0.1), (7, 11))
    assert (third.arrival_s, third.num_prompt_tokens) == (pytest.approx(0.25), 512)


def test_qwen_bailian_knows_its_conversations() -> None:
    requests = read_trace(TRACES / "qwen_bailian.jsonl")
    assert [request.arrival_s for request in requests] == [0.0, 0.25, 6.5, 8.5]
    assert [(request.conversation, request.turn) for request in requests] == [
        ("40", 1),
        ("41", 1),
        ("40", 2),
        ("40", 3),
    ]
    assert {request.block_tokens for request in requests} == {16}


def test_azure_over_midnight_without_its_empty_answer() -> None:
    assert read_trace(TRACES / "azure.csv") == [
        TraceRequest(arrival_s=0.0, num_prompt_tokens=120, num_output_tokens=30),
        TraceRequest(arrival_s=1.25, num_prompt_tokens=2000, num_output_tokens=7),
    ]


def test_azure_times_may_have_an_offset_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes(
        b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2024-05-12 00:00:00+00:00,5,6\r\n2024-05-12 02:00:00.5+02:00,7,8\r\n"
    )
    assert [request.arrival_s for request in read_trace(path)] == [0.0, 0.5]


def test_burstgpt_without_and_with_sessions() -> None:
    assert read_trace(TRACES / "burstgpt.csv") == [
        TraceRequest(arrival_s=0.0, num_prompt_tokens=300, num_output_tokens=20),
        TraceRequest(arrival_s=7.0, num_prompt_tokens=64, num_output_tokens=8),
    ]
    requests = read_trace(TRACES / "burstgpt_sessions.csv")
    assert [(request.conversation, request.turn) for request in requests] == [("aa", 1), ("bb", 1), ("aa", 2)]


def test_a_limit_takes_the_first_requests() -> None:
    assert len(read_trace(TRACES / "burstgpt.csv", limit=1)) == 1


def test_a_time_scale_multiplies_arrival_times() -> None:
    requests = read_trace(TRACES / "qwen_bailian.jsonl")
    assert [request.arrival_s for request in scale_trace(requests, time_scale=0.4)] == pytest.approx(
        [0.0, 0.1, 2.6, 3.4]
    )


@pytest.mark.parametrize("name", ["mooncake.jsonl", "qwen_bailian.jsonl"])
@pytest.mark.parametrize("scale", [Fraction(1, 8), Fraction(1, 2), Fraction(3)])
def test_a_length_scale_keeps_every_prompts_blocks(name: str, scale: Fraction) -> None:
    before = read_trace(TRACES / name)
    for old, new in zip(before, scale_trace(before, length_scale=scale), strict=True):
        assert new.num_prompt_tokens == math.ceil(old.num_prompt_tokens * scale)
        assert new.num_output_tokens == math.ceil(old.num_output_tokens * scale)
        assert new.block_ids == old.block_ids
        covered = math.ceil(old.num_prompt_tokens / old.block_tokens) == len(old.block_ids)
        assert covered == (math.ceil(new.num_prompt_tokens / new.block_tokens) == len(new.block_ids))


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"length_scale": Fraction(1, 3)}, "whole number"),
        ({"length_scale": Fraction(0)}, "--length-scale must be positive"),
        ({"time_scale": 0.0}, "--time-scale must be positive"),
        ({"time_scale": math.inf}, "--time-scale must be positive"),
    ],
)
def test_scales_that_make_no_sense_are_refused(scales: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scale_trace(read_trace(TRACES / "mooncake.jsonl"), **scales)


def test_the_formats_can_be_named_and_wrong_names_are_refused() -> None:
    assert len(read_trace(TRACES / "mooncake.jsonl", "mooncake")) == 3
    with pytest.raises(ConfigError, match="line 1: 3 blocks of 512"):
        read_trace(TRACES / "qwen_bailian.jsonl", "mooncake")
    with pytest.raises(ConfigError, match=", ".join(FORMATS)):
        read_trace(TRACES / "azure.csv", "azura")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "none of the traces known"),
        ("hello\n", "its first line is 'hello'"),
        ('{"a": 1}\n', "none of the traces known"),
        ("[1]\n", "none of the traces known"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\nsoon,1,1\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "line 2: invalid literal"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5\n", "line 2"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,5\n", "'GeneratedTokens' is missing"),
        ("Timestamp,Request tokens,Response tokens\nnan,5,5\n", "line 2: a time must be a finite"),
        ("Timestamp,Request tokens,Response tokens\n1,-5,5\n", "must not be negative"),
        ('{"timestamp":0,"input_length":9,"output_length":2,"hash_ids":[1]}\n{"timestamp":0\n', "line 2"),
        ('{"timestamp":0,"input_length":9,"output_length":2,"hash_ids":[1,2]}\n', "2 blocks of 512 tokens"),
        ('{"timestamp":0,"input_length":"9","output_length":2,"hash_ids":[]}\n', "input_length"),
        ('{"timestamp":0,"input_length":9,"output_length":2}\n', "hash_ids"),
    ],
)
def test_files_that_are_no_trace_are_refused_with_the_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(path)


def test_files_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the trace"):
        read_trace(tmp_path / "missing")
    with pytest.raises(ConfigError, match="can't read the trace"):
        read_trace(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="no text file"):
        read_trace(tmp_path / "bytes")
