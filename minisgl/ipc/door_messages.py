"""The messages between a server and an engine that came to it (`serve --engine-listen`), besides all others.

The promises of `messages.py` hold here, too.
"""

import msgspec

from minisgl.ipc.messages import ToEngine, ToServer


class Dismissed(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """Server -> an engine that came to it: this life is over, or the engine is not let in."""

    reason: str


class Welcome(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """Server -> an engine that came to it: it is let in."""


class Hello(msgspec.Struct, tag=23, array_like=True, frozen=True):
    """Engine -> server, the first message of an engine that comes to a server."""

    version: str
    """Minisgl's. Other versions may have other messages, so it must be the server's."""
    life: str
    """A name that no other life of any engine has."""
    host: str
    pid: int
    facts: dict[str, str]
    """What must be the same for all engines of a server: its name -> its value (config/model_facts.py)."""


class Leaving(msgspec.Struct, tag=24, array_like=True, frozen=True):
    """Engine -> server: it wants to go. The server sends it `Dismissed` when its requests have ended.

    New calls go to other engines, if there are any.
    """

    limit_s: float
    """Requests that have not ended by then go on in other engines."""


FromEngine = ToServer | Leaving
"""What an engine sends that came to the server, behind its `Hello`."""
FromDoor = ToEngine | Dismissed | Welcome
"""What an engine gets that came to the server."""
