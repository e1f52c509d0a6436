"""A large answer does not hold up the event loop while it is written."""

import asyncio
from typing import Any

import pytest
from aiohttp.payload import Payload

from minisgl.server.http.middleware import MAX_BYTES_AT_ONCE, json_answer


class Pieces:
    """A stream writer that keeps what it is given."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    async def write(self, piece: bytes) -> None:
        self.written.append(piece)


@pytest.mark.parametrize("num_bytes", [MAX_BYTES_AT_ONCE + 1, 5 * MAX_BYTES_AT_ONCE])
def test_a_large_answer_is_written_in_pieces_between_which_other_tasks_run(num_bytes: int) -> None:
    body = bytes(range(251)) * (num_bytes // 251 + 1)
    num_turns = 0

    async def other_task() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def main() -> Pieces:
        answer: Any = json_answer(body).body
        assert isinstance(answer, Payload)
        assert answer.size == len(body), "the answer announces its length"
        other, pieces = asyncio.create_task(other_task()), Pieces()
        await answer.write(pieces)  # pyright: ignore[reportArgumentType] (it is asked for nothing else)
        other.cancel()
        return pieces

    pieces = asyncio.run(main()).written
    assert b"".join(pieces) == body
    assert max(map(len, pieces)) <= MAX_BYTES_AT_ONCE
    assert num_turns >= len(pieces) - 1


def test_a_small_answer_is_one_piece() -> None:
    assert json_answer(b"{}").body == b"{}"
