"""One engine as a server process sees it: what may happen between two lives, and while a suspect is tried."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np

from minisgl.ipc.messages import AbortRequest, AddRequest, Ready, StepOutput
from minisgl.ipc.transport import EngineSocket, ServerSocket, make_ipc_dir
from minisgl.request import FinishReason, RequestOutput, SamplingParams
from minisgl.server.engines.sent_requests import NEAR_TOKENS
from minisgl.server.engines.served_engine import Reader, ServedEngine
from minisgl.server.processes.engine_followers import EngineFollower

LIMIT_S = 10.0
READY = Ready(64, 9, 4, 2, "none", {})


class Given:
    """What the engine's reader was given: of each request its tokens, and how it ended."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[str]] = {}

    def take(self, step: StepOutput) -> None:
        for one in step.outputs:
            self.tokens.setdefault(one.request_id, []).extend(one.token_ids)
            if one.finish_reason is not None:
                code = one.error_code or one.finish_reason.value
                self.ends.setdefault(one.request_id, []).append(code)


class Lives:
    """A served engine whose processes are sockets of the test."""

    def __init__(self, folder: Path) -> None:
        self.given = Given()
        self._folder = folder
        self.engine = ServedEngine(0, 0, ServerSocket(self._dir(1)))
        self.engine.listen(Reader(self.given.take, lambda _: None, lambda _: None, lambda _: None))
        self.process = EngineSocket(self._dir(1))

    def next_life(self) -> None:
        self.process.close()
        generation = self.engine.generation + 1
        self.engine.begin(generation, ServerSocket(self._dir(generation)))
        self.process = EngineSocket(self._dir(generation))

    async def make_ready(self) -> None:
        self.process.send(READY)
        await asyncio.wait_for(asyncio.shield(self.engine.link.ready), LIMIT_S)

    async def give(self, *outputs: RequestOutput, until: Callable[[], bool]) -> None:
        self.process.send_outputs(StepOutput(list(outputs)))
        deadline = time.monotonic() + LIMIT_S
        while not until():
            assert time.monotonic() < deadline, "the outputs were not read"
            await asyncio.sleep(0)

    async def messages(self, number: int) -> list[AddRequest | AbortRequest]:
        """So many messages that the process has got."""
        found: list[AddRequest | AbortRequest] = []
        deadline = time.monotonic() + LIMIT_S
        while len(found) < number:
            assert time.monotonic() < deadline, f"the process got only {found}"
            messages = self.process.receive(0)
            found += [one for one in messages if isinstance(one, AddRequest | AbortRequest)]
            await asyncio.sleep(0)
        return found

    def close(self) -> None:
        self.engine.close()
        self.process.close()

    def _dir(self, generation: int) -> Path:
        folder = self._folder / str(generation)
        folder.mkdir(exist_ok=True)
        return folder


@asynccontextmanager
async def running() -> AsyncIterator[Lives]:
    folder = make_ipc_dir()
    lives = Lives(folder)
    try:
        await lives.make_ready()
        await lives.engine.resume()
        yield lives
    finally:
        lives.close()
        for one in [*folder.glob("*/*"), *folder.glob("*"), folder]:
            with suppress(FileNotFoundError):
                one.rmdir() if one.is_dir() else one.unlink()


def request(number: int) -> AddRequest:
    prompt = np.arange(3, dtype="<i4").tobytes()
    return AddRequest(number, prompt, SamplingParams(max_tokens=50, temperature=0.0))


def test_a_client_may_leave_between_two_lives() -> None:
    async def main() -> None:
        async with running() as lives:
            lives.engine.send(request(1))
            lives.engine.lose("it was killed")
            lives.engine.send(AbortRequest(1))
            assert not lives.engine.has(1)
            assert await lives.engine.link.ask_status(LIMIT_S) is None, "nobody is there to answer"

    asyncio.run(main())


def test_a_request_that_is_taken_back_from_its_trial_goes_on_even_if_the_life_ends_then() -> None:
    async def main() -> None:
        async with running() as lives:
            engine = lives.engine
            engine.send(request(1))
            for _ in range(2):
                engine.lose("it crashed")
                lives.next_life()
                await lives.make_ready()
                if not engine.num_suspects:
                    await engine.resume()
            trial = asyncio.ensure_future(engine.try_suspects())
            assert isinstance((await lives.messages(1))[0], AddRequest)
            tokens = list(range(NEAR_TOKENS + 1))
            await lives.give(RequestOutput(1, tokens), until=lambda: bool(lives.given.tokens))
            assert isinstance((await lives.messages(1))[0], AbortRequest)
            trial.cancel()  # as the keeper does when the process ends, before it declares the life lost
            with suppress(asyncio.CancelledError):
                await trial
            ended = RequestOutput(1, [], FinishReason.ABORT)
            other = RequestOutput(2, [7])
            await lives.give(ended, other, until=lambda: 2 in lives.given.tokens)
            assert lives.given.ends == {}
            assert engine.has(1)
            engine.lose("it ended")
            lives.next_life()
            await lives.make_ready()
            assert engine.num_suspects == 0, "it got past the place of the crash"
            await engine.resume()
            (again,) = await lives.messages(1)
            assert isinstance(again, AddRequest)
            assert np.frombuffer(again.outputs[0], "<i4").tolist() == tokens

    asyncio.run(main())


def test_a_start_that_ends_leaves_its_figures_readable() -> None:
    async def main() -> None:
        async with running() as lives:
            follower = EngineFollower(lives.engine, LIMIT_S)
            lives.engine.lose("it was killed")
            lives.next_life()
            follower.wait_until_ready()
            await asyncio.sleep(0)
            follower.follow("lost", 2, "it was killed, too")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not lives.engine.link.ready.done()

    asyncio.run(main())
