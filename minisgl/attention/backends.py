"""The attention backends by the name `--attention-backend` knows them by."""

from minisgl.attention import torch as torch_backend
from minisgl.attention import triton as triton_backend
from minisgl.attention.interface import Attend
from minisgl.errors import ConfigError

BACKENDS: dict[str, Attend] = {"triton": triton_backend.attend, "torch": torch_backend.attend}


def select(name: str) -> Attend:
    """The backend's function.

    Raises:
        ConfigError: there is no such backend.
    """
    if name not in BACKENDS:
        raise ConfigError(f"--attention-backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]
