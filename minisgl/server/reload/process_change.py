"""The steps of a reload in one server process. The first process does each step and tells the others to.

Promise: no call is prepared for one model and sent to an engine of another.
"""

import asyncio
from collections.abc import Sequence

from minisgl.server.engines.engines import Engines
from minisgl.server.engines.served_engine import ServedEngine
from minisgl.server.http_server import HttpServer, HttpServerSettings
from minisgl.server.served_model import ServedModel

HELD_FOR_ANOTHER_MODEL = "another model takes this one's place; calls wait for it"


class ProcessChange:
    """Does the steps. Used in one event loop, by one reload at a time."""

    def __init__(self, http_server: HttpServer, engines: Engines) -> None:
        self._http_server = http_server
        self._engines = engines
        self._loaded: tuple[ServedModel, HttpServerSettings] | None = None

    async def load(self, settings: HttpServerSettings) -> None:
        """Load tokenizer and chat template of the next model. `switch` then makes it the served one.

        Raises:
            ModelError: the folder has no usable tokenizer.
        """
        self._loaded = await self._http_server.load_model(settings), settings

    async def hold(self) -> None:
        """Make new calls wait, and return when no engine has an open request."""
        await self._http_server.model.hold(HELD_FOR_ANOTHER_MODEL)
        await asyncio.gather(*[engine.wait_until_empty() for engine in self._engines.all])

    def release(self) -> None:
        """Let the calls that wait go on."""
        self._http_server.model.release()

    def replace(self, old: ServedEngine, new: ServedEngine) -> None:
        """Send requests to `new` instead of `old`. Open requests go on there."""
        self._engines.replace(old, new, leaves=False)

    async def switch(self, pairs: Sequence[tuple[ServedEngine, ServedEngine]] = ()) -> None:
        """Serve the model that was loaded, and let the calls that wait go on.

        Args:
            pairs: old and new engines. New requests go to the new ones; the old ones finish theirs.
        """
        assert self._loaded is not None, "no model is loaded"
        await self._http_server.model.hold("")  # until `serve` below
        for old, new in pairs:
            self._engines.replace(old, new, leaves=True)
        self._http_server.serve(*self._loaded)
        self._loaded = None
