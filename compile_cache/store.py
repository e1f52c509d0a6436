"""Opens the cache entry of this machine and its versions at start; starts share it.

    ROOT/<entry>/        see manifest.py
    ROOT/<entry>.lock    held exclusively by a start, shared by a running engine; never deleted
    ROOT/.start-*/       temporary folder of a start that finds the entry locked by another start

Promise: no state of the folder breaks a start, and torch only loads files that match the manifest. A damaged
entry goes into quarantine. Only folders of this user that others cannot write are used. All starts that
share the folder must see each other's flock locks.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from compile_cache.key import entry_name
from compile_cache.manifest import (
    FILES,
    MANIFEST,
    CacheError,
    check_entry,
    delete_unlisted,
    list_files,
    rewrite_absolute_paths,
    write_manifest,
)

LOCK = "lock"
QUARANTINE = ".quarantined"
TEMPORARY = ".start-"
UNUSED_S = 60 * 24 * 3600.0
"""Seconds after which an entry that no start has opened is deleted."""
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class OpenCache:
    """The entry that this process uses, or a temporary folder instead; torch and Triton write there.

    Attributes:
        files: the folder of what is kept.
        note: a message for the user about quarantine or a concurrent start; "" = none.
    """

    def __init__(
        self,
        files: Path,
        variables: MutableMapping[str, str],
        held: "IO[str] | TemporaryFolder",
        facts: dict[str, str],
        note: str = "",
    ) -> None:
        self.note = note
        self.files = files
        self._variables = variables
        self._held = held
        self._facts = facts
        self._set = {name: str(files / folder) for name, folder in VARIABLES.items()}
        variables.update(self._set)

    def publish(self) -> None:
        """Write the manifest of all files in the entry, and let other starts use it.

        Raises:
            CacheError: the manifest can't be written; only this process uses the compiled code then.
        """
        if isinstance(self._held, TemporaryFolder):
            return
        try:
            write_manifest(self.files.parent, self._facts, list_files(self.files))
        except OSError as error:
            raise CacheError(
                f"the compile cache in {self.files.parent} can't be published: {error}"
            ) from error
        finally:
            fcntl.flock(self._held, fcntl.LOCK_SH)

    def close(self) -> None:
        """Unlock the entry or delete the temporary folder, and reset the variables of torch and Triton."""
        for name, value in self._set.items():
            if self._variables.get(name) == value:
                del self._variables[name]
        if isinstance(self._held, TemporaryFolder):
            self._held.close()
        else:
            unlock_and_close(self._held)


class TemporaryFolder:
    """A folder that `close` deletes; if this process is killed, `delete_abandoned_folders` does."""

    def __init__(self, root: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=root, prefix=TEMPORARY, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        unseen = self.path / f"{LOCK}.new"  # `delete_abandoned_folders` must not find it before it is locked
        self._lock = open(unseen, "w", encoding="ascii")  # noqa: SIM115  (held as long as the folder)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unseen.rename(self.path / LOCK)

    def close(self) -> None:
        """Delete the folder."""
        self._folder.cleanup()
        unlock_and_close(self._lock)


def open_cache(
    root: Path, facts: dict[str, str], environ: MutableMapping[str, str] | None = None
) -> OpenCache | None:
    """Open or create the entry for these facts, and point torch and Triton to it.

    Returns None, and changes nothing, if the user has pointed them elsewhere.

    Args:
        environ: the environment variables that torch and Triton read; None = os.environ.

    Raises:
        CacheError: this process can't write the folder, or other users can.
    """
    variables = os.environ if environ is None else environ
    root = root.absolute()
    if any(_is_users_choice(variables.get(name), root) for name in VARIABLES):
        return None
    entry = root / entry_name(facts)
    try:
        make_own_folder(root)
        delete_abandoned_folders(root)
        lock = open_lock(entry)
        try:
            cache = _open_entry(entry, lock, facts, variables)
        except BaseException:
            unlock_and_close(lock)
            raise
        delete_unused_entries(root)
        if isinstance(cache, OpenCache):
            return cache
        unlock_and_close(lock)
        folder = TemporaryFolder(root)
        return OpenCache(folder.path / FILES, variables, folder, facts, cache)
    except (OSError, ValueError) as error:
        raise CacheError(f"the compile cache in {root} can't be used: {error}") from error


def _is_users_choice(folder: str | None, root: Path) -> bool:
    """Whether the user has set this folder.

    The user has not set it if it is empty, torch's default (importing torch._dynamo sets that), or below
    `root` (another engine of this process or of its parent set it).
    """
    if not folder:
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # lazy: most have set nothing

    return not any(Path(folder).is_relative_to(place) for place in (root, default_cache_dir()))


def _open_entry(
    entry: Path, lock: IO[str], facts: dict[str, str], variables: MutableMapping[str, str]
) -> OpenCache | str:
    """Open the entry, alone or together with running engines; or say why this start can't use it."""
    alone = try_lock(lock, fcntl.LOCK_EX)
    if not alone and not try_lock(lock, fcntl.LOCK_SH):
        return "another start is using the compile cache; this start compiles for itself"
    refresh_last_use(lock)
    make_own_folder(entry)
    files, note, listed = entry / FILES, "", {}
    try:
        # An entry without a manifest is new, or its first start was killed: its files are not used.
        if (entry / MANIFEST).exists():
            manifest = check_entry(entry, facts)
            listed = manifest.files
            if alone:
                rewrite_absolute_paths(entry, manifest)
    except CacheError as error:
        if not alone:
            return f"the compile cache was damaged ({error}); this start compiles for itself"
        aside = _quarantine(entry)
        note = f"the compile cache was not usable ({error}); it is put aside as {aside.name}"
    if alone:
        delete_unlisted(entry, listed)
    files.mkdir(mode=0o700, exist_ok=True)
    return OpenCache(files, variables, lock, facts, note)


