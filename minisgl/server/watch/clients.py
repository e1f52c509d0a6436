"""Which clients do not read their answers."""

import time
from collections.abc import Iterable

from minisgl.server.streams import Stream
from minisgl.server.watch.words import SlowClient

MIN_UNSENT_BYTES = 1 << 14
"""Less than this may be on its way to any client."""
MIN_STALLED_S = 1.0


def slow_clients(streams: Iterable[Stream]) -> list[SlowClient]:
    """The streams with a streamed answer that the client's system does not take.

    A system takes some megabytes by itself (socket buffers), so a small answer is never seen here.
    """
    now = time.monotonic()
    found: list[SlowClient] = []
    for stream in streams:
        if stream.transport is None:
            continue
        unsent_bytes = stream.transport.get_write_buffer_size()
        stalled_s = now - stream.taken_at
        is_stalled = stream.num_unread > 0 and stalled_s > MIN_STALLED_S
        if unsent_bytes >= MIN_UNSENT_BYTES or (unsent_bytes and is_stalled):
            stalled_ms = round(stalled_s * 1e3, 3)
            found.append(SlowClient(stream.name, unsent_bytes, stream.num_unread, stalled_ms))
    return found
