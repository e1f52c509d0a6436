"""An engine's end of the connection to a server elsewhere; `door.py` has the server's.

Promise: each connection is one life of the engine. zmq does not repair one that is lost; `ServerDoor.enter`
makes another.
"""

import contextlib
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from minisgl.errors import ConfigError
from minisgl.ipc.door_keys import HANDSHAKE_MS, Keys, derive_keys, moved_in_time, set_limits
from minisgl.ipc.door_messages import Dismissed, FromDoor, FromEngine, Hello, Welcome
from minisgl.ipc.messages import AddRequest, StepOutput, ToEngine
from minisgl.ipc.transport import CLOSE_LINGER_MS, plain_socket, receive_slice

ANSWER_S = 20.0
"""How long a server may take to let an engine in."""
RETRY_S = 0.5
MOST_CLOSED = 3
"""An engine gives up after so many connections in a row that the server closed in the handshake."""


class ServerLostError(Exception):
    """The connection to the server has ended. The message says why."""


class ServerLine:
    """The engine's end of one life's connection, used with blocking calls from the engine's only loop.

    Raises:
        ServerLostError: no connection could be made, or it was lost before the server let the engine in.
        ConfigError: the server refuses the engine.
        _ClosedInHandshakeError: the server closed the connection before the handshake was over.
    """

    def __init__(self, endpoint: str, keys: Keys, hello: Hello) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._socket = plain_socket(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server.public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.engine.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.engine.secret)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, HANDSHAKE_MS)
        set_limits(self._socket)
        self._events = self._socket.get_monitor_socket()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromDoor)
        try:
            if "[" in endpoint:
                self._socket.setsockopt(zmq.IPV6, 1)
            try:
                self._socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(f"--server {endpoint} can't be used: {error}") from None
            self._shake_hands()
            self._enter(hello)
        except BaseException:
            self.close()
            raise

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """As `transport.EngineSocket.receive`.

        Raises:
            ServerLostError: the connection is lost, or the server has ended this life.
        """
        if self._events.poll(0):
            self._read_event()
        found: list[ToEngine] = []
        for message in receive_slice(self._socket, self._decoder, timeout_ms):
            if isinstance(message, Dismissed):
                raise ServerLostError(message.reason)
            if isinstance(message, AddRequest):
                message = moved_in_time(message, time.monotonic())
            if not isinstance(message, Welcome):
                found.append(message)
        return found

    def send(self, message: FromEngine | Hello, server: int | None = None) -> None:
        """Queue `message`; never waits. It is dropped if the connection is lost, which `receive` says."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def send_outputs(self, step: StepOutput) -> None:
        """Queue a step's outputs."""
        self.send(step)

    def close(self) -> None:
        """Close once queued messages are sent, or after `CLOSE_LINGER_MS`. May be repeated."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            self._socket.close(linger=CLOSE_LINGER_MS)
            self._context.term()

    def _shake_hands(self) -> None:
        was_connected = False
        deadline = time.monotonic() + 2 * HANDSHAKE_MS / 1000
        while time.monotonic() < deadline:
            if not self._events.poll(100):
                continue
            event = recv_monitor_message(self._events)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return
            was_connected = was_connected or event == zmq.EVENT_CONNECTED
            if event in (
                zmq.EVENT_HANDSHAKE_FAILED_AUTH,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            ):
                raise _ClosedInHandshakeError
            if event in (zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED):
                break
        if was_connected:
            raise _ClosedInHandshakeError
        raise ServerLostError("nothing answers there")

    def _enter(self, hello: Hello) -> None:
        self.send(hello)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            if self._events.poll(0):
                self._read_event()
            for message in receive_slice(self._socket, self._decoder, 100):
                if isinstance(message, Welcome):
                    return
                if isinstance(message, Dismissed):
                    raise ConfigError(f"the server does not let this engine in: {message.reason}")
        raise ServerLostError(f"the server did not let this engine in within {ANSWER_S:g} s")

    def _read_event(self) -> None:
        event = recv_monitor_message(self._events)["event"]
        # What the server said last may still wait to be read: it says more than this.
        if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED) and not self._socket.poll(0):
            raise ServerLostError("the connection to the server is lost")


class _ClosedInHandshakeError(Exception):
    pass


class ServerDoor:
    """An engine's way to its server: connects as often as it is asked to. Only `move` may come from threads.

    Args:
        endpoint: tcp://host:port.
        say: called with a line of progress when waiting begins.

    Raises:
        ConfigError: the secret is too short.
    """

    def __init__(self, endpoint: str, secret: str, say: Callable[[str], None]) -> None:
        self._place = endpoint, derive_keys(secret)
        self._say = say

    @property
    def endpoint(self) -> str:
        """Where the next connection goes."""
        return self._place[0]

    def move(self, endpoint: str, secret: str) -> None:
        """The server is elsewhere now; the next connection goes there.

        Raises:
            ConfigError: the secret is too short.
        """
        self._place = endpoint, derive_keys(secret)

    def enter(self, hello: Hello) -> ServerLine:
        """Connect and be let in, as a new life. Waits for the server, without limit.

        Raises:
            ConfigError: the server has another secret, or refuses this engine. The message says why.
        """
        num_closed = 0
        is_waiting = False
        while True:
            endpoint, keys = self._place
            try:
                return ServerLine(endpoint, keys, hello)
            except _ClosedInHandshakeError:
                num_closed += 1
                if num_closed == MOST_CLOSED:
                    raise ConfigError(
                        f"the server at {endpoint} closed the connection in the handshake: it has "
                        "another engine secret, or is no 'minisgl serve --engine-listen'; give both the same "
                        "MINISGL_ENGINE_SECRET or --engine-secret-file"
                    ) from None
            except ServerLostError as error:
                num_closed = 0
                if not is_waiting:
                    self._say(f"waiting for the server at {endpoint} ({error})")
                is_waiting = True
            time.sleep(RETRY_S)
