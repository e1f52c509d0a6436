"""Reads request bodies within limits of time and memory.

Promise: all bodies that are being read or tokenized hold at most `max_upload_bytes` together. Only bytes that
have arrived count, not those that a client announces. Reading ends with an error after `timeout_s`, or when
the body stalls.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from aiohttp import StreamReader, web

from minisgl.errors import RequestError

ENCODINGS = ("identity", "gzip", "deflate")
"""Encodings that aiohttp always decodes; others need optional packages."""
STALL_S = 10.0
STALL_BYTES = 1024
"""A body has stalled if fewer bytes than this, and not its end, arrive within STALL_S."""


class Uploads:
    """Reads request bodies and counts their bytes. Everything runs on the event loop's thread.

    Args:
        max_body_bytes: limit on one body, decompressed.
        max_upload_bytes: limit on all bodies together; at least max_body_bytes.
        timeout_s: limit on reading one body.
        stall_s: limit on each STALL_BYTES of it.
    """

    def __init__(
        self, max_body_bytes: int, max_upload_bytes: int, timeout_s: float, stall_s: float = STALL_S
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_upload_bytes = max_upload_bytes
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self.num_bytes = 0
        """Bytes of bodies held now."""

    @contextlib.asynccontextmanager
    async def body(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read the whole body. Its bytes count as held until the `with` block ends.

        Raises:
            RequestError: 413 for a body whose size or announced size is too large, 415 for an unsupported
                encoding, 429 if all bodies together exceed the limit, 408 if it is late or stalls.
        """
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding not in ENCODINGS:
            raise RequestError(
                415, "unsupported_encoding", f"Content-Encoding must be one of {', '.join(ENCODINGS)}"
            )
        self._check_size(request.content_length or 0)
        upload = Upload()
        try:
            yield await self._read(request.content, upload)
        finally:
            self.num_bytes -= upload.num_bytes

    async def _read(self, content: StreamReader, upload: "Upload") -> bytes:
        data = bytearray()
        with _time_limits(content, upload, self._timeout_s, self._stall_s):
            while not content.at_eof():
                try:
                    piece = await content.readany()
                except asyncio.TimeoutError as error:
                    raise RequestError(408, "upload_timeout", str(error)) from None
                self._check_size(len(data) + len(piece))
                if self.num_bytes + len(piece) > self._max_upload_bytes:
                    raise RequestError(
                        429,
                        "too_many_uploads",
                        "too many request bodies are being read; try again in a moment",
                    )
                self.num_bytes += len(piece)
                upload.num_bytes += len(piece)
                data += piece
        return bytes(data)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise RequestError(413, "body_too_large", "the request body is too large; see --max-body-bytes")


class Upload:
    """The number of bytes held of one body."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


@contextlib.contextmanager
def _time_limits(content: StreamReader, upload: Upload, timeout_s: float, stall_s: float) -> Iterator[None]:
    """In the `with` block, reading `content` raises asyncio.TimeoutError once the body is late or stalls."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s

    def check_progress(at: float, num_bytes_before: int) -> None:
        nonlocal timer
        if at >= deadline:
            late = f"the request body was not complete within {timeout_s:g} s"
            content.set_exception(asyncio.TimeoutError(late))
        elif upload.num_bytes - num_bytes_before < STALL_BYTES:
            stalled = (
                f"the request body stalled: fewer than {STALL_BYTES} bytes of it came within {stall_s:g} s"
            )
            content.set_exception(asyncio.TimeoutError(stalled))
        else:
            timer = schedule_check()

    def schedule_check() -> asyncio.TimerHandle:
        at = min(loop.time() + stall_s, deadline)
        return loop.call_at(at, check_progress, at, upload.num_bytes)

    timer = schedule_check()
    try:
        yield
    finally:
        timer.cancel()
