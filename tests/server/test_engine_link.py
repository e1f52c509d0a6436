"""The engine's process as the server sees it: what goes wrong on our side is not the engine's fault."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from running_server import FAKE_ENGINE, LIMIT_S
from small_model import CONTEXT, make_folder

from minisgl.ipc.messages import AddRequest, StepOutput
from minisgl.ipc.transport import ServerSocket, make_ipc_dir
from minisgl.request import SamplingParams
from minisgl.server.engines.engine_link import EngineLink
from minisgl.server.engines.supervision.engine_process import EngineProcess


def test_a_listener_that_fails_does_not_end_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(tmp_path / "model")
    ipc_dir = make_ipc_dir()
    calls: list[str] = []

    def fail(message: Any) -> None:
        calls.append(type(message).__name__)
        raise OSError("nobody reads this")

    async def main() -> None:
        settings = {"max_running_requests": 8, "tp": 1}
        job = {"model_folder": str(folder), "ipc_dir": str(ipc_dir), "engine": settings}
        first_line = json.dumps(job).encode()
        link = EngineLink(ServerSocket(ipc_dir))
        process = EngineProcess([sys.executable, str(FAKE_ENGINE)])
        process.begin(first_line, link)
        answered = asyncio.Event()

        def take(output: StepOutput) -> None:
            if any(one.finish_reason is not None for one in output.outputs):
                answered.set()
            fail(output)

        try:
            link.listen(take, fail)
            ready = await asyncio.wait_for(link.ready, LIMIT_S)
            assert ready.max_context_tokens == CONTEXT
            link.send(AddRequest(1, b"\x00\x00\x00\x00", SamplingParams(max_tokens=5, seed=0)))
            await asyncio.wait_for(answered.wait(), LIMIT_S)
            assert not link.died.done()
        finally:
            await process.close()
            link.close()

    try:
        asyncio.run(main())
    finally:
        for file in ipc_dir.iterdir():
            file.unlink()
        ipc_dir.rmdir()
    assert calls[:2] == ["StartupStage", "StartupStage"]
    assert "StepOutput" in calls
    assert "can't be read" not in caplog.text
