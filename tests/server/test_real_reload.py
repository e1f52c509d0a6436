"""`minisgl serve` with the real engine: reloads under the load of openai's client."""

import asyncio
from pathlib import Path

from reload_load import Load, engine_of, info, make_calls, make_model, reload, served

NUM_TOKENS = 150
CALLS = make_calls(6)


def test_reloads_change_no_token_of_open_streams(tmp_path: Path) -> None:
    with served(make_model(tmp_path / "model")) as url:
        undisturbed = asyncio.run(Load(url, CALLS, NUM_TOKENS).run())
        assert all(len(one.token_ids) == one.num_completion_tokens == NUM_TOKENS for one in undisturbed)
        told = []

        async def move(load: Load) -> None:
            await load.wait_for_tokens(5)
            told.append(await asyncio.to_thread(reload, url, max_step_tokens=256))
            told.append(await asyncio.to_thread(reload, url, max_step_tokens=128, beside=False))

        before = engine_of(url)
        assert asyncio.run(Load(url, CALLS, NUM_TOKENS).run(move)) == undisturbed
        assert engine_of(url) != before
        assert [(one["beside"], one["streams"]) for one in told] == [(True, "moved"), (False, "moved")]

        async def change(load: Load) -> None:
            await load.wait_for_tokens(5)
            other = str(make_model(tmp_path / "other", hidden_size=64))
            told.append(await asyncio.to_thread(reload, url, model=other))

        assert asyncio.run(Load(url, CALLS, NUM_TOKENS).run(change)) == undisturbed
        assert told[-1]["streams"] == "finished"
        changed = asyncio.run(Load(url, CALLS, NUM_TOKENS).run())
        assert not any(one.error for one in changed)
        assert changed != undisturbed
        figures = info(url)
        assert figures["engine_restarts"] == 0
        assert figures["server"]["num_open_requests"] == figures["engine"]["num_held_rows"] == 0
