"""What both ends of the connection between a server and its engines from elsewhere share.

Both derive CURVE's keys from one secret. See `door.py` (the server's end) and `server_line.py`.
"""

import hashlib
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils.z85 import encode as z85

from minisgl.errors import ConfigError
from minisgl.ipc.messages import AddRequest

SHORTEST_SECRET = 16
"""Characters. Whoever records the connection can try out guesses of the secret."""
HEARTBEAT_MS = 2000
LOST_MS = 10_000
"""A connection on which nothing comes for this long is lost. zmq itself answers while an end is busy."""
HANDSHAKE_MS = 5000
MAX_MESSAGE_BYTES = 1 << 30


class KeyPair(NamedTuple):
    public: bytes
    secret: bytes


class Keys(NamedTuple):
    server: KeyPair
    engine: KeyPair


def derive_keys(secret: str) -> Keys:
    """The CURVE keys of both ends. It takes about 0.1 s, so that guessing secrets is slow.

    Raises:
        ConfigError: the secret is too short.
    """
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"the engine secret needs at least {SHORTEST_SECRET} characters, got {len(secret)}; "
            "'openssl rand -hex 32' makes one"
        )
    data = hashlib.scrypt(secret.encode(), salt=b"minisgl engine door", n=1 << 14, r=8, p=1, dklen=64)
    pairs = [KeyPair(zmq.curve_public(private), private) for private in (z85(data[:32]), z85(data[32:]))]
    return Keys(*pairs)


def set_limits(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, LOST_MS)


def moved_in_time(message: AddRequest, seconds: float) -> AddRequest:
    """The same message with its times moved: two hosts' monotonic clocks have nothing in common."""
    moved = {
        name: value + seconds
        for name in ("arrived_s", "waiting_since_s")
        if (value := getattr(message, name))
    }
    return msgspec.structs.replace(message, **moved) if moved else message