def make_own_folder(folder: Path) -> None:
    """Create a folder unless it exists. Loading compiled code runs it, so other users must not write it.

    Raises:
        CacheError: the folder belongs to another user, or others may write it.
        OSError: the folder can't be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    what = "compiled code is run when it is loaded"
    if status.st_uid != os.getuid():
        raise CacheError(f"{folder} belongs to another user, and {what}; choose another cache directory")
    if status.st_mode & 0o022:
        raise CacheError(f"others may write {folder}, and {what}; chmod 700 it, or choose another one")


def open_lock(entry: Path) -> IO[str]:
    """Open the lock file of an entry. It lies beside the entry and outlives it."""
    return open(entry.with_name(f"{entry.name}.{LOCK}"), "a", encoding="ascii")


def refresh_last_use(lock: IO[str]) -> None:
    """Record that the entry of this lock is used now, so that it stays for another two months."""
    os.utime(lock.fileno())


def try_lock(lock: IO[str], kind: int) -> bool:
    """Try to take a lock, fcntl.LOCK_EX or LOCK_SH, without waiting; True if it was taken."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_and_close(lock: IO[str]) -> None:
    """Unlock and close. After closing alone, a forked child with the same file would still hold the lock."""
    if not lock.closed:
        fcntl.flock(lock, fcntl.LOCK_UN)
        lock.close()


def delete_abandoned_folders(root: Path) -> None:
    """Delete the temporary folders of processes that have ended."""
    for path in root.glob(f"{TEMPORARY}*/{LOCK}"):
        with suppress(OSError), open(path, "r+", encoding="ascii") as lock:
            if try_lock(lock, fcntl.LOCK_EX):
                shutil.rmtree(path.parent, ignore_errors=True)


def delete_unused_entries(root: Path) -> None:
    """Delete entries that no start has opened for UNUSED_S, for example those of former versions."""
    for entry in entries_in(root):
        with suppress(OSError):
            used = entry.with_name(f"{entry.name}.{LOCK}")
            if time.time() - (used if used.exists() else entry).stat().st_mtime > UNUSED_S:
                remove_entry(entry)


def entries_in(root: Path) -> list[Path]:
    """The folders of all entries, including those in quarantine."""
    return sorted(
        path for path in root.glob("[!.]*") if (path / MANIFEST).exists() or (path / FILES).exists()
    )


def remove_entry(entry: Path) -> bool:
    """Delete an entry unless it is in use; True if this call deleted it.

    Raises:
        OSError: the entry can't be deleted.
    """
    lock = open_lock(entry)
    try:
        if not try_lock(lock, fcntl.LOCK_EX):
            return False
        try:
            shutil.rmtree(entry)
        except FileNotFoundError:  # another process deletes it, too
            return False
        return True
    finally:
        unlock_and_close(lock)


def _quarantine(entry: Path) -> Path:
    """Move the files of an entry into quarantine, replacing a former one; returns the folder."""
    aside = entry.with_name(entry.name + QUARANTINE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700)
    for name in (MANIFEST, FILES):
        with suppress(FileNotFoundError):
            (entry / name).replace(aside / name)
    return aside
