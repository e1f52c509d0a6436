"""The HTTP server of one process, opened without an engine."""

import asyncio
import gc
import shutil
import socket
from pathlib import Path

from small_model import make_folder

from minisgl.config import EngineConfig, ServerConfig
from minisgl.ipc.transport import ServerSocket, make_ipc_dir
from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.http_server import HttpServerSettings, open_http_server
from minisgl.server.reload.reloads import Reloads


def test_a_garbage_collection_does_not_scan_what_the_server_is_made_of(tmp_path: Path) -> None:
    folder, ipc_dir = make_folder(tmp_path / "model"), make_ipc_dir()
    settings = HttpServerSettings(
        ServerConfig(), EngineConfig(model=str(folder)), "tiny", folder, ipc_dir, rank=0
    )

    async def main() -> None:
        engines = Engines([ServedEngine(0, 0, ServerSocket(ipc_dir))])
        listener = socket.create_server(("127.0.0.1", 0))
        server = await open_http_server(settings, engines, Reloads(), listener)
        assert all(one is not server.streams for one in gc.get_objects())
        assert gc.get_freeze_count() > 0
        await server.close()
        engines.close()

    try:
        asyncio.run(main())
    finally:
        gc.unfreeze()
        shutil.rmtree(ipc_dir)
