"""What makes an entry trustworthy: a seal that lists its files, with size and SHA-256, and what they are for.

    ENTRY/files/{inductor,triton}/   what torch and Triton write
    ENTRY/seal.json                  the facts it is for, the place it was made in, and the list

Promise: a seal replaces the former one whole or not at all, and whatever lies in its file is read without
another error than CacheError.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FORMAT = 1
SEAL, FILES = "seal.json", "files"


class CacheError(Exception):
    """The cache can't be used as asked; the text says why and what to do."""


class Seal(NamedTuple):
    """The content of seal.json."""

    facts: dict[str, str]
    place: str
    """The folder of the files when it was written; Triton's own lists have absolute paths in them."""
    files: dict[str, tuple[int, str]]
    """(bytes, SHA-256) by relative path."""


def read_seal(entry: Path) -> Seal:
    """The seal of an entry, its types checked.

    Raises:
        CacheError: there is none, or it is not one.
    """
    try:
        return parse_seal((entry / SEAL).read_bytes())
    except FileNotFoundError:
        raise CacheError("it has no seal: its first start still runs, or was killed") from None
    except OSError as error:
        raise CacheError(f"its seal can't be read ({error.strerror})") from None


def parse_seal(content: bytes) -> Seal:
    """The seal that a file holds.

    Raises:
        CacheError: it holds something else.
    """
    wrong = CacheError("its seal is not one of this version")
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
    return Seal(raw["facts"], raw["place"], files)


def write_seal(entry: Path, facts: Mapping[str, str], files: Mapping[str, tuple[int, str]]) -> None:
    """Replace the seal of an entry.

    Raises:
        OSError: the disk is full, or somebody took the folder away; the former seal stays.
    """
    content = {"format": FORMAT, "facts": facts, "place": str(entry / FILES), "files": files}
    _replace_text(entry / SEAL, json.dumps(content))


def check_entry(entry: Path, facts: Mapping[str, str]) -> Seal:
    """The seal of an entry that is for these facts and has all that is listed, unchanged.

    Raises:
        CacheError: it is not so.
    """
    seal = read_seal(entry)
    if seal.facts != facts:
        raise CacheError("it was made on another machine or with other versions")
    for name, (size, digest) in seal.files.items():
        path = entry / FILES / name
        try:
            if path.is_symlink() or path.stat().st_size != size or _sha256(path) != digest:
                raise CacheError(f"{name} was changed")
        except OSError as error:
            raise CacheError(f"{name} can't be read ({error.strerror})") from None
    return seal


def settle_in(entry: Path, seal: Seal) -> None:
    """Make a whole entry that was moved, copied or unpacked say where its files are now.

    Triton lists the files of a kernel with absolute paths (`__grp__*.json`): it would find none of them, or
    those in the former place, which nobody checks.
    """
    files = entry / FILES
    if seal.place == str(files):
        return
    listed = dict(seal.files)
    for name in seal.files:
        path = files / name
        if not path.name.startswith("__grp__"):
            continue
        try:
            group = json.loads(path.read_text(encoding="utf-8"))
            group["child_paths"] = {child: str(path.parent / child) for child in group["child_paths"]}
        except (ValueError, KeyError, TypeError):
            continue  # not as this Triton writes it
        _replace_text(path, json.dumps(group))
        listed[name] = (path.stat().st_size, _sha256(path))
    write_seal(entry, seal.facts, listed)


def list_files(files: Path) -> dict[str, tuple[int, str]]:
    """(size, SHA-256) of every file below `files`, by its relative path, but those still being written."""
    listed = {}
    for path in sorted(files_in(files)):
        parts = path.relative_to(files).parts
        unfinished = any(part.startswith("tmp.") or part.endswith(".tmp") for part in parts)
        if not path.is_symlink() and not unfinished:
            with suppress(FileNotFoundError):  # somebody's temporary file
                listed[path.relative_to(files).as_posix()] = (path.stat().st_size, _sha256(path))
    return listed


def files_in(folder: Path) -> Iterator[Path]:
    """Every file below a folder in which others may be working: what vanishes meanwhile is passed over."""
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent, name)


def delete_unlisted(entry: Path, listed: Mapping[str, object]) -> None:
    """Delete all files of an entry that are not in the list, and the folders that are empty then."""
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
