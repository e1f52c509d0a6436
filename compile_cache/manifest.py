"""The manifest of a cache entry: its files with size and SHA-256, and the facts that it is for.

    ENTRY/files/{inductor,triton}/   the files of torch and Triton
    ENTRY/manifest.json              the facts, the folder in which the files were made, and the list

Promise: a manifest is replaced atomically; reading a broken one raises nothing but CacheError.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FORMAT = 1
MANIFEST, FILES = "manifest.json", "files"


class CacheError(Exception):
    """The cache can't do what was asked; the text says why and what to do."""


class Manifest(NamedTuple):
    """The content of manifest.json."""

    facts: dict[str, str]
    place: str
    """The folder of the files when the manifest was written. Triton's own lists hold absolute paths in it."""
    files: dict[str, tuple[int, str]]
    """(bytes, SHA-256) by relative path."""


def read_manifest(entry: Path) -> Manifest:
    """Read the manifest of an entry and check its types.

    Raises:
        CacheError: the manifest is missing or malformed.
    """
    try:
        return parse_manifest((entry / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CacheError("it has no manifest: its first start still runs, or was killed") from None
    except OSError as error:
        raise CacheError(f"its manifest can't be read ({error.strerror})") from None


def parse_manifest(content: bytes) -> Manifest:
    """Parse the content of a manifest file.

    Raises:
        CacheError: the content is not a manifest of this version.
    """
    wrong = CacheError("its manifest is not one of this version")
    try:
        raw = json.loads(content)
        right = raw["format"] == FORMAT and isinstance(raw["place"], str)
        right &= all(isinstance(text, str) for text in raw["facts"].values())
        files = {name: (size, digest) for name, (size, digest) in raw["files"].items()}
        for name, (size, digest) in files.items():
            inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
            right &= inside and isinstance(size, int) and isinstance(digest, str)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise wrong from None
    if not right:
        raise wrong
    return Manifest(raw["facts"], raw["place"], files)


def write_manifest(entry: Path, facts: Mapping[str, str], files: Mapping[str, tuple[int, str]]) -> None:
    """Replace the manifest of an entry.

    Raises:
        OSError: the disk is full, or the folder is gone; the former manifest stays.
    """
    content = {"format": FORMAT, "facts": facts, "place": str(entry / FILES), "files": files}
    _replace_text(entry / MANIFEST, json.dumps(content))


def check_entry(entry: Path, facts: Mapping[str, str]) -> Manifest:
    """Check that an entry is for these facts and that all its listed files are unchanged; its manifest.

    Raises:
        CacheError: a check failed.
    """
    manifest = read_manifest(entry)
    if manifest.facts != facts:
        raise CacheError("it was made on another machine or with other versions")
    for name, (size, digest) in manifest.files.items():
        path = entry / FILES / name
        try:
            if path.is_symlink() or path.stat().st_size != size or _sha256(path) != digest:
                raise CacheError(f"{name} was changed")
        except OSError as error:
            raise CacheError(f"{name} can't be read ({error.strerror})") from None
    return manifest


def rewrite_absolute_paths(entry: Path, manifest: Manifest) -> None:
    """Update the absolute paths in a checked entry that was moved, copied or imported.

    Triton lists a kernel's files with absolute paths (`__grp__*.json`). With old paths it would find none of
    them, or unchecked ones in the former folder.
    """
    files = entry / FILES
    if manifest.place == str(files):
        return
    listed = dict(manifest.files)
    for name in manifest.files:
        path = files / name
        if not path.name.startswith("__grp__"):
            continue
        try:
            group = json.loads(path.read_text(encoding="utf-8"))
            group["child_paths"] = {child: str(path.parent / child) for child in group["child_paths"]}
        except (ValueError, KeyError, TypeError):
            continue  # not in the format of this Triton
        _replace_text(path, json.dumps(group))
        listed[name] = (path.stat().st_size, _sha256(path))
    write_manifest(entry, manifest.facts, listed)


def list_files(files: Path) -> dict[str, tuple[int, str]]:
    """(size, SHA-256) by relative path of every file below `files` that is not still being written."""
    listed = {}
    for path in sorted(files_in(files)):
        parts = path.relative_to(files).parts
        unfinished = any(part.startswith("tmp.") or part.endswith(".tmp") for part in parts)
        if not path.is_symlink() and not unfinished:
            with suppress(FileNotFoundError):  # another process's temporary file
                listed[path.relative_to(files).as_posix()] = (path.stat().st_size, _sha256(path))
    return listed


def files_in(folder: Path) -> Iterator[Path]:
    """Every file below a folder; other processes may add and delete files meanwhile."""
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def delete_unlisted(entry: Path, listed: Mapping[str, object]) -> None:
    """Delete the files of an entry that are not in the list, and folders left empty."""
    for path in sorted((entry / FILES).rglob("*"), reverse=True):
        if path.is_symlink() or (path.is_file() and path.relative_to(entry / FILES).as_posix() not in listed):
            path.unlink()
        elif path.is_dir():
            with suppress(OSError):  # not empty
                path.rmdir()


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
