"""Reads traces of real services: arrival times, lengths, and which parts of prompts are equal.

Promise: a faulty line raises an error that names it. Requests are sorted by arrival, and the first arrives
at 0 s. Torch-free. `FORMATS` lists the formats; a file's content tells which one it has.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from fractions import Fraction
from itertools import islice
from pathlib import Path

import msgspec

from minisgl.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
QWEN_BAILIAN_BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One request of a trace. Where two requests have equal block ids, their prompts have equal tokens."""

    arrival_s: float
    """Since the first request of the trace."""
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    """The prompt's blocks from its start; the last one may be partial. Empty: not recorded."""
    block_tokens: int = 0
    """Tokens of a whole block; 0 without block ids."""
    conversation: str | None = None
    """The same for all turns of a conversation; None where the trace has no conversations."""
    turn: int = 1
    """The turn's number in its conversation, from 1."""


def read_trace(path: Path, format: str | None = None, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests in a file (None = all); `format` None = detect it.

    Requests with an empty prompt or answer are left out, because a server can't replay them (BurstGPT's
    failures have 0 response tokens).

    Raises:
        ConfigError: no such file, an unknown format, or a line that does not fit it.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"the trace format must be one of {', '.join(FORMATS)}, got {format!r}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = Lines(path, file)
            reader = FORMATS[format] if format is not None else _recognise(lines)
            try:
                complete = (one for one in reader(lines) if one.num_prompt_tokens and one.num_output_tokens)
                requests = list(islice(complete, limit))
            except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
                words = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
                raise ConfigError(f"{path}, line {lines.number}: {words}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text file"
        raise ConfigError(f"can't read the trace {path}: {reason}") from None
    if not requests:
        raise ConfigError(f"the trace {path} has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    start_s = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - start_s) for request in requests]


def scale_trace(
    requests: Sequence[TraceRequest], *, length_scale: Fraction = Fraction(1), time_scale: float = 1.0
) -> list[TraceRequest]:
    """The same trace with other lengths and at another pace.

    Args:
        length_scale: lengths of prompts, outputs and blocks are multiplied by it, rounded up. Each prompt
            keeps its blocks, so the parts of prompts that were equal stay equal.
        time_scale: arrival times are multiplied by it: 0.5 is twice the request rate, 2 half of it. (As in
            mini-sglang's online benchmark, `scale_traces`.)

    Raises:
        ConfigError: a scale is not positive, or a block would not have a whole number of tokens.
    """
    if not length_scale > 0:
        raise ConfigError(f"--length-scale must be positive, got {length_scale}")
    if not 0 < time_scale < math.inf:
        raise ConfigError(f"--time-scale must be positive, got {time_scale:g}")
    for block_tokens in {request.block_tokens for request in requests}:
        if (block_tokens * length_scale).denominator != 1:
            raise ConfigError(
                f"--length-scale {length_scale} makes {float(block_tokens * length_scale):g} tokens of this "
                f"trace's blocks of {block_tokens}; it must be a whole number (1/2, 1/4, 1/8 ...)"
            )
    return [
        replace(
            request,
            arrival_s=request.arrival_s * time_scale,
            num_prompt_tokens=math.ceil(request.num_prompt_tokens * length_scale),
            num_output_tokens=math.ceil(request.num_output_tokens * length_scale),
            block_tokens=int(request.block_tokens * length_scale),
        )
        for request in requests
    ]


class Lines:
    """Iterates over a file's lines that are not blank; counts lines for error messages."""

    def __init__(self, path: Path, lines: Iterable[str]) -> None:
        self.path = path
        self.number = 0
        self._lines = iter(lines)
        self._first: str | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        while True:
            line = next(self._lines)
            self.number += 1
            if line.strip():
                return line

    def first(self) -> str:
        """The next line, without consuming it; "" at the end."""
        if self._first is None:
            self._first = next(self, "")
        return self._first


Reader = Callable[[Lines], Iterator[TraceRequest]]


def _recognise(lines: Lines) -> Reader:
    first = lines.first()
    if first.lstrip().startswith("{"):
        try:
            names = set(msgspec.json.decode(first))
        except (msgspec.MsgspecError, TypeError):
            names = set()
        if {"chat_id", "input_length"} <= names:
            return _read_qwen_bailian
        if {"timestamp", "input_length"} <= names:
            return _read_mooncake
    else:
        names = {name.strip() for name in first.split(",")}
        if {"TIMESTAMP", "ContextTokens"} <= names:
            return _read_azure
        if {"Timestamp", "Request tokens"} <= names:
            return _read_burstgpt
    raise ConfigError(
        f"{lines.path} is none of the traces known here ({', '.join(FORMATS)}); "
        f"its first line is {first.strip()[:80]!r}"
    )


class Recorded(msgspec.Struct):
    """A JSON line of a trace; Mooncake's lines have no chat ids."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    chat_id: int = -1
    parent_chat_id: int = -1
    """-1: the request begins a conversation."""
    turn: int = 1


def _read_mooncake(lines: Lines) -> Iterator[TraceRequest]:
    """JSON lines with timestamp (ms), input_length, output_length, hash_ids of 512-token blocks
    (https://github.com/kvcache-ai/Mooncake)."""
    for line in lines:
        recorded = msgspec.json.decode(line, type=Recorded)
        yield _request(recorded, recorded.timestamp / 1000, MOONCAKE_BLOCK_TOKENS)


def _read_qwen_bailian(lines: Lines) -> Iterator[TraceRequest]:
    """JSON lines with chat_id, parent_chat_id, timestamp (s), turn, hash_ids of 16-token blocks
    (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon)."""
    conversations: dict[int, int] = {}  # chat id -> the id that its conversation began with
    for line in lines:
        recorded = msgspec.json.decode(line, type=Recorded)
        parent = recorded.parent_chat_id
        conversation = recorded.chat_id if parent < 0 else conversations.get(parent, parent)
        conversations[recorded.chat_id] = conversation
        request = _request(recorded, recorded.timestamp, QWEN_BAILIAN_BLOCK_TOKENS)
        yield replace(request, conversation=str(conversation), turn=recorded.turn)


def _request(recorded: Recorded, arrival_s: float, block_tokens: int) -> TraceRequest:
    num_prompt_tokens = _count("input_length", recorded.input_length)
    if len(recorded.hash_ids) > math.ceil(num_prompt_tokens / block_tokens):
        raise ValueError(
            f"{len(recorded.hash_ids)} blocks of {block_tokens} tokens for a prompt of {num_prompt_tokens}"
        )
    return TraceRequest(
        arrival_s=_finite(arrival_s),
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=_count("output_length", recorded.output_length),
        block_ids=tuple(recorded.hash_ids),
        block_tokens=block_tokens,
    )


def _read_azure(lines: Lines) -> Iterator[TraceRequest]:
    """CSV with TIMESTAMP, ContextTokens, GeneratedTokens (https://github.com/Azure/AzurePublicDataset)."""
    for row in csv.DictReader(lines, skipinitialspace=True):
        yield TraceRequest(
            arrival_s=_seconds(row["TIMESTAMP"]),
            num_prompt_tokens=_count("ContextTokens", int(row["ContextTokens"])),
            num_output_tokens=_count("GeneratedTokens", int(row["GeneratedTokens"])),
        )


def _read_burstgpt(lines: Lines) -> Iterator[TraceRequest]:
    """CSV with Timestamp (s), Request tokens, Response tokens; some files have a Session ID
    (https://github.com/HPMLL/BurstGPT)."""
    turns: dict[str, int] = {}
    for row in csv.DictReader(lines, skipinitialspace=True):
        conversation = row.get("Session ID") or None
        if conversation is not None:
            turns[conversation] = turns.get(conversation, 0) + 1
        yield TraceRequest(
            arrival_s=_finite(float(row["Timestamp"])),
            num_prompt_tokens=_count("Request tokens", int(row["Request tokens"])),
            num_output_tokens=_count("Response tokens", int(row["Response tokens"])),
            conversation=conversation,
            turn=turns.get(conversation or "", 1),
        )


FORMATS: Mapping[str, Reader] = {
    "mooncake": _read_mooncake,
    "qwen-bailian": _read_qwen_bailian,
    "azure": _read_azure,
    "burstgpt": _read_burstgpt,
}


def _seconds(text: str) -> float:
    """Unix time of "2023-11-16 18:15:46.6805900" or "2024-05-12 00:00:00.1+00:00"; UTC without an offset."""
    day, _, clock = text.strip().replace("T", " ").partition(" ")
    offset_at = max(clock.rfind("+"), clock.rfind("-"))
    offset = clock[offset_at:] if offset_at >= 0 else "+00:00"
    whole, _, fraction = (clock[:offset_at] if offset_at >= 0 else clock.removesuffix("Z")).partition(".")
    moment = datetime.fromisoformat(f"{day} {whole}{offset}").astimezone(timezone.utc)
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _count(name: str, number: int) -> int:
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {number}")
    return number


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"a time must be a finite number of seconds, got {seconds}")
    return seconds
