"""Publishes which prefixes are cached, for routers (`--kv-events-endpoint`).

Promise: the batches have consecutive numbers from 0, and the events of a batch are in the order of the
changes. Hashing, encoding and sending happen in a thread of their own; `publish` only hands the changes over.
The first batch says that the cache is empty, so that a router forgets what an earlier start had.
"""

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from minisgl.config import ResolvedConfig
from minisgl.ipc.page_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    first_parent_hash,
    page_hash,
)
from minisgl.ipc.transport import EventSockets
from minisgl.kvcache.page_changes import AllPagesCleared, PageChange, PagesRemoved, PagesStored

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES = 256 << 20
"""Of batches for replay; fewer than `--kv-events-buffer-steps` are kept if they are larger."""
CLOSE_S = 2.0
"""How long `close` waits for the thread."""


class PageEventEncoder:
    """Turns the cache's notes into events. It knows the hash of each page that a prompt can find."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hashes: dict[int, bytes] = {}  # by page id

    def encode(self, changes: Sequence[PageChange]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """One event for each change."""
        return [self._encode(change) for change in changes]

    def _encode(self, change: PageChange) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match change:
            case PagesStored():
                return self._stored(change)
            case PagesRemoved(page_ids):
                return BlockRemoved(block_hashes=[_number(self._hashes.pop(page_id)) for page_id in page_ids])
            case AllPagesCleared():
                self._hashes.clear()
                return AllBlocksCleared()

    def _stored(self, run: PagesStored) -> BlockStored:
        parent = None if run.parent is None else self._hashes[run.parent]
        newest = first_parent_hash(run.salt) if parent is None else parent
        size = self._page_size * 4
        numbers = []
        for place, page_id in enumerate(run.page_ids):
            newest = page_hash(newest, run.tokens[place * size : (place + 1) * size])
            self._hashes[page_id] = newest
            numbers.append(_number(newest))
        extra_keys: list[tuple[str] | None] = [None] * len(numbers)
        if run.salt:
            extra_keys[0] = (run.salt,)
        return BlockStored(
            block_hashes=numbers,
            parent_block_hash=None if parent is None else _number(parent),
            token_ids=array("i", run.tokens).tolist(),
            block_size=self._page_size,
            extra_keys=extra_keys,
        )


class PageEventPublisher:
    """Sends a batch for each call of `publish`, and again to subscribers that missed it.

    Raises:
        ConfigError: an endpoint can't be used.
    """

    def __init__(
        self, *, endpoint: str, replay_endpoint: str | None, topic: str, buffer_steps: int, page_size: int
    ) -> None:
        self._sockets = EventSockets(endpoint, replay_endpoint, topic.encode(), buffer_steps)
        self._encoder = PageEventEncoder(page_size)
        self._pack = msgspec.msgpack.Encoder()
        self._buffer_steps = buffer_steps
        self._kept: deque[bytes] = deque()  # the newest batches
        self._num_kept_bytes = 0
        self._num_batches = 0
        self._changes: deque[tuple[float, Sequence[PageChange]] | None] = deque()  # None: the end
        self.addresses = {
            "endpoint": self._sockets.endpoint,
            "replay_endpoint": self._sockets.replay_endpoint or "",
            "topic": topic,
        }
        """Where the events are, for `Ready`; ports that the system chose are filled in."""
        self._thread = threading.Thread(target=self._run, name="page-events", daemon=True)
        self._thread.start()
        self.publish([AllPagesCleared()])

    def publish(self, changes: Sequence[PageChange]) -> None:
        """Send a batch, unless there are no changes. Never waits."""
        if changes and self._thread.is_alive():
            self._changes.append((time.time(), changes))
            self._sockets.wake()

    def close(self) -> None:
        """Send what was published, and close the sockets. May be called twice."""
        if self._thread.is_alive():
            self._changes.append(None)
            self._sockets.wake()
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            logger.exception("page events have failed (a bug, please report it); no more are published")
        finally:
            self._sockets.close()

    def _serve(self) -> None:
        while True:
            requests = self._sockets.wait()
            while self._changes:
                item = self._changes.popleft()
                if item is None:
                    return
                self._send(*item)
            for client, first in requests:
                self._replay(client, first)

    def _send(self, now_s: float, changes: Sequence[PageChange]) -> None:
        payload = self._pack.encode(EventBatch(now_s, self._encoder.encode(changes)))
        self._sockets.publish(self._num_batches, payload)
        self._num_batches += 1
        self._kept.append(payload)
        self._num_kept_bytes += len(payload)
        while len(self._kept) > self._buffer_steps or self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft())

    def _replay(self, client: bytes, first: int) -> None:
        oldest = self._num_batches - len(self._kept)
        first = max(first, oldest)
        batches = enumerate(islice(self._kept, first - oldest, None), first)
        self._sockets.answer(client, batches)


def open_page_events(config: ResolvedConfig) -> PageEventPublisher | None:
    """The publisher that the settings ask for.

    Raises:
        ConfigError: an endpoint can't be used.
    """
    if config.kv_events_endpoint is None:
        return None
    return PageEventPublisher(
        endpoint=config.kv_events_endpoint,
        replay_endpoint=config.kv_events_replay_endpoint,
        topic=config.kv_events_topic,
        buffer_steps=config.kv_events_buffer_steps,
        page_size=config.page_size,
    )


def _number(page_hash: bytes) -> int:
    return int.from_bytes(page_hash, "big")
