"""Where the new engines of a reload run: beside the old ones if there is room, else in their places."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError


class Places(NamedTuple):
    """Where and when the new engines start."""

    beside: bool
    """Whether they start while the old ones still run."""
    gpus: Sequence[str]
    """CUDA_VISIBLE_DEVICES of each; empty texts = it is left as it is."""


def choose_places(
    engine: EngineConfig,
    gpus_in_use: Mapping[int, Sequence[str]],
    gpus: Sequence[str] | None,
    *,
    is_on_gpu: bool,
    numbers: Sequence[int],
    beside: bool | None,
) -> Places:
    """The places of new engines, which replace the engines with these numbers.

    Args:
        engine: their settings.
        gpus_in_use: the GPUs of each running engine, by its number.
        gpus: all GPUs that the server may use; None = unknown.
        is_on_gpu: whether the new engines run on GPUs.
        beside: what the caller wants; None = beside if there is room.

    Raises:
        ConfigError: there is no room, at all or for what the caller wants.
    """
    num_needed = engine.tp * len(numbers) if is_on_gpu else 0
    known = [] if gpus is None else list(gpus)
    spare = [name for name in known if not any(name in own for own in gpus_in_use.values())]
    has_fixed_address = bool(engine.kv_events_endpoint or engine.kv_events_replay_endpoint)
    has_room = not has_fixed_address and (not is_on_gpu or (gpus is not None and len(spare) >= num_needed))
    if beside and not has_room:
        why = (
            "two engines can't have the address of --kv-events-endpoint"
            if has_fixed_address
            else f"needs {num_needed} spare GPUs, and {len(spare)} are here"
        )
        raise ConfigError(
            f"--beside does not go: {why}; leave it out, and calls wait while the engine starts"
        )
    if beside or (beside is None and has_room):
        return Places(True, _split_gpus(spare if is_on_gpu else [], engine.tp, len(numbers)))
    free = [*(name for number in numbers for name in gpus_in_use[number]), *spare]
    if is_on_gpu and gpus is not None and len(free) < num_needed:
        raise ConfigError(f"--tp {engine.tp} needs {num_needed} GPUs, and {len(free)} are free for this")
    return Places(False, _split_gpus(free if is_on_gpu else [], engine.tp, len(numbers)))


def _split_gpus(names: Sequence[str], tp: int, num_engines: int) -> list[str]:
    return [",".join(names[number * tp : (number + 1) * tp]) for number in range(num_engines)]
