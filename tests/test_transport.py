"""The sockets: order, bursts, a dead peer, last words."""

import asyncio
import shutil
import stat
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from minisgl.errors import EngineDeadError
from minisgl.ipc.messages import (
    IDS_PER_SERVER,
    SLICE_BYTES,
    SLICE_REQUESTS,
    AbortRequest,
    AddRequest,
    Fatal,
    Ready,
    Shutdown,
    StepOutput,
    ToEngine,
)
from minisgl.ipc.questions import CacheFlushed, FlushCache, Ping, Status
from minisgl.ipc.transport import EngineSocket, ServerSocket, make_ipc_dir
from minisgl.request import FinishReason, RequestOutput, SamplingParams

LIMIT_S = 10.0
GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def ipc_dir() -> Iterator[Path]:
    folder = make_ipc_dir()
    yield folder
    shutil.rmtree(folder)


def test_the_directory_is_private_and_never_the_same(ipc_dir: Path) -> None:
    other = make_ipc_dir()
    other.rmdir()
    assert other != ipc_dir
    assert stat.S_IMODE(ipc_dir.stat().st_mode) == 0o700
    assert len(str(ipc_dir)) < 80


def test_messages_of_every_kind_arrive_unchanged_and_in_order(ipc_dir: Path) -> None:
    params = SamplingParams(max_tokens=5, stop=("a", "b"), seed=7, stop_token_ids=(3,))
    down = [
        AddRequest(1, b"\x01\x00\x00\x00", params, 2),
        AbortRequest(1),
        Ping(9),
        FlushCache(3),
        Shutdown(),
    ]
    up = [
        Ready(100, 10, 16, 8, "cpu", {"import": 1.5}),
        StepOutput([RequestOutput(1, [5, 6]), RequestOutput(2, [], FinishReason.STOP, 3)]),
        Status(9, num_steps=4),
        CacheFlushed(3, 17),
        Fatal("no memory"),
    ]

    async def talk() -> None:
        server, engine = ServerSocket(ipc_dir), EngineSocket(ipc_dir)
        engine.send(up[0])
        received = [await asyncio.wait_for(server.receive(), LIMIT_S)]
        for message in down:
            server.send(message)
        for message in up[1:]:
            engine.send(message)
            received.append(await asyncio.wait_for(server.receive(), LIMIT_S))
        assert received == up
        arrived = []
        while len(arrived) < len(down):
            arrived += engine.receive(int(LIMIT_S * 1000))
        assert arrived == down
        assert engine.receive(0) == []
        engine.close()
        server.close()

    asyncio.run(talk())


