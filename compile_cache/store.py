"""The compile cache on disk: one folder for each machine and set of versions, sealed by a list of its files.

    ROOT/<entry>/lock                       held: exclusively by a start, shared by an engine that runs
    ROOT/<entry>/files/{inductor,triton}/   what torch and Triton write
    ROOT/<entry>/seal.json                  the facts it is for, and size and SHA-256 of every file

Promise: no state of the folder breaks a start. Only what the seal lists is ever offered to torch: an entry
whose listed files are missing or changed, or whose facts are another machine's, goes into quarantine and is
built anew; what is not listed (a start that was killed, or never finished) is deleted, unless an engine that
runs may have made it. While another start holds the entry, this one compiles into a folder of its own, which
goes away with it.

Loading compiled code is running it, so only folders count that belong to this user and that nobody else may
write.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from compile_cache.key import entry_name

FORMAT = 1
SEAL, FILES, LOCK = "seal.json", "files", "lock"
QUARANTINE = ".quarantined"
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
PACKED_LIMIT_BYTES = 8 << 30


class CacheError(Exception):
    """The folder can't be used; the text says why and what to do."""


class EntryInfo(NamedTuple):
    """What `list_entries` says of one entry."""

    name: str
    facts: dict[str, str]
    num_files: int
    num_bytes: int
    problem: str  # "" = whole


class OpenCache:
    """An entry in use by this process, or a temporary folder in its place.

    Attributes:
        note: what a user may want to know, "" if nothing: quarantine, another start at the same time.
        was_empty: nothing was there to be reused.
    """

    def __init__(
        self,
        files: Path,
        facts: dict[str, str],
        *,
        entry: Path | None = None,
        lock: IO[str] | None = None,
        temporary: tempfile.TemporaryDirectory[str] | None = None,
        note: str = "",
    ) -> None:
        self._files = files
        self._facts = facts
        self._entry = entry
        self._lock = lock
        self._temporary = temporary
        self.note = note
        self.was_empty = not any(path.is_file() for path in files.rglob("*"))

    def seal(self) -> None:
        """List all that is in the entry now, and let other starts use it; this start is over."""
        if self._entry is not None and self._lock is not None:
            _write_seal(self._entry, self._facts, _list_files(self._files))
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let the entry go, and delete a temporary folder."""
        if self._lock is not None:
            self._lock.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def open_cache(
    root: Path, facts: dict[str, str], environ: MutableMapping[str, str] | None = None
) -> OpenCache | None:
    """Point torch and Triton at the entry for these facts, made if there is none; None = the user has
    pointed them elsewhere.

    Args:
        environ: where torch and Triton look; None = os.environ.

    Raises:
        CacheError: the folder can't be written, or somebody else could write it.
    """
    variables = os.environ if environ is None else environ
    if any(variables.get(name) for name in VARIABLES):
        return None
    entry = root / entry_name(facts)
    try:
        for folder in (root, entry):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_what_others_can_write(folder)
        lock = open(entry / LOCK, "a", encoding="ascii")  # noqa: SIM115  (held as long as the engine runs)
        alone = _try_lock(lock, fcntl.LOCK_EX)
        if not alone and not _try_lock(lock, fcntl.LOCK_SH):
            lock.close()
            return _open_temporary(root, facts, variables, "another start is using the compile cache")
        note = ""
        try:
            _check_entry(entry, facts)
        except CacheError as error:
            if not alone:
                lock.close()
                return _open_temporary(root, facts, variables, f"the compile cache was damaged ({error})")
            _quarantine(entry)
            note = f"the compile cache was not usable ({error}); it is put aside as {entry.name}{QUARANTINE}"
        if alone:
            _delete_unlisted(entry)
        files = entry / FILES
        files.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CacheError(f"the compile cache in {root} can't be used: {error}") from error
    _point_at(files, variables)
    return OpenCache(files, facts, entry=entry, lock=lock, note=note)


def list_entries(root: Path) -> list[EntryInfo]:
    """All entries, with what is wrong with those that are not whole."""
    found = []
    for entry in sorted(path for path in root.glob("*") if (path / SEAL).exists() or (path / FILES).exists()):
        facts: dict[str, str] = {}
        files: dict[str, Any] = {}
        problem = ""
        try:
            seal = _read_seal(entry)
            facts, files = seal["facts"], seal["files"]
            if not entry.name.endswith(QUARANTINE):
                _check_entry(entry, facts)
            else:
                problem = "in quarantine"
        except CacheError as error:
            problem = str(error)
        num_bytes = sum(size for size, _ in files.values())
        found.append(EntryInfo(entry.name, facts, len(files), num_bytes, problem))
    return found


def clear(root: Path) -> int:
    """Delete all entries that no start is using; returns the bytes freed."""
    freed = 0
    for entry in [path for path in root.glob("*") if (path / FILES).exists() or (path / SEAL).exists()]:
        with open(entry / LOCK, "a", encoding="ascii") as lock:
            if not _try_lock(lock, fcntl.LOCK_EX):
                continue
            freed += sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
            shutil.rmtree(entry)
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
        with tarfile.open(partial, "w:gz", compresslevel=3) as archive:
            for info in whole:
                seal = _read_seal(root / info.name)
                for name in (SEAL, *(f"{FILES}/{file}" for file in seal["files"])):
                    archive.add(root / info.name / name, f"{info.name}/{name}", recursive=False)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CacheError(f"{target} can't be written: {error}") from error
    return len(whole)


def import_entries(root: Path, source: Path) -> list[str]:
    """Unpack what `export_entries` packed, each entry in place of the one that is there; their names.

    Take only files from people you trust: compiled code will be run.

    Raises:
        CacheError: the file is no such archive, or an entry in it is not whole. Nothing is changed then.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_what_others_can_write(root)
    with tempfile.TemporaryDirectory(dir=root, prefix=".import-") as name:
        stage = Path(name)
        try:
            with tarfile.open(source, "r:gz") as archive:
                _unpack(archive, stage)
        except (OSError, tarfile.TarError, EOFError) as error:
            raise CacheError(f"{source} is not an exported compile cache: {error}") from error
        entries = sorted(path for path in stage.iterdir() if path.is_dir())
        if not entries:
            raise CacheError(f"there is no entry in {source}")
        for entry in entries:
            _check_entry(entry, _read_seal(entry)["facts"])
            if entry.name != entry_name(_read_seal(entry)["facts"]):
                raise CacheError(f"{entry.name} in {source} is not named by the facts in it")
        for entry in entries:
            target = root / entry.name
            shutil.rmtree(target, ignore_errors=True)
            entry.replace(target)
    return [entry.name for entry in entries]


