"""Every setting of the engine and the server, resolved once.

- `engine.py`: `EngineConfig` (as given, `None` means "auto") and `ResolvedConfig` (every "auto" decided).
- `resolve.py`: `resolve_engine_config` makes the second from the first, before anything starts.
- `reasons.py`: why each of the second has its value.
- `server.py`: `ServerConfig`, `ConnectConfig` of an engine that connects to a server, and `ReloadConfig`.
- `model_facts.py`: what must be the same in a server and such engines.
- `engine_checks.py`, `field_checks.py`: what is refused.

Promise: the dataclasses are frozen, and code that runs an engine reads only a `ResolvedConfig`. The flags of
the command line are generated from the fields and their docstrings (`minisgl/commands/flags.py`).
"""

from minisgl.config.engine import DeviceFacts, EngineConfig, ResolvedConfig, with_cache_dir
from minisgl.config.engine_checks import check_engine_config
from minisgl.config.field_checks import GIB, MIB
from minisgl.config.reasons import ChosenSetting, chosen_settings
from minisgl.config.resolve import attention_environment, auto_mixed_tokens, resolve_engine_config
from minisgl.config.server import (
    SUPERVISED,
    TEXT_FIELDS,
    ConnectConfig,
    ReloadConfig,
    ServerConfig,
    check_connect_config,
    check_server_config,
)

__all__ = [
    "GIB",
    "MIB",
    "SUPERVISED",
    "TEXT_FIELDS",
    "ChosenSetting",
    "ConnectConfig",
    "DeviceFacts",
    "EngineConfig",
    "ReloadConfig",
    "ResolvedConfig",
    "ServerConfig",
    "attention_environment",
    "auto_mixed_tokens",
    "check_connect_config",
    "check_engine_config",
    "check_server_config",
    "chosen_settings",
    "resolve_engine_config",
    "with_cache_dir",
]
