"""Says which GPUs each engine of --replicas gets, and refuses settings that do not go with --replicas.

GPUs are counted by their device files, because the server process does not load torch.
"""

from pathlib import Path
from typing import Any

from minisgl.config import EngineConfig, ServerConfig
from minisgl.errors import ConfigError

DEVICES = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each GPU of NVIDIA's driver."""


def check_replicas(
    server: ServerConfig, engine: EngineConfig, visible_gpus: str | None, devices: Path = DEVICES
) -> None:
    """Refuse settings that do not go with several engines, and more engines than there are GPUs for.

    Args:
        visible_gpus: the value of CUDA_VISIBLE_DEVICES; None = it is not set.

    Raises:
        ConfigError: such a setting was given, or GPUs are missing.
    """
    num = server.replicas
    if num == 1:
        return
    if engine.kv_events_endpoint is not None:
        raise ConfigError(
            f"--replicas {num} does not go with --kv-events-endpoint, got {engine.kv_events_endpoint!r}: "
            "each engine would need an address of its own; run a server for each engine"
        )
    if engine.device == "cpu":
        return
    gpus = gpu_names(visible_gpus, devices)
    needed, there = num * engine.tp, None if gpus is None else len(gpus)
    if there is not None and there < needed and (there or engine.device == "cuda"):
        limit = " (CUDA_VISIBLE_DEVICES)" if visible_gpus is not None else ""
        raise ConfigError(
            f"--replicas {num} with --tp {engine.tp} needs {needed} GPUs, and {there} are here{limit}; lower "
            "one of the two, or take --device cpu"
        )


def replica_workers(
    worker: dict[str, Any], num_replicas: int, tp: int, visible_gpus: str | None
) -> list[dict[str, Any]]:
    """The settings of each engine, its first line on stdin: `worker` with a share of processor and GPUs.

    Replica i gets the GPUs from i * tp on, of those that are visible.
    """
    if num_replicas == 1:
        return [worker]
    if visible_gpus is None:
        names = [str(number) for number in range(num_replicas * tp)]
    else:
        names = _names(visible_gpus)
    return [
        {
            **worker,
            "num_engines": num_replicas,
            "visible_gpus": ",".join(names[number * tp : (number + 1) * tp]),
        }
        for number in range(num_replicas)
    ]


def gpu_names(visible_gpus: str | None, devices: Path = DEVICES) -> list[str] | None:
    """The GPUs that torch will see, as CUDA_VISIBLE_DEVICES names them; None = unknown."""
    if visible_gpus is not None:
        return _names(visible_gpus)
    return [str(number) for number in range(len(list(devices.iterdir())))] if devices.is_dir() else None


def _names(visible_gpus: str) -> list[str]:
    """The GPUs in CUDA_VISIBLE_DEVICES, which ends at the first -1."""
    names = [name.strip() for name in visible_gpus.split(",") if name.strip()]
    return names[: names.index("-1")] if "-1" in names else names
