"""The errors of calls that are refused or fail, and OpenAI's error object, which most APIs answer with.

Promise: an exception that is not ours shows no details. An API with an error object of its own names it in
its `Route`.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from minisgl.errors import EngineDeadError, MinisglError, RequestError
from minisgl.server.keys.limits import LimitReachedError

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""HTTP status -> the error's `type`. Others are "invalid_request_error" below 500, else "server_error"."""


class Fault(NamedTuple):
    """Why a call is refused or failed."""

    status: int
    code: str | None
    message: str
    param: str | None = None
    kind: str | None = None
    """OpenAI's `type`, if not the one of the status."""


class ErrorFields(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorFields


class ErrorFormat(NamedTuple):
    """An API's error object: its struct, and how a fault becomes its JSON."""

    kind: type[msgspec.Struct]
    body: Callable[[Fault], bytes]


def error_body(fault: Fault) -> bytes:
    """OpenAI's error object as JSON."""
    kind = fault.kind or ERROR_TYPES.get(
        fault.status, "invalid_request_error" if fault.status < 500 else "server_error"
    )
    return msgspec.json.encode(ErrorAnswer(ErrorFields(fault.message, kind, fault.param, fault.code)))


OPENAI = ErrorFormat(ErrorAnswer, error_body)


def fault_of(error: Exception) -> Fault:
    """The fault that an exception is."""
    if isinstance(error, LimitReachedError):
        return Fault(error.status, error.code, error.message, error.param, error.kind)
    if isinstance(error, RequestError):
        return Fault(error.status, error.code, error.message, error.param)
    if isinstance(error, EngineDeadError):
        return Fault(503, "engine_dead", str(error))
    if isinstance(error, MinisglError):
        return Fault(500, "internal_error", str(error))
    return Fault(500, "internal_error", "internal error; the server's log has the details")
