"""The engines behind a server process, as all that talks to engines sees them.

Promise: a request's messages all go to the engine that was chosen for it. Today there is one engine.
"""

from collections.abc import Sequence

from minisgl.errors import EngineDeadError
from minisgl.ipc.messages import AbortRequest, AddRequest, ToEngine
from minisgl.server.engines.served_engine import Reader, ServedEngine


class Engines:
    """Chooses an engine for each call. Create, use and close it in one event loop.

    Args:
        engines: one at least, by their numbers.
    """

    def __init__(self, engines: Sequence[ServedEngine]) -> None:
        self.all = engines

    @property
    def first(self) -> ServedEngine:
        """The engine that is asked for what there is once."""
        return self.all[0]

    @property
    def num_restarts(self) -> int:
        """How often engines were started again."""
        return sum(engine.num_restarts for engine in self.all)

    def choose(self, message: AddRequest) -> ServedEngine:
        """The engine for the requests of a message."""
        return self.all[0]

    def send(self, message: ToEngine) -> None:
        """Hand the requests of a message to an engine, or end a request in the engine that has it.

        Raises:
            EngineDeadError: the message is neither of the two.
        """
        if isinstance(message, AddRequest):
            self.choose(message).send(message)
        elif isinstance(message, AbortRequest):
            for engine in self.all:
                if engine.has(message.request_id):
                    engine.send(message)
        else:
            raise EngineDeadError(f"{type(message).__name__} is for one engine; send it through its link")

    def listen(self, reader: Reader) -> None:
        """Pass on the messages of all engines from now on."""
        for engine in self.all:
            engine.listen(reader)

    def close(self) -> None:
        """Stop listening, and close the sockets."""
        for engine in self.all:
            engine.close()
