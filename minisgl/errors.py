"""The exceptions that minisgl raises on purpose; each message tells the user what to do."""


class MinisglError(Exception):
    """Base class of all of them; the message is meant for the user."""


class ConfigError(MinisglError):
    """A setting, or a combination of settings, can't work; the message names the flag."""


class ModelError(MinisglError):
    """A model folder is missing or incomplete, or needs a feature that this engine does not have."""


class ModelNotHereError(ModelError):
    """A model is not on this machine, or not in a format this engine reads; fetch or convert it."""


class EngineDeadError(MinisglError):
    """The engine ended, broke or stopped answering while requests were open."""


class DeviceFaultError(EngineDeadError):
    """The GPU reported an error after which the process can't use it any more; a new process may."""


DEVICE_FAULT_EXIT_CODE = 74
"""Exit code of every process of minisgl that a GPU fault ends (EX_IOERR of sysexits.h)."""


class RequestError(MinisglError):
    """One request can't be served; the engine is fine.

    Args:
        status: the HTTP status that fits (400, 404, 413, 429, 503 ...).
        code: OpenAI's machine-readable code, for example ``context_length_exceeded``.
        message: what was needed, what came, and what to do.
        param: the field of the request body at fault, if a single one is.
        retry_after_s: seconds after which a retry may succeed, if known.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
