"""The key of a cache entry: one model of GPU or processor, and one set of versions.

Promise: facts are plain text, so an entry on disk can say what it is for.
"""

import hashlib
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SOURCE_SUFFIXES = (".py", ".json")


def machine_facts(device: "torch.device") -> dict[str, str]:
    """The facts about a CUDA device and the software on which compiled code depends."""
    import torch  # both lazy: listing and deleting entries needs neither
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


def processor_facts() -> dict[str, str]:
    """The facts about this machine's processor and the software on which code compiled for it depends."""
    import torch  # lazy, as above

    lines = {"model name": platform.processor(), "flags": ""}
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        lines |= {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in file)}
    return {
        "cpu": lines["model name"],
        "instructions": hashlib.sha256(lines["flags"].encode()).hexdigest()[:16],
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def entry_name(facts: Mapping[str, str]) -> str:
    """A folder name that is unique to these facts: the name of the GPU or processor, and a hash."""
    text = "\n".join(f"{name}={facts[name]}" for name in sorted(facts))
    chip = facts.get("gpu") or facts.get("cpu") or "unknown"
    chip = "".join(c if c.isalnum() else "-" for c in chip.lower())
    return f"{chip}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def sources_digest(folders: Iterable[Path]) -> str:
    """A hash of all sources below the folders; torch's own cache key lacks the host code around kernels."""
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
