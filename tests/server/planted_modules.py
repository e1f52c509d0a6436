"""A folder as a stranger may have made it: its modules have the names of what we import, and leave a mark."""

from pathlib import Path

NAMES = ("aiohttp", "json", "msgspec", "numpy", "pip", "runpy", "socket", "torch", "transformers", "zmq")
LEAVE_A_MARK = "open(__file__ + '.ran', 'w').close()\n"


def plant_modules(folder: Path) -> Path:
    """Make `folder` such a one, and return it."""
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(LEAVE_A_MARK)
    return folder


def imported_from(folder: Path) -> list[str]:
    """Files of the folder that a process has imported."""
    return sorted(mark.stem for mark in folder.rglob("*.ran"))
