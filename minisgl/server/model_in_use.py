"""The model that a server process serves now, and the calls that are being prepared for it.

A call is prepared from its body to the messages to the engine. It is prepared for one model only, so a change
of the model first waits until no call is. Calls that come meanwhile wait, too.

Promise: a call that waits is prepared for the model that is served afterwards, or ends with an error: 429 if
too many wait, 504 if it waits too long.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from minisgl.config import EngineConfig, ServerConfig
from minisgl.errors import RequestError
from minisgl.server.served_model import ServedModel


class ModelInUse:
    """Used in one event loop; `current` may be read from any thread.

    Args:
        settings: those of the server and the engine that the model is served with.
        check_room: raises an error if so many calls must not wait.
        wait_limit_s: the most seconds that a call waits.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: tuple[ServerConfig, EngineConfig],
        check_room: Callable[[int], None],
        wait_limit_s: float,
    ) -> None:
        self.current = model
        """The model. Read it once in a call, since it may be another one at the next look."""
        self.settings = settings
        self.held_because = ""
        """Why calls wait, for people; empty = they do not."""
        self.num_waiting = 0
        """Calls that wait."""
        self._check_room = check_room
        self._wait_limit_s = wait_limit_s
        self._num_prepared = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextlib.asynccontextmanager
    async def prepared(self) -> AsyncIterator[ServedModel]:
        """The model for one call, which stays the same in the `with` block.

        Raises:
            RequestError: too many calls wait, or it waited too long.
        """
        while not self._is_open.is_set():
            await self._wait()
        self._num_prepared += 1
        self._is_idle.clear()
        try:
            yield self.current
        finally:
            self._num_prepared -= 1
            if not self._num_prepared:
                self._is_idle.set()

    async def hold(self, reason: str) -> None:
        """Let new calls wait from now on; return when none is being prepared."""
        self.held_because = reason
        self._is_open.clear()
        await self._is_idle.wait()

    def release(
        self, model: ServedModel | None = None, settings: tuple[ServerConfig, EngineConfig] | None = None
    ) -> None:
        """Prepare the calls that wait, and new ones; for another model, if one is given. May be repeated."""
        self.current = model or self.current
        self.settings = settings or self.settings
        self.held_because = ""
        self._is_open.set()

    async def _wait(self) -> None:
        self._check_room(self.num_waiting + 1)
        self.num_waiting += 1
        try:
            await asyncio.wait_for(self._is_open.wait(), self._wait_limit_s)
        except asyncio.TimeoutError:
            raise RequestError(
                504, "request_timeout", f"the call waited {self._wait_limit_s:g} s for another model"
            ) from None
        finally:
            self.num_waiting -= 1
