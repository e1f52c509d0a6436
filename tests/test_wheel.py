"""The wheel and the source archive: what is in them, and that minisgl runs from the wheel alone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib.metadata import version
from pathlib import Path

import pytest

from minisgl import __version__

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("compile_cache", "minisgl", "triton_kernels")
FILES = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Makefile",
)
BUILD = "from setuptools import build_meta as build; import sys; getattr(build, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because a build writes beside the sources; with tests, which no archive has."""
    # Not imported here, where something may have imported the standard library's distutils.
    if int(version("setuptools").split(".")[0]) < 70:
        pytest.skip("builds without the network need setuptools 70 here")
    folder = tmp_path_factory.mktemp("sources")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in (*PACKAGES, "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    shutil.copy(__file__, folder / "tests")
    return folder


def build(sources: Path, hook: str) -> Path:
    """Call one of the functions by which pip and build make an archive; return the archive."""
    out = sources / "out" / hook
    out.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(out)], cwd=sources, check=True, capture_output=True
    )
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    return build(sources, "build_wheel")


def files_of_packages() -> set[str]:
    """All files there are, so that none has to be listed here: code, tuned tables, markers."""
    found = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    assert wheel.name == f"minisgl-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if name.startswith(f"minisgl-{__version__}.dist-info/")}
    assert names - about == files_of_packages()
    assert "triton_kernels/tuned/nvidia-h200.json" in names


def test_the_wheel_says_what_it_needs_and_which_command_it_brings(wheel: Path) -> None:
    archive, about = zipfile.ZipFile(wheel), f"minisgl-{__version__}.dist-info"
    metadata = message_from_bytes(archive.read(f"{about}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("minisgl", __version__)
    assert metadata["Requires-Python"] == ">=3.10"
    needed = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert any(each.startswith("torch") for each in needed)
    assert archive.read(f"{about}/entry_points.txt").decode().split() == [
        "[console_scripts]",
        "minisgl",
        "=",
        "minisgl.cli:main",
    ]


def test_minisgl_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(folder)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(folder)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=elsewhere, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "serve" in run("-m", "minisgl", "--help")
    assert run("-m", "minisgl", "--version") == f"minisgl {__version__}\n"
    places = run(
        "-c", "import " + ", ".join(PACKAGES) + "; print(" + ".__file__, ".join(PACKAGES) + ".__file__)"
    )
    assert places.split() == [str(folder / name / "__init__.py") for name in PACKAGES]


def test_the_source_archive_is_enough_to_build_the_wheel(sources: Path) -> None:
    with tarfile.open(build(sources, "build_sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not name.endswith("/")}
    assert files_of_packages() | {*FILES, "docs/operations.md"} <= names
    assert not any(name.startswith(("tests", "bench")) for name in names)
