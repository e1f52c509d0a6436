"""Which way of compiling a benchmark measures."""

from dataclasses import replace
from pathlib import Path

from minisgl.config import EngineConfig
from minisgl.engine.start.build import resolve_for_folder


def without_fallback(config: EngineConfig, folder: Path) -> EngineConfig:
    """The same settings, with which a start fails if the decode step can't be compiled.

    A server then runs it uncompiled; a benchmark would report figures of something else than it says.

    Raises:
        ConfigError, ModelError: as in `build_engine`.
    """
    return replace(config, compile_mode=resolve_for_folder(config, folder).compile_mode)