def _try_lock(lock: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_temporary(
    root: Path, facts: dict[str, str], variables: MutableMapping[str, str], why: str
) -> OpenCache:
    temporary = tempfile.TemporaryDirectory(dir=root, prefix=".concurrent-", ignore_cleanup_errors=True)
    files = Path(temporary.name)
    _point_at(files, variables)
    return OpenCache(files, facts, temporary=temporary, note=f"{why}; this start compiles for itself")


def _point_at(files: Path, variables: MutableMapping[str, str]) -> None:
    for name, folder in VARIABLES.items():
        variables[name] = str(files / folder)


def _refuse_what_others_can_write(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CacheError(
            f"others may write {folder}, and compiled code is run when it is loaded; "
            f"chmod 700 it, or choose another cache directory"
        )


def _check_entry(entry: Path, facts: Mapping[str, str]) -> None:
    """Raises CacheError: the entry has a seal, and is not what the seal says or not for these facts."""
    if not (entry / SEAL).exists():
        return  # new, or its first start never ended: nothing in it counts
    seal = _read_seal(entry)
    if seal["facts"] != facts:
        raise CacheError("it was made on another machine or with other versions")
    for name, (size, digest) in seal["files"].items():
        path = entry / FILES / name
        try:
            if path.is_symlink() or path.stat().st_size != size or _sha256(path) != digest:
                raise CacheError(f"{name} was changed")
        except OSError:
            raise CacheError(f"{name} is missing") from None


def _read_seal(entry: Path) -> dict[str, Any]:
    """The seal of an entry, its types checked.

    Raises:
        CacheError: there is none, or it is not one.
    """
    try:
        seal = json.loads((entry / SEAL).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CacheError(f"its seal can't be read ({type(error).__name__})") from None
    try:
        right = seal["format"] == FORMAT and isinstance(seal["facts"], dict)
        for name, (size, digest) in seal["files"].items():
            inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
            right &= inside and isinstance(size, int) and isinstance(digest, str)
    except (KeyError, TypeError, ValueError, AttributeError):
        right = False
    if not right:
        raise CacheError("its seal is not one of this version")
    return seal


def _write_seal(entry: Path, facts: Mapping[str, str], files: dict[str, tuple[int, str]]) -> None:
    partial = entry / (SEAL + ".partial")
    partial.write_text(json.dumps({"format": FORMAT, "facts": facts, "files": files}), encoding="utf-8")
    partial.replace(entry / SEAL)


def _list_files(files: Path) -> dict[str, tuple[int, str]]:
    """(size, SHA-256) of every file below `files`, by its relative path, but those still being written."""
    listed = {}
    for path in sorted(files.rglob("*")):
        unfinished = any("tmp" in part for part in path.relative_to(files).parts)
        if path.is_file() and not path.is_symlink() and not unfinished:
            with suppress(FileNotFoundError):  # somebody's temporary file
                listed[path.relative_to(files).as_posix()] = (path.stat().st_size, _sha256(path))
    return listed


def _delete_unlisted(entry: Path) -> None:
    listed = _read_seal(entry)["files"] if (entry / SEAL).exists() else {}
    for path in sorted((entry / FILES).rglob("*"), reverse=True):
        if path.is_symlink() or (path.is_file() and path.relative_to(entry / FILES).as_posix() not in listed):
            path.unlink()
        elif path.is_dir():
            with suppress(OSError):  # not empty
                path.rmdir()


def _quarantine(entry: Path) -> None:
    """Put what the entry holds aside; a former quarantine of it goes."""
    aside = entry.with_name(entry.name + QUARANTINE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700)
    for name in (SEAL, FILES):
        with suppress(FileNotFoundError):
            (entry / name).replace(aside / name)


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
            raise CacheError(f"{member.name!r} does not belong into an exported compile cache")
        if total > PACKED_LIMIT_BYTES:
            raise CacheError(f"it unpacks to more than {PACKED_LIMIT_BYTES >> 30} GiB")
        target = stage / path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = archive.extractfile(member) or io.BytesIO()
        with open(target, "wb") as file:
            shutil.copyfileobj(content, file)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
