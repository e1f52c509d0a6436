"""Where Python's bytecode goes: nowhere else than usual, unless torch has none and will get none."""

import os
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from compile_cache import bytecode
from compile_cache.bytecode import BYTECODE, TORCH_SOURCES, keep_bytecode
from compile_cache.entries import clear


@pytest.fixture
def torch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch without bytecode, in a place that Python can't or shall not write to."""
    folder = tmp_path / "site" / "torch"
    for source in TORCH_SOURCES:
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        (folder / source).write_text("ANSWER = 42\n")
    (folder / "_inductor" / "__init__.py").touch()
    monkeypatch.setattr(bytecode, "_torch_folder", lambda: folder)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return folder


def add_bytecode(folder: Path, sources: tuple[str, ...] = TORCH_SOURCES) -> None:
    for source in sources:
        compiled = Path(cache_from_source(str(folder / source)))
        compiled.parent.mkdir(exist_ok=True)
        compiled.touch()


def test_a_torch_without_bytecode_gets_it_in_the_cache(torch_folder: Path, tmp_path: Path) -> None:
    environ = {"PYTHONDONTWRITEBYTECODE": "1"}
    add_bytecode(torch_folder, TORCH_SOURCES[:1])
    root = tmp_path / "compiled"
    assert keep_bytecode(root, environ)
    assert environ == {"PYTHONPYCACHEPREFIX": str(root / BYTECODE)}
    assert sys.pycache_prefix == str(root / BYTECODE)
    assert not sys.dont_write_bytecode
    assert (root / BYTECODE).stat().st_mode & 0o777 == 0o700
    path = {"PATH": os.environ["PATH"], "PYTHONPATH": str(torch_folder.parent)}
    subprocess.run(
        [sys.executable, "-c", "import torch._inductor.compile_fx"], env=environ | path, check=True
    )
    assert [file for file in root.rglob("*.pyc") if file.name.startswith("compile_fx")]
    assert clear(root) > 0
    assert not (root / BYTECODE).exists()


@pytest.mark.parametrize("why", ["it is there", "Python will write it", "the user has chosen", "unsafe"])
def test_otherwise_nothing_changes(
    torch_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    root = tmp_path / "compiled"
    if why == "it is there":
        add_bytecode(torch_folder)
    elif why == "Python will write it":
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
    elif why == "the user has chosen":
        monkeypatch.setattr(sys, "pycache_prefix", "/elsewhere")
    else:
        root.mkdir()
        root.chmod(0o777)
    before = (sys.pycache_prefix, sys.dont_write_bytecode)
    environ: dict[str, str] = {}
    assert not keep_bytecode(root, environ)
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == before
    assert environ == {}


def test_a_folder_that_can_not_be_written_counts_as_one_that_python_will_not_write_to(
    torch_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda path, mode: path != torch_folder)
    assert keep_bytecode(tmp_path / "compiled", {})
