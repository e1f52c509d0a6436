"""Python's own compiled code, for installations that have none: their thousands of modules are otherwise
compiled anew by every start, which takes seconds.

Promise: where bytecode lies beside the sources, or Python can put it there, nothing changes.
"""

import os
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from compile_cache.seal import CacheError
from compile_cache.store import make_own_folder

BYTECODE = "bytecode"
VARIABLE = "PYTHONPYCACHEPREFIX"
TORCH_SOURCES = ("__init__.py", "_dynamo/symbolic_convert.py", "_inductor/compile_fx.py")
"""Some of what a start imports of torch: if these have bytecode, so will the others."""


def keep_bytecode(root: Path, environ: MutableMapping[str, str] | None = None) -> bool:
    """Have this process and its children keep bytecode below `root` if torch has none; whether so.

    Call it before torch is imported. That Python was told to write no bytecode, as container images often
    do, is taken to mean: none beside the sources.

    Args:
        environ: where child processes look; None = os.environ.
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
    """Whether Python finds torch's modules compiled; also where there is no torch."""
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
