"""`minisgl api-key`: makes an API key, and its line for --api-keys-file."""

from pathlib import Path
from typing import TextIO

import msgspec

from minisgl.config.api_keys import append_api_key, hash_of, key_entry, new_key


def run_api_key(fields: dict[str, object], file: Path | None, stdout: TextIO, stderr: TextIO) -> None:
    """Make a key and show it, once. Its line goes into `file`, or to `stdout` if that is None.

    Args:
        fields: those of a `KeyEntry` but its hash.

    Raises:
        ConfigError: a field is wrong, or the file can't be used.
    """
    key = new_key()
    entry = key_entry({**fields, "key_sha256": hash_of(key)})
    if file is None:
        stdout.write(msgspec.json.encode(entry).decode() + "\n")
        stderr.write(f"the key of {entry.name}, which is shown only now: {key}\n")
        return
    append_api_key(file, entry)
    stdout.write(key + "\n")
    stderr.write(f"the key of {entry.name} is shown only now; its hash is in {file}\n")
