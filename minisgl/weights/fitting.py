"""Compares what a checkpoint's files hold with what a model needs.

Promise: every difference is an error that names the tensor: one that is missing or surplus, of the wrong
shape, or of other numbers than the model's quantization says.
"""

import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.errors import ModelError
from minisgl.model_config.config import ModelConfig

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8 = "F8_E4M3"
DTYPES = FLOAT_DTYPES | {FP8: torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
SCALE_DTYPES = FLOAT_DTYPES.keys() | {"F8_E8M0"}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that some checkpoints (Phi-3's) store fused, with the parts' rows one after the other."""
SCALE = "scale"
"""Is part of the name of every scale in a checkpoint."""
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale")
NAMES_SHOWN = 6


class StoredTensor(NamedTuple):
    """A tensor's entry in a file's header."""

    path: Path
    shape: list[int]
    dtype: str  # as safetensors writes it, for example "BF16"
    begin: int  # offset of its bytes in the file


def take_scales_to_compute(targets: dict[str, Tensor], config: ModelConfig) -> dict[int, Tensor]:
    """Remove from `targets` the scales that no checkpoint has because the loader computes them.

    Returns them by the id of the weight that they belong to.
    """
    if config.quantization is None or not config.quantization.while_loading:
        return {}
    suffix = "." + config.quantization.scheme.scale_name
    names = [name for name in targets if name.endswith(suffix)]
    return {id(targets[name.removesuffix(suffix) + ".weight"]): targets.pop(name) for name in names}


def is_shared(stored: StoredTensor, parts: list[Tensor]) -> bool:
    """Whether a fused layer has one scale for all of its parts, each of which gets it."""
    return len(parts) > 1 and math.prod(stored.shape) == 1


def parts_of_each(stored: Iterable[str], targets: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The parameters that each checkpoint tensor fills; several for a fused tensor."""
    parts = {name: [target] for name, target in targets.items()}
    for name in stored:
        layer, _, kind = name.rpartition(".")
        outer, _, leaf = layer.rpartition(".")
        members = [f"{outer}.{part}.{kind}" for part in FUSED.get(leaf, ())]
        if members and name not in parts and all(member in parts for member in members):
            parts[name] = [parts.pop(member)[0] for member in members]
    return parts


def check_fit(
    parts: dict[str, list[Tensor]], stored: dict[str, StoredTensor], config: ModelConfig, folder: Path
) -> dict[str, StoredTensor]:
    """Compare the model's parameters with the files' headers.

    Returns the entries with their parameters' shapes: that of a scale may have further dimensions of 1.

    Raises:
        ModelError: a tensor is missing, unexpected, of the wrong shape or of other numbers than needed.
    """
    complaints = []
    missing = sorted(parts.keys() - stored.keys())
    if missing:
        complaints.append(f"missing: {joined_names(missing)}")
    unexpected = sorted(name for name in stored.keys() - parts.keys() if not _ignorable(name, config))
    if unexpected:
        complaints.append(f"not part of {config.architecture}: {joined_names(unexpected)}")
    common = sorted(parts.keys() & stored.keys())
    shapes, kinds, fitting = [], [], {}
    for name in common:
        found = stored[name]
        needed = [sum(part.shape[0] for part in parts[name]), *parts[name][0].shape[1:]]
        same = found.shape == needed
        if SCALE in name.rpartition(".")[2]:
            same = is_shared(found, parts[name]) or _without_ones(found.shape) == _without_ones(needed)
        if not same:
            shapes.append(f"{name} is {found.shape}, needed {needed}")
        wanted = _wanted_dtypes(name, parts[name][0], config)
        if found.dtype not in wanted:
            kinds.append(f"{name} is {found.dtype}, needed {' or '.join(sorted(wanted))}")
        if not is_shared(found, parts[name]):
            found = found._replace(shape=needed)
        fitting[name] = found
    if shapes:
        complaints.append(f"wrong shape: {joined_names(shapes)}")
    if kinds:
        complaints.append(f"numbers of another kind: {joined_names(kinds)}")
    if complaints:
        raise ModelError(f"the weights in {folder} do not fit its config.json; " + "; ".join(complaints))
    return fitting


def _wanted_dtypes(name: str, target: Tensor, config: ModelConfig) -> Collection[str]:
    """The dtypes that this tensor may have in a file."""
    if target.dtype == DTYPES[FP8] and not (config.quantization and config.quantization.while_loading):
        return [FP8]
    return SCALE_DTYPES if SCALE in name.rpartition(".")[2] else FLOAT_DTYPES


def _without_ones(shape: list[int]) -> list[int]:
    """The shape without dimensions of 1 at its end."""
    sizes = list(shape)
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return sizes


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Whether the checkpoint may contain this tensor although the model does not use it."""
    copy_of_the_embedding = name == "lm_head.weight" and config.tie_word_embeddings
    quantization = config.quantization
    of_the_cache = quantization is not None and quantization.cache_scales and name.endswith(CACHE_SCALES)
    is_unread = config.cache_scale_names is None or name.endswith(".q_scale")
    return copy_of_the_embedding or (of_the_cache and is_unread) or name.endswith("rotary_emb.inv_freq")


def joined_names(items: Iterable[str]) -> str:
    items = list(items)
    more = f" and {len(items) - NAMES_SHOWN} more" if len(items) > NAMES_SHOWN else ""
    return ", ".join(items[:NAMES_SHOWN]) + more
