"""Lists, deletes, exports and imports cache entries.

Promise: an entry that a start or a running engine uses stays unchanged.
"""

import fcntl
import io
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from compile_cache.bytecode import BYTECODE
from compile_cache.key import entry_name
from compile_cache.manifest import (
    FILES,
    MANIFEST,
    CacheError,
    check_entry,
    files_in,
    parse_manifest,
    read_manifest,
)
from compile_cache.store import (
    QUARANTINE,
    TemporaryFolder,
    delete_abandoned_folders,
    entries_in,
    make_own_folder,
    open_lock,
    refresh_last_use,
    remove_entry,
    try_lock,
    unlock_and_close,
)

PACKED_LIMIT_BYTES = 8 << 30


class EntryInfo(NamedTuple):
    """A cache entry as `list_entries` reports it."""

    name: str
    facts: dict[str, str]
    """Empty if the entry has no manifest."""
    num_files: int
    num_bytes: int
    problem: str  # "" = complete and unchanged


def list_entries(root: Path) -> list[EntryInfo]:
    """All entries, with the problem of each that is incomplete or damaged."""
    found = []
    for entry in entries_in(root):
        facts: dict[str, str] = {}
        problem = ""
        try:
            facts = read_manifest(entry).facts
            if entry.name.endswith(QUARANTINE):
                problem = "in quarantine"
            else:
                check_entry(entry, facts)
        except CacheError as error:
            problem = str(error)
        sizes = _sizes(entry / FILES)
        found.append(EntryInfo(entry.name, facts, len(sizes), sum(sizes), problem))
    return found


def clear(root: Path) -> int:
    """Delete the bytecode and all entries that are not in use; returns the bytes freed.

    Raises:
        CacheError: an entry can't be deleted.
    """
    freed = 0
    with _as_cache_error(f"the compile cache in {root} can't be cleared"):
        delete_abandoned_folders(root)
        freed += sum(_sizes(root / BYTECODE))
        shutil.rmtree(root / BYTECODE, ignore_errors=True)
        for entry in entries_in(root):
            num_bytes = sum(_sizes(entry))
            freed += num_bytes if remove_entry(entry) else 0
    return freed


def export_entries(root: Path, target: Path) -> int:
    """Export all complete entries to a .tar.gz for machines of the same kind; returns their number.

    Raises:
        CacheError: there is no complete entry, or the file can't be written.
    """
    whole = [info for info in list_entries(root) if not info.problem]
    if not whole:
        raise CacheError(f"there is no compiled code in {root}; start an engine on a GPU once")
    partial = target.with_name(target.name + ".partial")
    try:
        with _as_cache_error(f"{target} can't be written"):
            with tarfile.open(partial, "w:gz", compresslevel=3) as archive:
                for info in whole:
                    _pack(root / info.name, archive)
            partial.replace(target)
    finally:
        with suppress(OSError):
            partial.unlink()
    return len(whole)


def import_entries(root: Path, source: Path) -> list[str]:
    """Import an archive of `export_entries`; returns the names of its entries, which replace existing ones.

    Import only files from people you trust: the compiled code will run.

    Raises:
        CacheError: the file is no such archive, an entry in it is incomplete or damaged, or an entry that it
            would replace is in use. Nothing changes then.
    """
    locks = []
    with _as_cache_error(f"{root} can't be written"):
        make_own_folder(root)
        delete_abandoned_folders(root)
        folder = TemporaryFolder(root)
    try:
        stage = folder.path / FILES
        stage.mkdir(mode=0o700)
        with _as_cache_error(f"{source} is not an exported compile cache"):
            with tarfile.open(source, "r:gz") as archive:
                _unpack(archive, stage)
            entries = sorted(stage.iterdir())
            if not entries:
                raise CacheError("there is no entry in it")
            for entry in entries:
                facts = check_entry(entry, read_manifest(entry).facts).facts
                if entry.name != entry_name(facts):
                    raise CacheError(f"{entry.name} is not named by the facts in it")
        for entry in entries:
            locks.append(open_lock(root / entry.name))
            if not try_lock(locks[-1], fcntl.LOCK_EX):
                raise CacheError(f"{root / entry.name} is in use; import when the engine is stopped")
            refresh_last_use(locks[-1])
        with _as_cache_error(f"the compile cache in {root} can't be replaced"):
            for entry in entries:
                shutil.rmtree(root / entry.name, ignore_errors=True)
                entry.replace(root / entry.name)
    finally:
        for lock in locks:
            unlock_and_close(lock)
        folder.close()
    return [entry.name for entry in entries]


@contextmanager
def _as_cache_error(what: str) -> Iterator[None]:
    """Turn errors of the block into a CacheError whose text begins with `what`."""
    try:
        yield
    except (CacheError, OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise CacheError(f"{what}: {error}") from error


def _sizes(folder: Path) -> list[int]:
    sizes = []
    for path in files_in(folder):
        with suppress(FileNotFoundError):  # an engine has renamed it meanwhile
            sizes.append(path.stat().st_size)
    return sizes


def _pack(entry: Path, archive: tarfile.TarFile) -> None:
    # Read once: an engine may publish the entry again meanwhile.
    content = (entry / MANIFEST).read_bytes()
    member = tarfile.TarInfo(f"{entry.name}/{MANIFEST}")
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
    for file in parse_manifest(content).files:
        archive.add(entry / FILES / file, f"{entry.name}/{FILES}/{file}", recursive=False)


def _unpack(archive: tarfile.TarFile, stage: Path) -> None:
    """Unpack regular files into `stage`, at most PACKED_LIMIT_BYTES in all.

    Raises:
        CacheError: the archive is larger, or has a member of another kind or a path outside of `stage`.
    """
    total = 0
    for member in archive:
        path = PurePosixPath(member.name)
        total += member.size
        if not member.isfile() or path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
            raise CacheError(f"{member.name!r} does not belong into one")
        if total > PACKED_LIMIT_BYTES:
            raise CacheError(f"it unpacks to more than {PACKED_LIMIT_BYTES >> 30} GiB")
        target = stage / path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = archive.extractfile(member) or io.BytesIO()
        with open(target, "wb") as file:
            shutil.copyfileobj(content, file)
