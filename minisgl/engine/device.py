"""What this machine offers, found out once before settings are resolved."""

from importlib import metadata
from pathlib import Path

import torch

from minisgl.config import GIB, DeviceFacts


def find_device_facts() -> DeviceFacts:
    """The facts that `resolve_engine_config` decides by."""
    has_cuda = torch.cuda.is_available()
    return DeviceFacts(
        has_cuda=has_cuda,
        cuda_name=torch.cuda.get_device_name() if has_cuda else "",
        num_gpus=torch.cuda.device_count() if has_cuda else 0,
        compute_capability=torch.cuda.get_device_capability() if has_cuda else (0, 0),
        flashinfer=flashinfer_version(),
        cpu_has_bf16=cpu_has_bf16(),
    )


def flashinfer_version() -> str:
    """The installed package's version; empty = there is none."""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return ""


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 (Linux on x86 tells; elsewhere False)."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def free_host_bytes() -> int:
    """Memory this machine could still give a process (Linux: MemAvailable; elsewhere 8 GiB are assumed)."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * GIB


def peak_host_bytes() -> int:
    """Most memory that this process has had resident so far, mapped files included; 0 where nobody tells."""
    try:
        # Not getrusage(): its figure begins with that of the process this one was started by.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
