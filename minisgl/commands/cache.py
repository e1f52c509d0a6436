"""`minisgl cache`: the compiled code that is kept between starts, listed, packed, unpacked and deleted.

Promise: an error of the compile cache reaches the user as a ConfigError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from compile_cache.entries import clear, export_entries, import_entries, list_entries
from compile_cache.manifest import CacheError
from minisgl.errors import ConfigError


def print_entries(folder: Path, out: TextIO) -> bool:
    """Print every entry of `folder` with its size and its problem; returns whether all entries are whole."""
    entries = list_entries(folder)
    if not entries:
        print(f"no compiled code in {folder}", file=out)
    for info in entries:
        size = f"{info.num_files} files, {info.num_bytes / 2**20:.1f} MiB"
        print(f"{info.name}  {size}  {info.problem or 'whole'}", file=out)
        if info.facts:
            print("    " + ", ".join(f"{name} {value}" for name, value in info.facts.items()), file=out)
    return not any(info.problem for info in entries)


def export_to(archive: Path, folder: Path, out: TextIO) -> None:
    """Pack all entries of `folder` into `archive`.

    Raises:
        ConfigError: the compile cache refuses.
    """
    with _cache_errors():
        num_entries = export_entries(folder, archive)
    print(f"{num_entries} entries in {archive}", file=out)


def import_from(archive: Path, folder: Path, out: TextIO) -> None:
    """Unpack `archive` into `folder` and print the names of its entries.

    Raises:
        ConfigError: the compile cache refuses.
    """
    with _cache_errors():
        names = import_entries(folder, archive)
    print("\n".join(names), file=out)


def clear_entries(folder: Path, out: TextIO) -> None:
    """Delete all entries of `folder` that no engine uses, and print how much that freed.

    Raises:
        ConfigError: the compile cache refuses.
    """
    with _cache_errors():
        freed_bytes = clear(folder)
    print(f"{freed_bytes / 2**20:.1f} MiB freed", file=out)


@contextmanager
def _cache_errors() -> Iterator[None]:
    """Turn a CacheError into a ConfigError with the same message."""
    try:
        yield
    except CacheError as error:
        raise ConfigError(str(error)) from error
