"""OpenAI's error object: the answer to every call that is refused or fails."""

import msgspec

from minisgl.errors import EngineDeadError, MinisglError, RequestError

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""HTTP status -> the error's `type`. Others are "invalid_request_error" below 500, else "server_error"."""


class ErrorFields(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """OpenAI's error object."""

    error: ErrorFields


def error_body(status: int, code: str | None, message: str, param: str | None = None) -> bytes:
    """The error object as JSON."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode(ErrorAnswer(ErrorFields(message, kind, param, code)))


def error_of(error: Exception) -> tuple[int, bytes]:
    """HTTP status and body for an exception. Exceptions that are not ours show no details."""
    if isinstance(error, RequestError):
        return error.status, error_body(error.status, error.code, error.message, error.param)
    if isinstance(error, EngineDeadError):
        return 503, error_body(503, "engine_dead", str(error))
    if isinstance(error, MinisglError):
        return 500, error_body(500, "internal_error", str(error))
    return 500, error_body(500, "internal_error", "internal error; the server's log has the details")
