"""What must be the same in a server and in all engines that come to it, so that an answer can move between
them: the model, its tokenizer, and the settings that change the numbers.

The speed settings (--tp, memory, graphs, attention) may differ.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from minisgl.config.engine import ResolvedConfig

CONFIG = "the model's config.json"
TOKENIZER = "the model's tokenizer.json"
WEIGHTS = "the model's weights"
SAMPLE_BYTES = 4096
"""Read at the beginning, the middle and the end of each weights file: models of one shape differ there."""


def server_facts(folder: Path) -> dict[str, str]:
    """What a server knows of the model in `folder`, which may have no weights: name -> value."""
    return {CONFIG: _digest(folder / "config.json"), TOKENIZER: _digest(folder / "tokenizer.json")}


def folder_facts(folder: Path) -> dict[str, str]:
    """What the model in `folder` is, with its weights: name -> value."""
    return {**server_facts(folder), WEIGHTS: _weights_digest(folder)}


def engine_facts(config: ResolvedConfig, folder: Path) -> dict[str, str]:
    """What an engine is: name -> value."""
    return {
        **server_facts(folder),
        WEIGHTS: "random" if config.dummy_weights else _weights_digest(folder),
        "--dtype": config.dtype,
        "--quantization": config.quantization or "none",
        "--kv-dtype": config.kv_dtype or config.dtype,
        "--max-context-tokens": str(config.max_context_tokens),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first difference in what both know, in words; empty = there is none."""
    for name, value in ours.items():
        other = theirs.get(name, value)
        if other != value:
            return f"{name} must be the same: here it is {value}, this engine has {other}"
    return ""


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else "missing"


def _weights_digest(folder: Path) -> str:
    """A digest of the names and sizes of the weights files, and of samples of each."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as data:
            for start in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                data.seek(start)
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
