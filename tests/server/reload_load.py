"""A server with a tiny model and the real engine, calls of openai's client, and reloads under their load.

For the test, and for bench/reloads.py.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
from leaving_clients import CONFIG, info
from running_server import LIMIT_S
from small_model import make_folder

ADMIN = "admin-key"
RELOAD_LIMIT_S = 300.0
FLAGS = [
    *("--dummy-weights", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--port", "0"),
    *("--max-running-requests", "32", "--num-pages", "1200", "--max-context-tokens", "512"),
    *("--served-model-name", "tiny", "--admin-key", ADMIN),
]


class Call(NamedTuple):
    """A completion, streamed."""

    prompt: list[int]
    temperature: float
    seed: int


class Ended(NamedTuple):
    """What came of a call."""

    token_ids: tuple[int, ...]
    ends: tuple[str, ...]
    num_completion_tokens: int
    error: str = ""


def make_model(folder: Path, **changes: Any) -> Path:
    """A folder for --dummy-weights."""
    make_folder(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def make_calls(num: int) -> list[Call]:
    """Half of them greedy."""
    return [
        Call([3 + (7 * one + place) % 290 for place in range(4 + one % 9)], one % 2, one)
        for one in range(num)
    ]


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """The server's URL."""
    command = [sys.executable, "-m", "minisgl", "serve", "--model", str(folder), *FLAGS, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("curl "))
        yield line.split("/v1/")[0].removeprefix("curl ")
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        process.kill()
        process.stdout.close()


def reload(url: str, **changes: Any) -> dict[str, Any]:
    """POST /reload: its answer, or its error object."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"}
    asked = urllib.request.Request(f"{url}/reload", json.dumps(changes).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=RELOAD_LIMIT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)


def engine_of(url: str) -> int:
    """The engine's process id."""
    return info(url)["engine_pid"]


def kill_engine(url: str) -> None:
    """kill -9."""
    os.kill(engine_of(url), 9)


class Load:
    """Calls that run at once.

    Args:
        disturb: runs beside them; gets this object.
    """

    def __init__(self, url: str, calls: list[Call], num_tokens: int) -> None:
        self.url = url
        self._calls = calls
        self._num_tokens = num_tokens
        self.tokens: list[list[int]] = [[] for _ in calls]
        self._grew = asyncio.Event()

    async def run(self, disturb: Callable[["Load"], Awaitable[None]] | None = None) -> list[Ended]:
        """What came of each call."""
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=RELOAD_LIMIT_S
        ) as client:
            disturbing = asyncio.ensure_future(disturb(self)) if disturb is not None else None
            ended = await asyncio.gather(*[self._call(client, place) for place in range(len(self._calls))])
            if disturbing is not None:
                await disturbing
        return list(ended)

    async def wait_for_tokens(self, num: int) -> None:
        """Return when each call has so many more than now, or is near its end."""
        wanted = [min(len(own) + num, self._num_tokens - 1) for own in self.tokens]
        while any(len(own) < least for own, least in zip(self.tokens, wanted, strict=True)):
            self._grew.clear()
            await self._grew.wait()

    async def _call(self, client: openai.AsyncOpenAI, place: int) -> Ended:
        call, own, ends, num = self._calls[place], self.tokens[place], [], 0
        try:
            stream = await client.completions.create(
                model="tiny",
                prompt=call.prompt,
                temperature=call.temperature,
                seed=call.seed,
                max_tokens=self._num_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            async for chunk in stream:
                num = chunk.usage.completion_tokens if chunk.usage is not None else num
                for choice in chunk.choices:
                    own += (choice.model_extra or {}).get("token_ids") or []
                    ends += [choice.finish_reason] if choice.finish_reason else []
                self._grew.set()
        except openai.OpenAIError as error:
            return Ended(tuple(own), tuple(ends), num, f"{type(error).__name__}: {error}")
        return Ended(tuple(own), tuple(ends), num)
