"""What a user can get wrong or run into, as exceptions with a message that says what to do."""


class MinisglError(Exception):
    """Base of every error that minisgl raises on purpose: the message is meant for the user."""


class ConfigError(MinisglError):
    """A flag, a config file or a combination of them can't work; the message names the knob."""


class ModelError(MinisglError):
    """A model folder is missing, incomplete, or asks for something this engine does not have."""


class EngineDeadError(MinisglError):
    """The engine process ended or stopped answering while requests were open."""


class RequestError(MinisglError):
    """One request can't be served; the engine is fine.

    Args:
        status: the HTTP status that fits (400, 404, 413, 429, 503 ...).
        code: OpenAI's machine-readable code, for example ``context_length_exceeded``.
        message: needed, got, do this.
        param: the field of the request body that is at fault, if it is one field.
        retry_after_s: when trying again may help, if that is known.
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