def test_no_message_of_a_burst_is_lost_or_overtaken(ipc_dir: Path) -> None:
    count = 5000  # above zmq's default high-water mark of 1000

    async def talk() -> None:
        server, engine = ServerSocket(ipc_dir), EngineSocket(ipc_dir)
        engine.send(Status(0))
        await asyncio.wait_for(server.receive(), LIMIT_S)
        for sequence in range(count):
            server.send(Ping(sequence))
            engine.send(Status(sequence))
        for sequence in range(count):
            assert await asyncio.wait_for(server.receive(), LIMIT_S) == Status(sequence)
        arrived: list[object] = []
        while len(arrived) < count:
            arrived += engine.receive(int(LIMIT_S * 1000))
        assert arrived == [Ping(sequence) for sequence in range(count)]
        engine.close()
        server.close()

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("messages", "sizes"),
    [
        ([AddRequest(0, b"....", GREEDY)] * (SLICE_REQUESTS + 3), [SLICE_REQUESTS, 3]),
        ([AddRequest(0, b"....", GREEDY, num_choices=SLICE_REQUESTS - 1)] * 3, [2, 1]),
        ([AddRequest(0, bytes(SLICE_BYTES // 4), GREEDY)] * 6, [4, 2]),
        ([AbortRequest(1)] * (SLICE_REQUESTS + 3), [SLICE_REQUESTS + 3]),
    ],
)
def test_the_engine_takes_only_so_many_requests_between_two_steps(
    ipc_dir: Path, messages: list[ToEngine], sizes: list[int]
) -> None:
    waiting = deque(map(msgspec.msgpack.encode, messages))

    class Inbox:
        """A socket in which all messages wait already."""

        def poll(self, timeout_ms: int) -> bool:
            return bool(waiting)

        def recv(self, flags: int) -> bytes:
            return waiting.popleft()

    async def main() -> None:
        server, engine = ServerSocket(ipc_dir), EngineSocket(ipc_dir)
        real, engine._inbox = engine._inbox, cast(Any, Inbox())
        arrived = [engine.receive(0) for _ in sizes]
        assert [len(part) for part in arrived] == sizes
        assert [message for part in arrived for message in part] == messages
        engine._inbox = real
        engine.close()
        server.close()

    asyncio.run(main())


def test_each_server_process_gets_its_own_outputs_and_all_hear_what_is_for_all(ipc_dir: Path) -> None:
    mine, other = RequestOutput(1, [5]), RequestOutput(IDS_PER_SERVER + 1, [6], FinishReason.STOP)

    async def talk() -> None:
        servers = [ServerSocket(ipc_dir, index) for index in range(3)]
        engine = EngineSocket(ipc_dir, 3)
        engine.send(Fatal("no memory"))
        engine.send_outputs(StepOutput([mine, other, mine]))
        engine.send(Status(4), 2)
        heard = [[await asyncio.wait_for(server.receive(), LIMIT_S) for _ in range(2)] for server in servers]
        assert heard == [
            [Fatal("no memory"), StepOutput([mine, mine])],
            [Fatal("no memory"), StepOutput([other])],
            [Fatal("no memory"), Status(4)],
        ]
        for index, server in enumerate(servers):
            server.send(Ping(0, index))
        arrived: list[object] = []
        while len(arrived) < 3:
            arrived += engine.receive(int(LIMIT_S * 1000))
        assert sorted(ping.server for ping in arrived if isinstance(ping, Ping)) == [0, 1, 2]
        engine.close()
        for server in servers:
            server.close()

    asyncio.run(talk())


def test_sending_while_receiving_never_misses_a_wake_up(ipc_dir: Path) -> None:
    async def talk() -> None:
        server, engine = ServerSocket(ipc_dir), EngineSocket(ipc_dir)
        engine.send(Status(0))
        assert await asyncio.wait_for(server.receive(), LIMIT_S) == Status(0)
        for sequence in range(1, 300):
            waiting = asyncio.ensure_future(server.receive())
            await asyncio.sleep(0)
            server.send(Ping(sequence))
            engine.send(Status(sequence))
            server.send(Ping(sequence))
            assert await asyncio.wait_for(waiting, LIMIT_S) == Status(sequence)
        engine.close()
        server.close()

    asyncio.run(talk())


def test_a_cancelled_receive_loses_nothing(ipc_dir: Path) -> None:
    async def talk() -> None:
        server, engine = ServerSocket(ipc_dir), EngineSocket(ipc_dir)
        for sequence in range(50):
            waiting = asyncio.ensure_future(server.receive())
            await asyncio.sleep(0)
            engine.send(Status(sequence))
            waiting.cancel()
            try:
                got = await waiting
            except asyncio.CancelledError:
                got = await asyncio.wait_for(server.receive(), LIMIT_S)
            assert got == Status(sequence)
        engine.close()
        server.close()

    asyncio.run(talk())


def test_sending_to_no_engine_is_an_error_and_never_waits(ipc_dir: Path) -> None:
    async def talk() -> None:
        server = ServerSocket(ipc_dir)
        with pytest.raises(EngineDeadError):
            server.send(Ping(1))
        server.close()

    asyncio.run(talk())


def test_the_last_words_of_an_engine_get_out(ipc_dir: Path) -> None:
    script = """
        import sys
        from minisgl.ipc.messages import Fatal
        from minisgl.ipc.transport import EngineSocket
        socket = EngineSocket(sys.argv[1])
        socket.send(Fatal("x" * 100_000))
        socket.close()
    """

    async def talk() -> None:
        server = ServerSocket(ipc_dir)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", textwrap.dedent(script), str(ipc_dir)
        )
        assert await asyncio.wait_for(server.receive(), LIMIT_S) == Fatal("x" * 100_000)
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
        server.close()

    asyncio.run(talk())


def test_an_engine_whose_server_is_gone_can_still_close(ipc_dir: Path) -> None:
    engine = EngineSocket(ipc_dir)
    engine.send(Fatal("nobody hears this"))
    engine.close()
    engine.close()


def test_the_text_and_server_side_load_neither_torch_nor_transformers() -> None:
    modules = (
        "minisgl.ipc.transport, minisgl.text.chat_template, minisgl.text.reply, "
        "minisgl.server.app, minisgl.server.engines.launch, minisgl.server.streams"
    )
    check = "import sys; assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import {modules}; {check}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
