"""Does a reload under load lose, change or refuse anything? Needs no GPU.

    python bench/reloads.py --out bench/results/cpu/reloads.json

A server with a tiny model in float32 runs streams of openai's client, half of them greedy, and short calls
beside them, one after the other. Each round disturbs them in another way: the engine is reloaded twice; it is
killed while the next one starts; it is reloaded where the new engine has no room beside the old one; another
model comes, and its engine or the one before is killed. Every stream must have the tokens and the one end of
an undisturbed run, and no short call may fail. The exit code is 1 if one does not.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai

from minisgl.benchmark.reports.report import Cell, make_report, output_path, write_report
from minisgl.errors import MinisglError

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "server"))
from leaving_clients import held, info
from reload_load import Ended, Load, kill_engine, make_calls, make_model, reload, served

NUM_STREAMS = 30
NUM_TOKENS = 600
MODEL = {"num_hidden_layers": 6, "max_position_embeddings": 2048}
"""Slow enough for streams that last as long as a start."""
FLAGS = (
    "--api-workers",
    "2",
    "--engine-restarts",
    "20",
    "--max-context-tokens",
    "2048",
    "--num-pages",
    "3200",
)
KILL_AFTER_S = 1.0
"""After a reload was asked for: while the new engine starts."""


class Round:
    """One way to disturb the streams."""

    def __init__(self, folder: Path, other: Path) -> None:
        self._models = folder, other
        self.told: list[dict[str, Any]] = []

    async def reload_twice(self, load: Load) -> None:
        """The new engines start beside the old ones."""
        await load.wait_for_tokens(5)
        for tokens in (256, 128):
            await self._reload(load, max_step_tokens=tokens)

    async def reload_without_room(self, load: Load) -> None:
        """Each new engine starts after the old one has ended."""
        await load.wait_for_tokens(5)
        for tokens in (256, 128):
            await self._reload(load, max_step_tokens=tokens, beside=False)

    async def kill_in_the_middle(self, load: Load) -> None:
        """Two reloads. During the first the old engine is killed, and during the second the new one while it
        starts, so this reload fails; and behind each the engine that serves."""
        await load.wait_for_tokens(5)
        for beside in (True, False):
            reloading = asyncio.ensure_future(self._reload(load, max_step_tokens=256, beside=beside))
            await asyncio.sleep(KILL_AFTER_S)
            await asyncio.to_thread(_try_to_kill, load.url)
            await reloading
            await load.wait_for_tokens(2)
            await asyncio.to_thread(_try_to_kill, load.url)

    async def another_model(self, load: Load) -> None:
        """Another model comes; its engine is killed while the engine before ends the streams."""
        await load.wait_for_tokens(5)
        reloading = asyncio.ensure_future(self._reload(load, model=str(self._models[1])))
        await asyncio.sleep(KILL_AFTER_S)
        await asyncio.to_thread(_try_to_kill, load.url)
        await reloading

    async def another_model_without_room(self, load: Load) -> None:
        """The first model comes back; calls wait until the streams have ended."""
        await load.wait_for_tokens(5)
        await self._reload(load, model=str(self._models[0]), beside=False)

    async def _reload(self, load: Load, **changes: Any) -> None:
        self.told.append(await asyncio.to_thread(lambda: reload(load.url, **changes)))


def _try_to_kill(url: str) -> None:
    try:
        kill_engine(url)
    except ProcessLookupError:  # it has been replaced just now
        print("the engine had ended before it could be killed", flush=True)


def num_streams(told: list[dict[str, Any]], what: str) -> int:
    """The streams of which the reloads tell this."""
    return sum(one["num_streams"] for one in told if one.get("streams") == what)


async def short_calls(url: str, is_over: asyncio.Event) -> tuple[int, list[str]]:
    """Calls one after the other; how many there were, and what went wrong."""
    num, problems = 0, []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        while not is_over.is_set():
            num += 1
            try:
                answer = await client.completions.create(model="tiny", prompt=[5, 6], max_tokens=2)
                if answer.usage is None or not answer.usage.completion_tokens:
                    problems.append("a short call got no token")
            except openai.OpenAIError as error:
                problems.append(f"a short call failed: {error}")
    return num, problems


async def run_round(
    url: str, disturb: Callable[[Load], Awaitable[None]]
) -> tuple[list[Ended], int, list[str], float]:
    """The streams under this disturbance, the number of short calls, problems, and the longest pause."""
    is_over = asyncio.Event()
    load = Load(url, make_calls(NUM_STREAMS), NUM_TOKENS)
    beside = asyncio.ensure_future(short_calls(url, is_over))
    pause = asyncio.ensure_future(longest_pause(load, is_over))
    try:
        ended = await load.run(disturb)
    finally:
        is_over.set()
    num_short, problems = await beside
    return ended, num_short, problems, await pause


async def longest_pause(load: Load, is_over: asyncio.Event) -> float:
    """The longest time in which no stream got a token, in seconds."""
    longest, last, since = 0.0, 0, time.monotonic()
    while not is_over.is_set():
        await asyncio.sleep(0.02)
        num = sum(map(len, load.tokens))
        if num != last:
            longest, last, since = max(longest, time.monotonic() - since), num, time.monotonic()
    return longest


def run(out: Path | None) -> int:
    """All rounds; the number of problems."""
    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model", **MODEL)
        other = make_model(Path(name) / "other", **MODEL, hidden_size=64)
        with served(folder, *FLAGS) as url:
            expected = asyncio.run(Load(url, make_calls(NUM_STREAMS), NUM_TOKENS).run())
            for way in (
                Round.reload_twice,
                Round.reload_without_room,
                Round.kill_in_the_middle,
                Round.another_model,
                Round.another_model_without_room,
            ):
                one = Round(folder, other)
                if way is Round.another_model_without_room:  # these streams are the other model's
                    expected = asyncio.run(Load(url, make_calls(NUM_STREAMS), NUM_TOKENS).run())
                before = info(url)["engine_restarts"]
                ended, num_short, problems, pause_s = asyncio.run(
                    run_round(url, lambda load, one=one, way=way: way(one, load))
                )
                problems += [f"stream: {got.error}" for got in ended if got.error]
                problems += [f"{key} is {value}" for key, value in held(url).items() if value]
                rows.append(
                    {
                        "round": way.__name__,
                        "num_streams": len(ended),
                        "num_same": sum(got == want for got, want in zip(ended, expected, strict=True)),
                        "num_reloads": len(one.told),
                        "num_failed_reloads": sum("error" in told for told in one.told),
                        "num_moved": num_streams(one.told, "moved"),
                        "num_finished": num_streams(one.told, "finished"),
                        "num_kills": info(url)["engine_restarts"] - before,
                        "num_short_calls": num_short,
                        "longest_pause_s": round(pause_s, 2),
                        "reload_s": " ".join(str(told.get("seconds")) for told in one.told),
                        "problems": "; ".join(problems[:5]),
                    }
                )
                print(rows[-1], flush=True)
    wrong = [row for row in rows if row["problems"] or row["num_same"] != row["num_streams"]]
    if out is not None:
        metrics = {"num_rounds": len(rows), "num_wrong_rounds": len(wrong)}
        arguments = {"num_streams": NUM_STREAMS, "num_tokens": NUM_TOKENS}
        write_report(
            out, make_report("reloads", arguments=arguments, metrics=metrics, tables={"rounds": rows})
        )
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="the report")
    try:
        return int(run(output_path("--out", parser.parse_args().out)) > 0)
    except MinisglError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
