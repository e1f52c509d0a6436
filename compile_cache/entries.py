"""Looking after the entries: list them, delete them, pack them for machines of the same kind.

Promise: an entry that a start or an engine is using is left as it is.
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
from compile_cache.seal import FILES, SEAL, CacheError, check_entry, files_in, parse_seal, read_seal
from compile_cache.store import (
    QUARANTINE,
    TemporaryFolder,
    entries_in,
    make_own_folder,
    mark_used,
    open_lock,
    release,
    remove_entry,
    sweep,
    try_lock,
)

PACKED_LIMIT_BYTES = 8 << 30


class EntryInfo(NamedTuple):
    """What `list_entries` says of one entry."""

    name: str
    facts: dict[str, str]
    """Empty where there is no seal that says them."""
    num_files: int
    num_bytes: int
    problem: str  # "" = whole


def list_entries(root: Path) -> list[EntryInfo]:
    """All entries, with what is wrong with those that are not whole."""
    found = []
    for entry in entries_in(root):
        facts: dict[str, str] = {}
        problem = ""
        try:
            facts = read_seal(entry).facts
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
    """Delete all entries that nobody is using, and Python's bytecode; returns the bytes freed.

    Raises:
        CacheError: they can't be deleted.
    """
    freed = 0
    with _our_errors(f"the compile cache in {root} can't be cleared"):
        sweep(root)
        freed += sum(_sizes(root / BYTECODE))
        shutil.rmtree(root / BYTECODE, ignore_errors=True)
        for entry in entries_in(root):
            num_bytes = sum(_sizes(entry))
            freed += num_bytes if remove_entry(entry) else 0
    return freed


def export_entries(root: Path, target: Path) -> int:
    """Pack all whole entries into a .tar.gz for machines of the same kind; returns how many there are.

    Raises:
        CacheError: there is no whole entry, or the file can't be written.
    """
    whole = [info for info in list_entries(root) if not info.problem]
    if not whole:
        raise CacheError(f"there is no compiled code in {root}; start an engine on a GPU once")
    partial = target.with_name(target.name + ".partial")
    try:
        with _our_errors(f"{target} can't be written"):
            with tarfile.open(partial, "w:gz", compresslevel=3) as archive:
                for info in whole:
                    _pack(root / info.name, archive)
            partial.replace(target)
    finally:
        with suppress(OSError):
            partial.unlink()
    return len(whole)


def import_entries(root: Path, source: Path) -> list[str]:
    """Unpack what `export_entries` packed, each entry in place of the one that is there; their names.

    Take only files from people you trust: compiled code will be run.

    Raises:
        CacheError: the file is no such archive, or an entry in it is not whole, or one that it would replace
            is in use. Nothing is changed then.
    """
    locks = []
    with _our_errors(f"{root} can't be written"):
        make_own_folder(root)
        sweep(root)
        folder = TemporaryFolder(root)
    try:
        stage = folder.path / FILES
        stage.mkdir(mode=0o700)
        with _our_errors(f"{source} is not an exported compile cache"):
            with tarfile.open(source, "r:gz") as archive:
                _unpack(archive, stage)
            entries = sorted(stage.iterdir())
            if not entries:
                raise CacheError("there is no entry in it")
            for entry in entries:
                facts = check_entry(entry, read_seal(entry).facts).facts
                if entry.name != entry_name(facts):
                    raise CacheError(f"{entry.name} is not named by the facts in it")
        for entry in entries:
            locks.append(open_lock(root / entry.name))
            if not try_lock(locks[-1], fcntl.LOCK_EX):
                raise CacheError(f"{root / entry.name} is in use; import when the engine is stopped")
            mark_used(locks[-1])
        with _our_errors(f"the compile cache in {root} can't be replaced"):
            for entry in entries:
                shutil.rmtree(root / entry.name, ignore_errors=True)
                entry.replace(root / entry.name)
    finally:
        for lock in locks:
            release(lock)
        folder.close()
    return [entry.name for entry in entries]


@contextmanager
def _our_errors(what: str) -> Iterator[None]:
    """Raise what goes wrong in the block as a CacheError that begins with `what`."""
    try:
        yield
    except (CacheError, OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise CacheError(f"{what}: {error}") from error


def _sizes(folder: Path) -> list[int]:
    sizes = []
    for path in files_in(folder):
        with suppress(FileNotFoundError):  # an engine renamed it meanwhile
            sizes.append(path.stat().st_size)
    return sizes


def _pack(entry: Path, archive: tarfile.TarFile) -> None:
    sealed = (entry / SEAL).read_bytes()  # as it is now: an engine may seal the entry anew meanwhile
    member = tarfile.TarInfo(f"{entry.name}/{SEAL}")
    member.size = len(sealed)
    archive.addfile(member, io.BytesIO(sealed))
    for file in parse_seal(sealed).files:
        archive.add(entry / FILES / file, f"{entry.name}/{FILES}/{file}", recursive=False)


def _unpack(archive: tarfile.TarFile, stage: Path) -> None:
    """Regular files only, each inside the stage, and not without bound.

    Raises:
        CacheError: there is something else in the archive.
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
