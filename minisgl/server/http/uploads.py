"""Reading request bodies within limits of time and memory.

Promise: bodies that are being read or tokenized take no more than `max_upload_bytes` together, and none is
waited for longer than `timeout_s`, whatever clients announce or hold back.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import web

from minisgl.errors import RequestError

ENCODINGS = ("identity", "gzip", "deflate")
"""What the HTTP library unpacks everywhere; others only with packages that may not be there."""


class Uploads:
    """The bodies on their way in. Everything here runs on the event loop's thread.

    Args:
        max_body_bytes: largest body, unpacked.
        max_upload_bytes: of all together; at least max_body_bytes.
        timeout_s: for reading one.
    """

    def __init__(self, max_body_bytes: int, max_upload_bytes: int, timeout_s: float) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_upload_bytes = max_upload_bytes
        self._timeout_s = timeout_s
        self.num_bytes = 0
        """Set aside at the moment."""

    @contextlib.contextmanager
    def room(self, request: web.Request) -> Iterator[None]:
        """Sets the body's size aside for as long as the block is not left.

        Raises:
            RequestError: 413 for a body that says it is too large, 415 for an encoding nobody can unpack,
                429 when there is no room now.
        """
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding not in ENCODINGS:
            raise RequestError(
                415, "unsupported_encoding", f"Content-Encoding must be one of {', '.join(ENCODINGS)}"
            )
        announced = request.content_length
        if announced is not None and announced > self._max_body_bytes:
            raise RequestError(413, "body_too_large", BODY_TOO_LARGE)
        # A packed body, and one that does not say how long it is, may become as large as any.
        is_known = announced is not None and encoding == "identity"
        num_bytes = announced if is_known and announced is not None else self._max_body_bytes
        if self.num_bytes + num_bytes > self._max_upload_bytes:
            raise RequestError(
                429, "too_many_uploads", "too many request bodies are being read; try again in a moment"
            )
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes

    async def read(self, request: web.Request) -> bytes:
        """The whole body.

        Raises:
            RequestError: 408 when it is not there in time.
        """
        try:
            body = await asyncio.wait_for(request.read(), self._timeout_s)
        except asyncio.TimeoutError:
            raise RequestError(
                408, "upload_timeout", f"the request body was not complete within {self._timeout_s:g} s"
            ) from None
        if request.transport is None:
            # The client left in the moment its body was complete: Python 3.11's wait_for drops that cancel.
            raise asyncio.CancelledError
        return body


BODY_TOO_LARGE = "the request body is too large; see --max-body-bytes"
