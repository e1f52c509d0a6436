"""Detects the hardware of this machine, once, before the settings are resolved."""

import ctypes
from importlib import metadata
from pathlib import Path

import torch

from minisgl.attention.choice import OLDEST_GPU
from minisgl.config import GIB, DeviceFacts

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
_KEPT_BLOCK_BYTES, _KEPT_BYTES = 32 << 20, 512 << 20
"""Largest block that is kept when it is freed, glibc's own maximum, and most free bytes that are kept."""


def find_device_facts() -> DeviceFacts:
    """Collect the facts that `resolve_engine_config` needs."""
    has_cuda = torch.cuda.is_available()
    return DeviceFacts(
        has_cuda=has_cuda,
        cuda_name=torch.cuda.get_device_name() if has_cuda else "",
        num_gpus=torch.cuda.device_count() if has_cuda else 0,
        compute_capability=torch.cuda.get_device_capability() if has_cuda else (0, 0),
        flashinfer=flashinfer_version(),
        cpu_has_bf16=cpu_has_bf16(),
    )


def kernel_tuning(gpu: str, capability: tuple[int, int]) -> str:
    """For which GPU the launch configurations were measured that a GPU of this name takes, as a clause."""
    from triton_kernels.tuning import find_tables, table_path  # lazy: it imports Triton, which a CPU may lack

    if capability < OLDEST_GPU:
        return "too old for the kernels"
    tables = [path.stem for path in find_tables(gpu, capability)]
    if not tables:
        return "kernels not tuned (minisgl tune --model MODEL)"
    if tables[0] == table_path(gpu).stem:
        return "kernels tuned for it"
    return f"kernels as tuned for {', '.join(tables)}: the same multiprocessors"


def flashinfer_version() -> str:
    """The installed flashinfer's version; empty if it is not installed."""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return ""


def cpu_has_bf16() -> bool:
    """Whether the processor has bfloat16 instructions. Always False outside Linux on x86."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def keep_freed_memory() -> bool:
    """Have the C library keep memory that a step frees for the next step.

    Otherwise each long prompt's temporaries go back to the system, and every first touch of the next ones is
    a page fault. Returns whether the library can; glibc can.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def release_freed_memory() -> None:
    """Have the C library give back to the system what is free now, if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_host_bytes() -> int:
    """Host memory that a process can still allocate: MemAvailable on Linux, 8 GiB elsewhere."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * GIB


def peak_host_bytes() -> int:
    """Peak resident memory of this process so far, mapped files included; 0 outside Linux."""
    try:
        # Not getrusage(): its figure starts at the parent process's peak.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
