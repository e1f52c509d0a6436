"""The server's end of the connections to engines that come to it: one port, encrypted by zmq's CURVE.

Both ends derive their keys from one secret. No message of a peer is read that has not shown in CURVE's
handshake that it has the secret (docs/decisions.md).

Promise: each connection is one life of an engine. One that is closed or lost does not come back: the engine
connects anew, as a new life, so nothing that was queued for the old life reaches the new one.
"""

import asyncio
import time

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from minisgl.errors import ConfigError, EngineDeadError
from minisgl.ipc.door_keys import Keys, derive_keys, moved_in_time, set_limits
from minisgl.ipc.door_messages import Dismissed, FromEngine, Welcome
from minisgl.ipc.messages import AddRequest, ToEngine
from minisgl.ipc.transport import CLOSE_LINGER_MS

PROBE = b""
"""Sent to see whether a connection is still there; its receiver ignores it."""


class _OnlyEngines:
    """zmq's check of a client's public key."""

    def __init__(self, keys: Keys) -> None:
        self._key = keys.engine.public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class DoorSocket:
    """The server's end, for all engines. Make and use it inside one asyncio event loop.

    Args:
        endpoint: tcp://address:port; port 0 takes a free one.

    Raises:
        ConfigError: the secret is too short, or the endpoint can't be used.
    """

    def __init__(self, endpoint: str, secret: str) -> None:
        keys = derive_keys(secret)
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=_OnlyEngines(keys))
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server.secret)
        set_limits(self._socket)
        try:
            if "[" in endpoint:
                self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"--engine-listen {endpoint} can't be used: {error}; give an address of this host (0.0.0.0 "
                "for all) and a free port"
            ) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._encoder = msgspec.msgpack.Encoder()

    async def receive(self) -> tuple[bytes, bytes]:
        """The next message: the connection's name, and the data. Waits for one; cancelling loses nothing."""
        while True:
            while not await self._socket.poll():
                pass
            frames = await self._socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 2:
                return frames[0], frames[1]

    def send(self, connection: bytes, message: ToEngine | Welcome | Dismissed) -> bool:
        """Queue `message` without waiting; returns whether the connection is still there."""
        return self.send_data(connection, self._encoder.encode(message))

    def send_data(self, connection: bytes, data: bytes) -> bool:
        """The same for an encoded message, or `PROBE`."""
        if self._socket.closed:
            return False
        # With NOBLOCK, the future is done at once.
        sending = self._socket.send_multipart((connection, data), zmq.NOBLOCK)
        return sending.exception() is None  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        """Close once queued messages are sent, or after `CLOSE_LINGER_MS`. May be repeated."""
        self._socket.close(linger=CLOSE_LINGER_MS)
        self._authenticator.stop()
        self._context.term()


class EngineLine:
    """The server's end of one life's connection, before and after the engine has come."""

    def __init__(self, door: DoorSocket) -> None:
        self._door = door
        self._connection: bytes | None = None
        self._is_closed = False
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the connection is lost
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.came = asyncio.Event()

    @property
    def is_free(self) -> bool:
        """Whether no engine has come yet."""
        return self._connection is None and not self._is_closed

    def open(self, connection: bytes) -> None:
        """An engine has come."""
        assert self.is_free, "a life has one connection"
        self._connection = connection
        self.came.set()

    def take(self, data: bytes) -> None:
        """A message has arrived."""
        self._arrived.put_nowait(data)

    def probe(self) -> bool:
        """Find out whether the connection is lost; `receive` says it then, too."""
        is_lost = self._connection is not None and not self._door.send_data(self._connection, PROBE)
        if is_lost:
            self._arrived.put_nowait(None)
        return is_lost

    async def receive(self) -> FromEngine:
        """The next message; waits for one. Cancelling it loses nothing.

        Raises:
            EngineDeadError: the connection is lost.
        """
        data = await self._arrived.get()
        if data is None:
            raise EngineDeadError("the connection to it is lost")
        return self._decoder.decode(data)

    def send(self, message: ToEngine) -> None:
        """Queue `message` for the engine without waiting.

        Raises:
            EngineDeadError: the engine has not come or has gone, or this end is closed.
        """
        if self._connection is None or self._is_closed:
            raise EngineDeadError("no engine is connected")
        if isinstance(message, AddRequest):
            message = moved_in_time(message, -time.monotonic())
        if not self._door.send(self._connection, message):
            raise EngineDeadError("the connection to the engine is lost")

    def dismiss(self, reason: str) -> None:
        """Tell the engine that this life is over, and close."""
        if self._connection is not None and not self._is_closed:
            self._door.send(self._connection, Dismissed(reason))
        self._is_closed = True

    def close(self) -> None:
        """The same; may be called twice."""
        self.dismiss("the server has closed the connection")
