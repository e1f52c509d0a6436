"""What compiled code belongs to: an entry of the cache is for one GPU model and one set of versions.

Promise: facts are plain text, so an entry can say on disk what it is for.
"""

import hashlib
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SOURCE_SUFFIXES = (".py", ".json")


def machine_facts(device: "torch.device") -> dict[str, str]:
    """What code compiled for a CUDA device depends on, besides the code that was compiled."""
    import torch  # both lazy: looking after the entries needs neither
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
        "driver": _driver_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def entry_name(facts: Mapping[str, str]) -> str:
    """A folder name that other facts do not have: the GPU for people, a hash for certainty."""
    text = "\n".join(f"{name}={facts[name]}" for name in sorted(facts))
    gpu = "".join(c if c.isalnum() else "-" for c in facts.get("gpu", "unknown").lower())
    return f"{gpu}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def sources_digest(folders: Iterable[Path]) -> str:
    """A hash of all sources below the folders: torch's cache does not see the host code around a kernel."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in SOURCE_SUFFIXES:
                digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"
