"""minisgl: a small LLM serving engine on torch.compile and Triton.

Promise: `import minisgl` is quick and loads no torch; a public name imports its module on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl.errors import (
        ConfigError,
        DeviceFaultError,
        EngineDeadError,
        MinisglError,
        ModelError,
        RequestError,
    )
    from minisgl.llm import LLM
    from minisgl.offline import Completion, Delta, ToolCall
    from minisgl.request import FinishReason, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "Delta",
    "DeviceFaultError",
    "EngineDeadError",
    "FinishReason",
    "MinisglError",
    "ModelError",
    "RequestError",
    "SamplingParams",
    "ToolCall",
    "__version__",
]

_HOME = {
    "LLM": "minisgl.llm",
    "Completion": "minisgl.offline",
    "Delta": "minisgl.offline",
    "ToolCall": "minisgl.offline",
    "FinishReason": "minisgl.request",
    "SamplingParams": "minisgl.request",
    "ConfigError": "minisgl.errors",
    "DeviceFaultError": "minisgl.errors",
    "EngineDeadError": "minisgl.errors",
    "MinisglError": "minisgl.errors",
    "ModelError": "minisgl.errors",
    "RequestError": "minisgl.errors",
}


def __getattr__(name: str) -> object:
    """Import a public name's module when the name is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
