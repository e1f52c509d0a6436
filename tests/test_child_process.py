"""Children that run a Python module: from where they import, and what reaches them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted_modules import imported_from, plant_modules

from minisgl.ipc.child_process import module_command

CHILDREN = (
    ("minisgl.engine.worker", (), 1),
    ("minisgl.engine.ranks.follower", (), 1),
    ("minisgl.server.processes.api_worker", (), 1),
    ("minisgl.benchmark.steps.startup_child", (), 1),
    ("pip", ("--version",), 0),
)
"""Module, arguments, exit code: those of ours end once their imports are done, as nobody tells them more."""


def run(command: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env={**clean, **environ}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@pytest.mark.parametrize(("module", "arguments", "code"), CHILDREN)
def test_no_child_imports_from_the_current_folder(
    module: str, arguments: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    folder = plant_modules(tmp_path / "downloaded")
    done = run(module_command(module, *arguments), folder)
    assert imported_from(folder) == []
    assert done.returncode == code, done.stderr
    assert "No module named" not in done.stderr


def test_python_m_would_import_from_it(tmp_path: Path) -> None:
    folder = plant_modules(tmp_path / "downloaded")
    run([sys.executable, "-m", "minisgl.engine.worker"], folder, PYTHONPATH=os.pathsep.join(sys.path))
    assert "msgspec.py" in imported_from(folder)


def test_a_child_imports_minisgl_from_where_its_parent_does(tmp_path: Path) -> None:
    package = tmp_path / "elsewhere" / "minisgl"
    (package / "ipc").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "ipc" / "__init__.py").touch()
    source = Path(sys.modules[module_command.__module__].__file__ or "")
    (package / "ipc" / "child_process.py").write_text(source.read_text())
    (package / "child.py").write_text("import minisgl, sys; print(minisgl.__file__, sys.argv[1:])")
    parent = "from minisgl.ipc.child_process import module_command; import json, sys;"
    parent += "print(json.dumps(module_command('minisgl.child', 'a b', '')))"
    command = json.loads(run([sys.executable, "-c", parent], package.parent).stdout)
    said = run(command, tmp_path).stdout
    assert said == f"{package / '__init__.py'} ['a b', '']\n"


def test_a_module_that_is_missing_is_named(tmp_path: Path) -> None:
    done = run(module_command("no_such_module"), tmp_path)
    assert done.returncode == 1
    assert "No module named no_such_module" in done.stderr
