"""The file of API keys: who may call the server, and within which limits. JSON lines, one key each.

Promise: a file holds hashes, never keys. Keys are 256 random bits, which nobody finds by trying, so a plain
SHA-256 is enough; passwords would need a slow hash.
"""

import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from minisgl.config.field_checks import LARGEST
from minisgl.errors import ConfigError

KEY_BYTES = 32
KEY_PREFIX = "sk-"
MAX_KEY_PRIORITY = 100
"""The scheduler limits priorities to plus or minus this."""

Limit = Annotated[int, Meta(ge=1, le=LARGEST)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line of the file."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    """The user's name in metrics and logs: up to 64 letters, digits and ._@-, the first a letter or digit."""
    key_sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key as 64 small hexadecimal digits."""
    requests_per_minute: Limit | None = None
    """Calls a minute; None = no limit."""
    tokens_per_minute: Limit | None = None
    """Prompt and output tokens a minute."""
    max_concurrent_requests: Limit | None = None
    """Requests open at a time; a call with n choices for each of p prompts is n * p requests."""
    priority: Annotated[int, Meta(ge=-MAX_KEY_PRIORITY, le=MAX_KEY_PRIORITY)] = 0
    """Of requests that ask for none, and the highest that they may ask for."""
    admin: bool = False
    """Has the rights of --admin-key."""


def key_entry(fields: dict[str, object]) -> KeyEntry:
    """An entry with these fields.

    Raises:
        ConfigError: a field is missing, unknown or wrong; the message names it.
    """
    try:
        return msgspec.convert(fields, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"no API key can be as you ask: {_in_words(error)}") from None


def hash_of(key: str) -> str:
    """The `key_sha256` of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key() -> str:
    """A new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def read_api_keys(file: Path, taken: Sequence[str] = ()) -> list[KeyEntry]:
    """The entries of a file. Empty lines and lines that begin with # are left out.

    Args:
        taken: keys that are given elsewhere, as with --api-key; the file must not have them.

    Raises:
        ConfigError: the file can't be read, or a line is wrong; the message names it.
    """
    try:
        lines = file.expanduser().read_bytes().decode().splitlines()
    except OSError as error:
        raise ConfigError(f"--api-keys-file {file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-keys-file {file} must be UTF-8 text, one JSON object a line") from None
    elsewhere = {hash_of(key) for key in taken}
    entries: list[KeyEntry] = []
    names: dict[str, int] = {}
    hashes: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"--api-keys-file {file}, line {number}"
        try:
            entry = msgspec.json.decode(line, type=KeyEntry)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}: {_in_words(error)}") from None
        if entry.name in names:
            raise ConfigError(f"{where}: line {names[entry.name]} has the name {entry.name}, too")
        if entry.key_sha256 in hashes:
            raise ConfigError(f"{where} ({entry.name}): line {hashes[entry.key_sha256]} has the same key")
        if entry.key_sha256 in elsewhere:
            raise ConfigError(f"{where} ({entry.name}): its key is also given with --api-key or --admin-key")
        names[entry.name] = hashes[entry.key_sha256] = number
        entries.append(entry)
    return entries


def append_api_key(file: Path, entry: KeyEntry) -> None:
    """Add an entry to a file, which is made if it is missing.

    Raises:
        ConfigError: the file can't be read or written, has a wrong line, or has the name already.
    """
    file = file.expanduser()
    known = read_api_keys(file) if file.exists() else []
    if any(entry.name == other.name for other in known):
        raise ConfigError(f"{file} has a key named {entry.name} already; remove its line first")
    line = msgspec.json.encode(entry) + b"\n"
    try:
        with open(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b") as opened:
            end = opened.seek(0, os.SEEK_END)
            if end:
                opened.seek(end - 1)
                line = line if opened.read(1) == b"\n" else b"\n" + line
            opened.write(line)
    except OSError as error:
        raise ConfigError(f"{file} can't be written: {error.strerror}") from None


def _in_words(error: msgspec.DecodeError) -> str:
    """What is wrong with a line. msgspec names the field as `$.field`."""
    if not isinstance(error, msgspec.ValidationError):
        return f"it is not a JSON object: {error}"
    text = str(error)
    for pattern, words in (
        ("[0-9a-f]{64}", "must be a SHA-256 as 64 small hexadecimal digits - at `key_sha256`"),
        ("[A-Za-z0-9]", "must be up to 64 letters, digits and ._@-, first a letter or digit - at `name`"),
    ):
        if pattern in text:
            return words
    return text.replace("`$.", "`")
