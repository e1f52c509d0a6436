"""A start and its entry: one folder for each machine and set of versions, which starts share.

    ROOT/<entry>/        see seal.py
    ROOT/<entry>.lock    held: exclusively by a start, shared by an engine that runs; never deleted
    ROOT/.start-*/       what a start compiles for itself while another one holds the entry

Promise: no state of the folder breaks a start. Only what the seal lists is ever offered to torch: an entry
whose listed files are missing or changed, or whose facts are another machine's, goes into quarantine and is
built anew; what is not listed (a start that was killed, or never finished) is deleted, unless an engine that
runs may have made it. Temporary folders of starts that were killed go with the next start, and so do entries
that no start has opened for two months.

Loading compiled code is running it, so only folders count that belong to this user and that nobody else may
write. Locks are those of flock: all starts that share the folder must see each other's.
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
from compile_cache.seal import (
    FILES,
    SEAL,
    CacheError,
    check_entry,
    delete_unlisted,
    list_files,
    settle_in,
    write_seal,
)

LOCK = "lock"
QUARANTINE = ".quarantined"
TEMPORARY = ".start-"
UNUSED_S = 60 * 24 * 3600.0
"""An entry that no start has opened for so long is deleted."""
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class OpenCache:
    """An entry in use by this process, or a temporary folder in its place; torch and Triton look there.

    Attributes:
        note: what a user may want to know, "" if nothing: quarantine, another start at the same time.
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
        self._files = files
        self._variables = variables
        self._held = held
        self._facts = facts
        self._set = {name: str(files / folder) for name, folder in VARIABLES.items()}
        variables.update(self._set)

    def seal(self) -> None:
        """List all that is in the entry now, and let other starts use it; this start is over.

        Raises:
            CacheError: the list can't be written; what was compiled stays for this process only.
        """
        if isinstance(self._held, TemporaryFolder):
            return
        try:
            write_seal(self._files.parent, self._facts, list_files(self._files))
        except OSError as error:
            raise CacheError(f"the compile cache in {self._files.parent} can't be sealed: {error}") from error
        finally:
            fcntl.flock(self._held, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let the entry go, delete a temporary folder, and point torch and Triton nowhere."""
        for name, value in self._set.items():
            if self._variables.get(name) == value:
                del self._variables[name]
        if isinstance(self._held, TemporaryFolder):
            self._held.close()
        else:
            release(self._held)


class TemporaryFolder:
    """A folder in the root that goes away with this process, or at the latest when somebody sweeps."""

    def __init__(self, root: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=root, prefix=TEMPORARY, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        unseen = self.path / f"{LOCK}.new"  # `sweep` must not find it before it is locked
        self._lock = open(unseen, "w", encoding="ascii")  # noqa: SIM115  (held as long as the folder)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unseen.rename(self.path / LOCK)

    def close(self) -> None:
        """Delete it."""
        self._folder.cleanup()
        release(self._lock)


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
    root = root.absolute()
    if any(_is_users_choice(variables.get(name), root) for name in VARIABLES):
        return None
    entry = root / entry_name(facts)
    try:
        make_own_folder(root)
        sweep(root)
        lock = open_lock(entry)
        try:
            cache = _open_entry(entry, lock, facts, variables)
        except BaseException:
            release(lock)
            raise
        expire(root)
        if isinstance(cache, OpenCache):
            return cache
        release(lock)
        folder = TemporaryFolder(root)
        return OpenCache(folder.path / FILES, variables, folder, facts, cache)
    except (OSError, ValueError) as error:
        raise CacheError(f"the compile cache in {root} can't be used: {error}") from error


def _is_users_choice(folder: str | None, root: Path) -> bool:
    """Not set, or in torch's own default, which importing torch._dynamo sets: nobody chose it. Below the
    root: another engine of this process, or of the one that started it, did."""
    if not folder:
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # lazy: most have set nothing

    return not any(Path(folder).is_relative_to(place) for place in (root, default_cache_dir()))


def _open_entry(
    entry: Path, lock: IO[str], facts: dict[str, str], variables: MutableMapping[str, str]
) -> OpenCache | str:
    """The entry, opened alone or beside engines that run; or why this start must compile for itself."""
    alone = try_lock(lock, fcntl.LOCK_EX)
    if not alone and not try_lock(lock, fcntl.LOCK_SH):
        return "another start is using the compile cache; this start compiles for itself"
    mark_used(lock)
    make_own_folder(entry)
    files, note, listed = entry / FILES, "", {}
    try:
        # Without a seal it is new, or its first start never ended: nothing in it counts.
        if (entry / SEAL).exists():
            seal = check_entry(entry, facts)
            listed = seal.files
            if alone:
                settle_in(entry, seal)
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
    """Make a folder if there is none.

    Raises:
        CacheError: it is another user's, or others may write it.
        OSError: it can't be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    what = "compiled code is run when it is loaded"
    if status.st_uid != os.getuid():
        raise CacheError(f"{folder} belongs to another user, and {what}; choose another cache directory")
    if status.st_mode & 0o022:
        raise CacheError(f"others may write {folder}, and {what}; chmod 700 it, or choose another one")


def open_lock(entry: Path) -> IO[str]:
    """The file that starts lock to use an entry. It lies beside the entry, and stays when that goes."""
    return open(entry.with_name(f"{entry.name}.{LOCK}"), "a", encoding="ascii")


def mark_used(lock: IO[str]) -> None:
    """Keep the entry of this lock from being deleted for another two months."""
    os.utime(lock.fileno())


def try_lock(lock: IO[str], kind: int) -> bool:
    """Take a lock, fcntl.LOCK_EX or LOCK_SH, if nobody is in the way; whether it was taken."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(lock: IO[str]) -> None:
    """Unlock and close; closing alone would leave it locked by a forked child that has the file, too."""
    if not lock.closed:
        fcntl.flock(lock, fcntl.LOCK_UN)
        lock.close()


def sweep(root: Path) -> None:
    """Delete the temporary folders of processes that are gone."""
    for path in root.glob(f"{TEMPORARY}*/{LOCK}"):
        with suppress(OSError), open(path, "r+", encoding="ascii") as lock:
            if try_lock(lock, fcntl.LOCK_EX):
                shutil.rmtree(path.parent, ignore_errors=True)


def expire(root: Path) -> None:
    """Delete the entries that nobody has used for long, of former drivers and versions for example."""
    for entry in entries_in(root):
        with suppress(OSError):
            used = entry.with_name(f"{entry.name}.{LOCK}")
            if time.time() - (used if used.exists() else entry).stat().st_mtime > UNUSED_S:
                remove_entry(entry)


def entries_in(root: Path) -> list[Path]:
    """The folders of all entries, those in quarantine included."""
    return sorted(path for path in root.glob("[!.]*") if (path / SEAL).exists() or (path / FILES).exists())


def remove_entry(entry: Path) -> bool:
    """Delete an entry that nobody is using; whether it was deleted.

    Raises:
        OSError: it can't be deleted.
    """
    lock = open_lock(entry)
    try:
        if not try_lock(lock, fcntl.LOCK_EX):
            return False
        shutil.rmtree(entry)
        return True
    finally:
        release(lock)


def _quarantine(entry: Path) -> Path:
    """Put what the entry holds aside, and say where; a former quarantine of it goes."""
    aside = entry.with_name(entry.name + QUARANTINE)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700)
    for name in (SEAL, FILES):
        with suppress(FileNotFoundError):
            (entry / name).replace(aside / name)
    return aside
