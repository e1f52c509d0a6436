"""Caches Python bytecode for installations without it, where each start would otherwise spend seconds
compiling thousands of modules.

Promise: nothing changes if bytecode lies beside the sources, or if Python can write it there.
"""

import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from compile_cache.manifest import CacheError
from compile_cache.store import make_own_folder

BYTECODE = "bytecode"
VARIABLE = "PYTHONPYCACHEPREFIX"
TORCH_SOURCES = ("__init__.py", "_dynamo/symbolic_convert.py", "_inductor/compile_fx.py")
"""Files of torch that every start imports. If these have bytecode, the others have it too."""


def keep_bytecode(root: Path, environ: MutableMapping[str, str] | None = None) -> bool:
    """Make this process and its children cache bytecode below `root` if torch has none.

    Returns True if they do. Call it before torch is imported. The function overrides
    PYTHONDONTWRITEBYTECODE, which container images often set to keep bytecode away from the sources.

    Args:
        environ: environment variables of child processes; None = os.environ.
    """
    folder = root.absolute() / BYTECODE
    if sys.pycache_prefix is not None or _torch_has_bytecode() or _python_will_write_it():
        return False
    with suppress(CacheError, OSError):
        make_own_folder(folder.parent)
        make_own_folder(folder)
        variables = os.environ if environ is None else environ
        variables[VARIABLE] = sys.pycache_prefix = str(folder)
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False
        return True
    return False


def _torch_has_bytecode() -> bool:
    """Whether torch's modules have bytecode; True if torch is not installed."""
    folder = _torch_folder()
    return folder is None or all(
        Path(cache_from_source(str(folder / source))).exists() for source in TORCH_SOURCES
    )


def _python_will_write_it() -> bool:
    folder = _torch_folder()
    return folder is not None and not sys.dont_write_bytecode and os.access(folder, os.W_OK)


def _torch_folder() -> Path | None:
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
