"""Commands for child processes that run a Python module.

Promise: the child imports nothing from the current folder. `python -m` and `python -c` put that folder first
on `sys.path`, and it may be a downloaded model's, with a `zmq.py` in it that would run. Python 3.11 has `-P`
for this; the way here works on every version.
"""

import sys
from pathlib import Path

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
"""The folder that this process imports minisgl from."""

BOOTSTRAP = """\
import sys
if sys.path[0] == "":
    del sys.path[0]
module, home = sys.argv[1:3]
del sys.argv[1:3]
if home not in sys.path:
    sys.path.insert(0, home)
from runpy import run_module
run_module(module, run_name="__main__", alter_sys=True)
"""
"""Only `sys`, a built-in module, is imported before the current folder is removed from the path.

The child finds minisgl where its parent did, even if only the parent's own `sys.path` has that folder.
"""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command for `python -m module arguments...` without the current folder on `sys.path`."""
    return [sys.executable, "-c", BOOTSTRAP, module, PACKAGE_PARENT, *arguments]
